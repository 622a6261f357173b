"""Reads the pages of the documentation: their code, what it prints, and their links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

_FENCE: Final = re.compile(r"^(?P<ticks>`{3,})(?P<language>\w*)[^\n]*$")
_NOT_RUN: Final = re.compile(r"^<!-- not run: (?P<reason>\S.*) -->$")


_SPARK: Final = re.compile(
    r"(?m)^(from|import) (pyspark|msgbus\.pipeline)\b|^from msgbus import .*\bpipeline\b"
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    language: str
    text: str
    line: int
    """The line of its first line of content, from 1."""

    is_run: bool
    """False under a comment `<!-- not run: reason -->`."""

    follows: bool
    """Whether nothing but blank lines is between it and the block before."""


@dataclass(frozen=True, slots=True)
class Program:
    """A Python block that is run, and what the page says of it."""

    block: Block

    printed: str | None
    """The `text` block directly after it: all that it prints."""

    raised: str | None
    """The `pytb` block directly after it: the end of the traceback; `…` stands for anything."""


def pages() -> list[Path]:
    """README and everything in docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def page_id(page: Path) -> str:
    """A page as a person would name it."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """All fenced blocks, in order."""
    found: list[Block] = []
    opened: tuple[str, str, int] | None = None
    content: list[str] = []
    marker: str | None = None
    prose = True
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is not None:
            ticks, language, start = opened
            if line == ticks:
                text = "".join(f"{one}\n" for one in content)
                found.append(Block(language, text, start, marker is None, not prose))
                opened, content, marker, prose = None, [], None, False
            else:
                content.append(line)
        elif fence is not None:
            opened = (fence["ticks"], fence["language"], number + 1)
        elif line.strip():
            reason = _NOT_RUN.match(line)
            marker = None if reason is None else reason["reason"]
            prose = True
    if opened is not None:
        message = f"{page_id(page)}:{opened[2] - 1}: a block that is never closed."
        raise ValueError(message)
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"(?ms)^(`{3,})\w*[^\n]*\n.*?^\1$", "", page.read_text(encoding="utf-8"))


def programs(page: Path) -> list[Program]:
    """The Python blocks of a page that are to be run, in order."""
    found: list[Program] = []
    everything = blocks(page)
    for index, block in enumerate(everything):
        if block.language != "python" or not block.is_run:
            continue
        after = everything[index + 1] if index + 1 < len(everything) else None
        shown = {after.language: after.text} if after is not None and after.follows else {}
        found.append(Program(block, shown.get("text"), shown.get("pytb")))
    return found


def fits(shown: str, found: str) -> bool:
    """Whether a text is what a page shows; `…` stands for anything on its line."""
    parts = (re.escape(part) for part in shown.rstrip().split("…"))
    return re.fullmatch("[^\\n]*".join(parts), found.rstrip()) is not None


def needs_spark(code: str) -> bool:
    """Whether code starts Spark: then it runs with the tests of the pipeline, on their session."""
    return _SPARK.search(code) is not None


def spark_pages() -> list[Path]:
    """The pages with code that starts Spark."""
    return [page for page in pages() if any(needs_spark(one.block.text) for one in programs(page))]


def spark_examples() -> list[Path]:
    """The examples that start Spark."""
    found = sorted((ROOT / "examples").glob("*.py"))
    return [one for one in found if needs_spark(one.read_text(encoding="utf-8"))]
