"""The snippets of pages about Spark run, and print what the pages say."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.docs.pages import blocks, page_id, pages
from tests.docs.test_snippets import page_module, run_block

MARK = "<!-- not run: needs Spark; run by tests/spark/test_pages.py -->"
PAGES = [page for page in pages() if MARK in page.read_text(encoding="utf-8")]


@contextmanager
def sent_whole(module: ModuleType) -> Generator[None]:
    """Have classes of a module travel to workers, as those of a user's program do."""
    cloudpickle: Any = import_module("pyspark.cloudpickle")
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_snippets_of_a_page_about_spark_run(
    page: Path, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # for what is read and written here
    found = blocks(page)
    with page_module(page) as module, sent_whole(module), asyncio.Runner() as runner:
        for block, after in zip(found, [*found[1:], None], strict=True):
            if block.language != "python" or block.is_run:
                continue
            # Paths of Spark's own are relative to where the JVM was started.
            text = block.text.replace("sqlite:///shop.db", f"sqlite:///{tmp_path}/shop.db")
            printed = run_block(replace(block, text=text), page, module, runner)

            if after is not None and after.follows and after.language == "text":
                assert printed == after.text, f"{page_id(page)}:{block.line}"
    assert spark.range(1).count() == 1  # it has not been stopped
