"""A stored traceback: secrets removed, bounded, and the reader's own code first."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgbus.telemetry.redaction import redact, redact_exception

MAX_LENGTH: Final = 16 * 1024
"""Characters of a stored traceback; what comes last is cut."""

_MAX_FRAMES: Final = 50
_MAX_CHAIN: Final = 8
_TRUNCATED: Final = "... [truncated]\n"

_NOT_OWN: Final = (
    str(Path(__file__).parents[1]),
    sysconfig.get_path("stdlib"),
    "<frozen ",
)
_INSTALLED: Final = ("site-packages", "dist-packages")


def stored_traceback(error: BaseException) -> str:
    """The traceback of `error` and its causes, without secrets.

    If frames of msgbus and of installed packages are among them, the others stand first
    as well, so that a reader finds them at once and a cut never takes them.
    """
    try:
        text = _written(error)
    except Exception:  # an exception may be unprintable in many ways
        text = redact_exception(error)
    if len(text) <= MAX_LENGTH:
        return text
    return text[: MAX_LENGTH - len(_TRUNCATED)] + _TRUNCATED


def _written(error: BaseException) -> str:
    frames = list(_frames(error))
    own = [frame for frame in frames if _is_own(frame.filename)]
    whole = "".join(traceback.format_exception(error))
    if not own or len(own) == len(frames):
        return redact(whole)
    first = "".join(traceback.format_list(own[-_MAX_FRAMES:]))
    return redact(f"Own frames (most recent call last):\n{first}") + "\n" + redact(whole)


def _frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """All frames, those of the first cause first, as a printed traceback has them."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain and len(chain) < _MAX_CHAIN:
        chain.append(current)
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)
    for one in reversed(chain):
        yield from traceback.extract_tb(one.__traceback__)


def _is_own(filename: str) -> bool:
    if any(part in _INSTALLED for part in Path(filename).parts):
        return False
    return not filename.startswith(_NOT_OWN)
