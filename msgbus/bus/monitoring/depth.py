"""Depth of causation: detects messages that cause each other without end.

Each message that a handler sends is one deeper than the one being handled. The depth is an int
in the frame of the handling, and goes with the message to the next frame, also on another bus of
the process. It is never stored. A delayed event begins at 0: a handler that publishes its next
event with a delay is a timer, not a circle.

The types of a chain are collected only for very deep messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from msgbus.errors import MessageDepthError
from msgbus.messages.message import Message, metadata_of
from msgbus.telemetry.logging import log

if TYPE_CHECKING:
    from msgbus.messages.frame import Frame

WATCHED_FROM: Final = 100
"""The depth from which types are collected."""

SHOWN: Final = 20
"""Number of types that are collected; then the circle is logged."""

CALLS: Final = 10
"""Nested commands from which a `RecursionError` is reported as a `MessageDepthError`."""


@final
class DepthWatch:
    """Checks how deep the messages of one bus are."""

    def __init__(self, bus: str, max_depth: int | None) -> None:
        self._bus = bus
        self._max_depth = max_depth
        self._noted_from = WATCHED_FROM
        if max_depth is not None:
            self._noted_from = min(WATCHED_FROM, max(max_depth - SHOWN, 0))
        self._logged: set[frozenset[str]] = set()

    def sent(self, message: Message, outer: Frame) -> int:
        """Set and return the depth of `message`, sent while `outer` is being handled.

        Raises:
            MessageDepthError: It is deeper than this bus allows.
        """
        meta = metadata_of(message)
        depth = meta.hops = outer.depth + 1
        if depth > self._noted_from:
            above = metadata_of(outer.message).chain
            meta.chain = (*above[1 - SHOWN :], type(message).__name__)
            self._check(meta.chain, depth)
        return depth

    def _check(self, chain: tuple[str, ...], depth: int) -> None:
        if self._max_depth is not None and depth > self._max_depth:
            raise MessageDepthError(chain, depth=depth, max_depth=self._max_depth)
        if depth == WATCHED_FROM + SHOWN and frozenset(chain) not in self._logged:
            self._logged.add(frozenset(chain))
            shown = MessageDepthError.show(chain)
            log.warning("message_circle", bus=self._bus, depth=depth, chain=shown)


def called_too_deep(frame: Frame, error: RecursionError) -> RecursionError:
    """Get the error of a command that reached Python's limit of nested calls.

    Each command on the way up gets the same error, without the traceback of those below.
    """
    if isinstance(error, MessageDepthError):
        return error.with_traceback(None)
    chain: list[str] = []
    above: Frame | None = frame
    while above is not None and len(chain) < SHOWN:
        chain.append(type(above.message).__name__)
        above = above.parent
    if len(chain) < CALLS:
        return error  # the handler's own
    return MessageDepthError(chain[::-1], depth=frame.depth)
