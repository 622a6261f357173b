"""Tracebacks for logs and dead letters: redacted, bounded, without the frames of msgbus."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

from msgbus.telemetry.redaction import encodable, redact, redact_exception

MAX_LENGTH: Final = 16 * 1024
"""Maximum length in characters; of a longer traceback the middle is omitted."""

_MAX_TEXT: Final = 2 * 1024
_MAX_HEAD: Final = 6 * 1024
_MAX_CHAIN: Final = 32
_MAX_GROUP: Final = 8
_MAX_DEPTH: Final = 3

_PACKAGE: Final = str(Path(__file__).parents[1]) + os.sep
_CUT: Final = "... [truncated]\n"
_CAUSE: Final = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT: Final = "\nDuring handling of the above exception, another exception occurred:\n\n"


def redacted_traceback(error: BaseException) -> str:
    """Format the traceback of an exception for a reader who does not maintain msgbus.

    Consecutive frames of msgbus are one line, such as `  ... 7 frames of msgbus`; only the frame
    that raised is always shown. Causes, contexts, notes and the members of exception groups are
    included. Secrets and the inputs of validation errors are removed. The part of a line that
    raised is not marked.

    Args:
        error: The exception; its `__str__` may raise.

    Returns:
        At most `MAX_LENGTH` characters, with a line break at the end.
    """
    try:
        pieces = list(_chain(error, 0))
    except Exception:  # an exception may be unprintable in many ways
        pieces = [_described(error)]
    return _without_middle([encodable(piece) for piece in pieces])


def redacted_stack(calls: Sequence[tuple[FrameType, int]]) -> str:
    """Format the stack of running code, as `redacted_traceback` does.

    Args:
        calls: Frames with their line numbers, outermost first.
    """
    return _without_middle(list(_folded(traceback.StackSummary.extract(calls))))


def is_of_msgbus(filename: str) -> bool:
    """Tell whether a source file belongs to msgbus."""
    return filename.startswith(_PACKAGE)


def _chain(error: BaseException, depth: int) -> Iterator[str]:
    """Format an exception after those that led to it, as Python does."""
    chain = [(error, "")]
    while len(chain) < _MAX_CHAIN:
        last = chain[-1][0]
        before, link = last.__cause__, _CAUSE
        if before is None and not last.__suppress_context__:
            before, link = last.__context__, _CONTEXT
        if before is None or any(before is one for one, _ in chain):
            break
        chain.append((before, link))
    for one, link in reversed(chain):
        yield from _single(one, depth)
        if one is not error:
            yield link


def _single(error: BaseException, depth: int) -> Iterator[str]:
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):\n"
        yield from _frames(error.__traceback__)
    yield _described(error)
    for note in getattr(error, "__notes__", ()):
        yield _shortened(redact(str(note)))
    members: Sequence[BaseException] = getattr(error, "exceptions", ())
    if isinstance(error, BaseExceptionGroup):
        yield from _members(members, depth)


def _members(members: Sequence[BaseException], depth: int) -> Iterator[str]:
    shown = members[: _MAX_GROUP if depth < _MAX_DEPTH else 0]
    for number, member in enumerate(shown, start=1):
        yield f"  +- {number} of {len(members)}\n"
        for piece in _chain(member, depth + 1):
            yield "".join(f"  | {line}" for line in piece.splitlines(keepends=True))
    if len(shown) < len(members):
        yield f"  +- ... {len(members) - len(shown)} more exceptions\n"


def _frames(raised_at: TracebackType) -> Iterator[str]:
    # Without columns: to mark them Python 3.11 calls its parser, which a finalizer that logs a
    # failure may have interrupted and would disturb.
    return _folded(traceback.StackSummary.extract(traceback.walk_tb(raised_at)))


def _folded(summary: traceback.StackSummary) -> Iterator[str]:
    """Format frames; consecutive ones of msgbus are one line, apart from the last of all."""
    *callers, last = summary
    for is_ours, run in groupby(callers, key=_is_ours):
        frames = list(run)
        if is_ours:
            yield f"  ... {len(frames)} frame{'s' if len(frames) > 1 else ''} of msgbus\n"
        else:
            yield from _formatted(frames)
    yield from _formatted([last])


def _formatted(frames: Iterable[traceback.FrameSummary]) -> Iterator[str]:
    return map(redact, traceback.StackSummary.from_list(frames).format())


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return is_of_msgbus(frame.filename)


def _described(error: BaseException) -> str:
    return _shortened(redact_exception(error))


def _shortened(text: str) -> str:
    return f"{text}\n" if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}{_CUT}"


def _without_middle(pieces: Sequence[str]) -> str:
    """Join the pieces; if they are too long, only the first and the last of them."""
    if sum(map(len, pieces)) <= MAX_LENGTH:
        return "".join(pieces)
    head = _fitting(pieces, _MAX_HEAD)
    tail = _fitting(reversed(pieces), MAX_LENGTH - _MAX_HEAD - len(_CUT))
    return "".join([*pieces[:head], _CUT, *pieces[len(pieces) - tail :]])


def _fitting(pieces: Iterable[str], room: int) -> int:
    """Count how many of the first pieces fit."""
    count = 0
    for piece in pieces:
        room -= len(piece)
        if room < 0:
            break
        count += 1
    return count
