"""Pages of the documentation whose code needs a JVM: run here, in the one that is there."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.docs.pages import ROOT, blocks
from tests.docs.test_snippets import page_module, run_block
from tests.spark.kit import append, mixed_records

PAGES = [
    "docs/how-to/read-the-lake-with-duckdb.md",
    "docs/how-to/make-a-report.md",
    "docs/reference/pipeline-jobs.md",
]


@pytest.fixture
def runner() -> Generator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_the_snippets_of_a_page_run(
    page: str,
    spark: SparkSession,
    runner: asyncio.Runner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert SparkSession.getActiveSession() == spark
    append(tmp_path / "shop.db", mixed_records(20))
    monkeypatch.chdir(tmp_path)
    programs = [block for block in blocks(ROOT / page) if block.language == "python"]
    assert programs
    with page_module(ROOT / page) as module:
        for block in programs:
            run_block(block, ROOT / page, module, runner)
