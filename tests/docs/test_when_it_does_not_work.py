"""20, shown by: the typical mistakes, each run as a program, with its exact output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, blocks, fits

PAGE = ROOT / "docs" / "how-to" / "when-it-does-not-work.md"
BEGINNING, *REST = blocks(PAGE)
MISTAKES = list(zip(REST[::2], REST[1::2], strict=True))


def test_there_are_ten_mistakes_and_each_shows_its_output() -> None:
    assert len(MISTAKES) >= 10
    assert {code.language for code, _ in MISTAKES} == {"python"}
    assert {output.language for _, output in MISTAKES} == {"console", "pytb"}
    assert all(output.follows for _, output in MISTAKES)


@pytest.mark.parametrize(
    ("code", "output"), MISTAKES, ids=[f"line {code.line}" for code, _ in MISTAKES]
)
def test_a_mistake_shows_what_the_page_says(code: Block, output: Block, tmp_path: Path) -> None:
    program = f"{BEGINNING.text}\n\n{code.text}"
    (tmp_path / "shop.py").write_text(program, encoding="utf-8")

    done = subprocess.run(
        [sys.executable, "shop.py"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=50, check=False,
        cwd=tmp_path,
    )  # fmt: skip

    said = done.stdout
    if output.language == "pytb":  # the end of a traceback
        assert done.returncode == 1
        assert said.startswith("Traceback (most recent call last):\n")
        said = "".join(said.splitlines(keepends=True)[-len(output.text.splitlines()) :])
    else:
        assert done.returncode == 0
    assert fits(output.text, said), done.stdout
