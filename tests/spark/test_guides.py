"""Pages and examples with Spark in them run and print what they say, on the one session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.docs.pages import page_id, programs, spark_examples, spark_pages
from tests.docs.test_examples import announced, run_example
from tests.docs.test_snippets import page_module, run_block

by_value: Any = import_module("pyspark.cloudpickle")


@pytest.fixture
def folder(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder of Python, and of the JVM, which began elsewhere."""
    monkeypatch.chdir(tmp_path)
    jvm: Any = spark.sparkContext._jvm
    hadoop = jvm.org.apache.hadoop.fs
    files = hadoop.FileSystem.get(spark._jsparkSession.sessionState().newHadoopConf())
    before = files.getWorkingDirectory()
    files.setWorkingDirectory(hadoop.Path(str(tmp_path)))
    yield tmp_path
    files.setWorkingDirectory(before)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", spark_pages(), ids=page_id)
def test_the_snippets_of_a_page_run_and_print_what_it_says(page: Path, folder: Path) -> None:
    with page_module(page) as module, asyncio.Runner() as runner:
        # Workers cannot import a page. In a program or a notebook this is the rule for __main__.
        by_value.register_pickle_by_value(module)
        try:
            for block, expected in programs(page):
                printed = run_block(block, page, module, runner)

                assert expected is None or printed == expected, f"{page_id(page)}:{block.line}"
        finally:
            by_value.unregister_pickle_by_value(module)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("example", spark_examples(), ids=lambda example: example.stem)
def test_an_example_prints_what_it_says(example: Path, tmp_path: Path) -> None:
    done = run_example(example, tmp_path, timeout=300)

    assert (done.returncode, done.stdout) == (0, announced(example)), done.stderr
