"""Reads the tables of texts with and without secrets, `secrets.txt` and `innocent.txt`."""

import base64
import random
import re
import string
from pathlib import Path
from typing import Final, NamedTuple

_FOLDER: Final = Path(__file__).parent
_ALPHABETS: Final = {
    "a": string.ascii_letters + string.digits,
    "h": string.digits + "abcdef",
    "d": string.digits,
    "u": string.ascii_uppercase + string.digits,
    "l": string.ascii_lowercase,
    "b": string.ascii_letters + string.digits + "+/",
    "w": string.ascii_letters + string.digits + "-_",
}
_SECRET: Final = re.compile("«(.*?)»")
_RANDOM: Final = re.compile(r"#([a-z])(\d+)")
_BASE64: Final = re.compile(r"\{b64:(.*?)\}(?=»)")


class Row(NamedTuple):
    """One text; ``secrets`` are the parts of it that must be gone."""

    name: str
    text: str
    secrets: tuple[str, ...]
    known_fault: bool


def read(table: str) -> list[Row]:
    """Return the rows of a table, random values filled in: the same in each run."""
    lines = (_FOLDER / table).read_text(encoding="utf-8").splitlines()
    rows = [_row(line) for line in lines if line and not line.startswith("#")]
    assert len({row.name for row in rows}) == len(rows)
    return rows


def _row(line: str) -> Row:
    name, _, marked = line.partition(" | ")
    chooser = random.Random(name)
    marked = marked.replace("⏎", "\n")
    marked = _BASE64.sub(lambda match: _encoded(match[1]), marked)
    marked = _SECRET.sub(lambda match: f"«{_filled(match[1], chooser)}»", marked)
    text = marked.replace("«", "").replace("»", "")
    return Row(name.removeprefix("!"), text, tuple(_SECRET.findall(marked)), name.startswith("!"))


def _filled(secret: str, chooser: random.Random) -> str:
    return _RANDOM.sub(
        lambda match: "".join(chooser.choices(_ALPHABETS[match[1]], k=int(match[2]))), secret
    )


def _encoded(text: str) -> str:
    return base64.b64encode(text.replace("\\n", "\n").encode()).decode()
