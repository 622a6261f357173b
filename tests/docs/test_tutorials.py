"""20.7: a tutorial is right when it is followed literally, in one file, as often as one likes.

The one with Spark is followed by tests/spark/test_guides.py.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, blocks, fits, page_id, programs, spark_pages

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PLAIN = [page for page in TUTORIALS if page not in spark_pages()]


def file_of(page: Path) -> str:
    """The name of the file that the reader makes."""
    (name,) = re.findall(r"Make a file `(\w+\.py)`", page.read_text(encoding="utf-8"))
    return str(name)


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of the page, with the Python of the tests."""
    words = shlex.split(command)
    assert words[0] == "python", command
    return subprocess.run(
        [sys.executable, *words[1:]],
        capture_output=True, text=True, timeout=300, check=False, cwd=folder,
    )  # fmt: skip


def steps(page: Path) -> list[tuple[str, str]]:
    """The file at each place where the page shows output, and all that it prints by then."""
    found: list[tuple[str, str]] = []
    file = printed = ""
    for program in programs(page):
        file += f"{program.block.text}\n\n"
        if program.printed is not None:
            printed += program.printed
            found.append((file, printed))
    return [*found, (file, printed)]


def follow(page: Path, folder: Path, places: list[tuple[str, str]]) -> str:
    """Run the file at these places; gives what the last run wrote to the error output."""
    name = file_of(page)
    errors = ""
    for file, printed in places:
        (folder / name).write_text(file, encoding="utf-8")
        done = run(f"python {name}", folder)
        assert (done.returncode, done.stdout) == (0, printed), done.stderr
        errors = done.stderr
    return errors


def run_commands(page: Path, folder: Path) -> None:
    """Run what the page says to type into a terminal."""
    for block in blocks(page):
        if block.language == "sh":
            for command in block.text.splitlines():
                done = run(command, folder)
                assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(300)
def passages(text: str, block: Block) -> Iterator[str]:
    """All parts of a text that have as many lines as a block of a page."""
    lines = text.splitlines()
    height = len(block.text.splitlines())
    return ("\n".join(lines[at : at + height]) for at in range(len(lines)))


@pytest.mark.parametrize("page", PLAIN, ids=page_id)
def test_a_tutorial_is_right_step_by_step_and_once_more_in_the_same_folder(
    page: Path, tmp_path: Path
) -> None:
    places = steps(page)
    logged = follow(page, tmp_path, places)  # the last place is the whole file
    again = follow(page, tmp_path, places[-1:])
    run_commands(page, tmp_path)

    for block in blocks(page):
        if block.language == "console":
            for errors in (logged, again):
                assert any(fits(block.text, text) for text in passages(errors, block)), errors
