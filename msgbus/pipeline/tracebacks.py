"""Extract the error of a worker from the texts of Spark's errors."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Final

_ERROR: Final = re.compile(
    r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b(?::? .+)?$", re.MULTILINE
)
_FRAME: Final = re.compile(r'^\s+File "([^"]+)", line (\d+), in (\S+)$', re.MULTILINE)
_NOT_THE_USERS: Final = re.compile(
    r"[/\\](?:msgbus|site-packages|lib[/\\]python[\d.]+)[/\\]|\.p[xy][id]$"
)
_NOTES: Final = 3


def what_happened(text: str) -> str:
    """The error, where in the user's code it was raised, and its notes."""
    errors = list(_ERROR.finditer(text))
    if not errors:
        return _sentence(text.strip().partition("\n")[0])
    last = errors[-1]
    return " ".join(
        [_sentence(last[0] + _location(text[: last.start()])), *_notes(text[last.end() :])]
    )


def _location(traceback: str) -> str:
    frames = [one for one in _FRAME.findall(traceback) if not _NOT_THE_USERS.search(one[0])]
    if not frames:
        return ""
    path, line, function = frames[-1]
    return f" ({PurePath(path).name}, line {line}, in {function})"


def _notes(rest: str) -> list[str]:
    """The lines after an error are its notes; Spark's own begin with a space."""
    notes: list[str] = []
    for line in rest.removeprefix("\n").split("\n")[:_NOTES]:
        if not line or line[0].isspace():
            break
        notes.append(_sentence(line))
    return notes


def _sentence(line: str) -> str:
    return line.strip().rstrip(".") + "."
