"""Every example runs as a program and prints the output that it ends with as a comment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, spark_examples

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PLAIN = [example for example in EXAMPLES if example not in spark_examples()]
"""Those with Spark in them are run by tests/spark/test_guides.py."""

HEADING = "# Output:\n"
MARK = "# > "


def announced(example: Path) -> str:
    """What the comment at the end says."""
    _, heading, comment = example.read_text(encoding="utf-8").rpartition(HEADING)
    lines = comment.splitlines()
    assert heading, "an example ends with a comment that begins with '# Output:'"
    assert lines, "an example prints something"
    assert all(line.startswith(MARK) for line in lines), "each line of output begins with '# > '"
    return "".join(f"{line.removeprefix(MARK)}\n" for line in lines)


@pytest.mark.parametrize("example", PLAIN, ids=lambda example: example.stem)
def test_an_example_prints_what_it_says(example: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "utf8", str(example)],
        capture_output=True, text=True, encoding="utf-8", timeout=50, check=False, cwd=tmp_path,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (0, announced(example)), done.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_is_short(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 60


def test_examples_are_numbered_without_a_gap() -> None:
    numbers = [int(example.stem[:2]) for example in EXAMPLES]

    assert numbers == list(range(1, len(EXAMPLES) + 1))
