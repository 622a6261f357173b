"""Pages and examples with Spark in them run and print what they say, on the one session."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.docs.pages import Block, page_id, programs, spark_examples, spark_pages
from tests.docs.test_examples import announced, run_example
from tests.docs.test_snippets import page_module, run_block

by_value: Any = import_module("pyspark.cloudpickle")


SPARKS_PATH = re.compile(r"""(parquet\(f?|"path", |"checkpointLocation", )"(?!/)""")


def in_folder(block: Block, folder: Path) -> Block:
    """With paths for Spark in a folder: the JVM's working folder is where it was started."""
    return replace(block, text=SPARKS_PATH.sub(rf'\g<1>"{folder}/', block.text))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", spark_pages(), ids=page_id)
def test_the_snippets_of_a_page_run_and_print_what_it_says(
    page: Path, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with page_module(page) as module, asyncio.Runner() as runner:
        # Workers cannot import a page. In a program or a notebook this is the rule for __main__.
        by_value.register_pickle_by_value(module)
        try:
            for block, expected in programs(page):
                printed = run_block(in_folder(block, tmp_path), page, module, runner)

                assert expected is None or printed == expected, f"{page_id(page)}:{block.line}"
        finally:
            by_value.unregister_pickle_by_value(module)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("example", spark_examples(), ids=lambda example: example.stem)
def test_an_example_prints_what_it_says(example: Path, tmp_path: Path) -> None:
    done = run_example(example, tmp_path, timeout=300)

    assert (done.returncode, done.stdout) == (0, announced(example)), done.stderr
