"""The end of the demo: a report if the pipeline is there, else a word on how to get one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from msgbus import MissingExtraError, MsgBusError
from msgbus.demo import report
from msgbus.demo.durable.folder import Folder
from msgbus.demo.screen import Screen

STAND_IN = """
from pathlib import Path
from msgbus import MsgBusError

class Pipe:
    def __init__(self, url):
        self.url = url

    def report(self, path):
        if "broken" in self.url:
            raise MsgBusError("There is no Java here.")
        if "odd" in self.url:
            raise RuntimeError("first line\\nsecond line")
        Path(path).write_text(f"report on {self.url}")
        return path

def open(url):
    return Pipe(url)
"""
"""A module in place of the pipeline, which would start a JVM: tests/spark has the real one."""


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stand_in_pipeline.py").write_text(STAND_IN)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    monkeypatch.setattr(report, "PIPELINE", "stand_in_pipeline")
    monkeypatch.setattr(report, "NEEDED", ("stand_in_pipeline",))


@pytest.fixture
def no_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "NEEDED", ("no_such_module_anywhere",))


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


def a_folder(tmp_path: Path, name: str) -> Folder:
    folder = Folder(tmp_path / name)
    folder.begin_anew()
    return folder


@pytest.mark.usefixtures("pipeline")
@pytest.mark.parametrize("is_wanted", [True, False])
def test_the_pipeline_runs_over_the_journal_and_the_place_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_wanted: bool
) -> None:
    folder = a_folder(tmp_path, "files")

    Screen().end(folder, is_wanted=is_wanted)

    assert folder.report.read_text() == f"report on {folder.url}"
    assert f"The report is in {folder.report}" in capsys.readouterr().out


@pytest.mark.usefixtures("no_pipeline")
def test_without_it_one_line_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Screen().end(a_folder(tmp_path, "files"), is_wanted=False)

    assert capsys.readouterr().out.strip().splitlines() == [report.HOW_TO]
    assert 'pip install "msgbus[spark]"' in report.HOW_TO


@pytest.mark.usefixtures("no_pipeline")
def test_a_report_that_was_asked_for_must_be_possible(tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'msgbus\[spark\]'"):
        Screen().end(a_folder(tmp_path, "files"), is_wanted=True)


@pytest.mark.usefixtures("pipeline")
@pytest.mark.parametrize(
    ("name", "text"),
    [("broken", "There is no Java here."), ("odd", "RuntimeError: first line")],
)
def test_one_that_nobody_asked_for_may_fail_in_a_line(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Screen().end(a_folder(tmp_path, name), is_wanted=False)

    assert f"No report this time: {text}\n" in capsys.readouterr().out


@pytest.mark.usefixtures("pipeline")
def test_one_that_was_asked_for_may_not(tmp_path: Path) -> None:
    with pytest.raises(MsgBusError, match="no Java"):
        Screen().end(a_folder(tmp_path, "broken"), is_wanted=True)
