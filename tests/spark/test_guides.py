"""Pages and examples with Spark in them run and print what they say, on the one session."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from benchmarks.walk import listed, walk
from tests.docs.pages import Block, page_id, programs, spark_examples, spark_pages
from tests.docs.test_examples import announced
from tests.docs.test_snippets import check, page_module
from tests.docs.test_tutorials import TUTORIALS, follow, run_commands, steps
from tests.spark.processes import SHORT_LIVED

by_value: Any = import_module("pyspark.cloudpickle")


SPARKS_PATH = re.compile(
    r"""((?:parquet\(f?|"path", |"checkpointLocation", )"|"url", "sqlite:///)(?!/)"""
)


def in_folder(block: Block, folder: Path) -> Block:
    """With paths for Spark in a folder: the JVM's working folder is where it was started."""
    return replace(block, text=SPARKS_PATH.sub(rf"\g<1>{folder}/", block.text))


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
            for program in programs(page):
                block = in_folder(program.block, tmp_path)
                check(replace(program, block=block), page, module, runner)
        finally:
            by_value.unregister_pickle_by_value(module)
    assert spark.range(1).count() == 1  # it has not been stopped


def test_the_page_on_architecture_lists_the_files_of_a_query_in_order(spark: SparkSession) -> None:
    assert list(listed("spark")) == list(walk("spark"))
    assert spark.range(1).count() == 1  # it has not been stopped


@pytest.mark.timeout(600)
def test_the_examples_print_what_they_say(tmp_path: Path) -> None:
    examples = spark_examples()
    # One after the other in one process: the second is spared the start of a JVM.
    program = (
        "import runpy, sys; [runpy.run_path(one, run_name='__main__') for one in sys.argv[1:]]"
    )
    command = [sys.executable, "-W", "error", "-X", "utf8", "-c", program, *map(str, examples)]

    done = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", timeout=300, check=False,
        cwd=tmp_path, env={**os.environ, **SHORT_LIVED},
    )  # fmt: skip

    expected = "".join(map(announced, examples))
    assert (done.returncode, done.stdout) == (0, expected), done.stderr
    # Nor does Spark say what nobody has asked it: that is all it has to say. The rest is the
    # bus's own, of a handler that fails on purpose, with its traceback.
    ours = re.compile(r"^  \| |send_receipt")
    spoken = [line for line in done.stderr.splitlines() if not ours.search(line)]
    assert {line.split(":")[0] for line in spoken} <= {"Picked up JAVA_TOOL_OPTIONS", "WARNING"}


@pytest.mark.timeout(900)
def test_the_tutorial_is_right_as_one_program_and_once_more_in_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (page,) = set(spark_pages()) & set(TUTORIALS)
    for name, value in SHORT_LIVED.items():
        monkeypatch.setenv(name, value)
    whole = steps(page)[-1]

    follow(page, tmp_path, [whole, whole])
    run_commands(page, tmp_path)

    assert (tmp_path / "report.html").stat().st_size > 10_000
