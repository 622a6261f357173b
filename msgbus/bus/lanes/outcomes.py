"""Outcomes of one event in all its handlers, for `publish(..., wait=True)`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, final

import anyio

from msgbus.bus.lanes.lane import Lane
from msgbus.errors import InsideHandlerError
from msgbus.messages.receipts import HandlerOutcome, OutcomeStatus
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.bus.lanes.queue import Gated
    from msgbus.messages.frame import Frame


@final
class Outcomes:
    """Collects the outcome of one event in each of its handlers."""

    __slots__ = ("_all_done", "_found", "_missing")

    def __init__(self) -> None:
        self._found: list[HandlerOutcome | None] = []
        self._missing = 0
        self._all_done = anyio.Event()

    def collect(self, items: Sequence[Gated], handlers: Sequence[str]) -> None:
        """Make each item, the event in one handler's queue, report its outcome here."""
        self._found = [None] * len(items)
        self._missing = len(items)
        for index, (item, handler) in enumerate(zip(items, handlers, strict=True)):
            item.report_to(partial(self._report, index, handler))

    def _report(self, index: int, handler: str, item: Gated) -> None:
        self._found[index] = _outcome(handler, item)
        self._missing -= 1
        if not self._missing:
            self._all_done.set()

    async def wait(self) -> tuple[HandlerOutcome, ...]:
        """Wait for all outcomes."""
        if self._missing:
            await self._all_done.wait()
        return tuple(one for one in self._found if one is not None)


def _outcome(handler: str, item: Gated) -> HandlerOutcome:
    error = item.error
    if item.is_filtered:
        return HandlerOutcome(handler, OutcomeStatus.FILTERED)
    if item.is_handled:
        return HandlerOutcome(handler, OutcomeStatus.DONE)
    if not isinstance(error, Exception):
        return HandlerOutcome(handler, OutcomeStatus.DROPPED)
    timed_out = isinstance(error, TimeoutError)
    status = OutcomeStatus.TIMED_OUT if timed_out else OutcomeStatus.FAILED
    return HandlerOutcome(handler, status, redact_exception(error))


# -- event handlers that wait --------------------------------------------------------------------


class _Wait(NamedTuple):
    """An event handler that waits for other handlers."""

    lane: Lane
    targets: Sequence[Lane]

    def is_blocked_by(self, other: _Wait) -> bool:
        """Whether it waits for `other`, directly or through one of lower priority."""
        return other.lane in self.targets or (
            other.lane.holds_others and any(lane.is_held for lane in self.targets)
        )


_waits: Final[list[_Wait]] = []
"""Current waits of all buses: two that publish to each other can wait for each other, too."""


@contextmanager
def waiting_on_lane(
    frame: Frame | None, targets: Sequence[Lane], event_type: type
) -> Generator[None]:
    """Register a wait for `targets` by the event handler that `frame` is in.

    Raises:
        InsideHandlerError: They wait for that handler: a deadlock.
    """
    lane = _lane_of(frame)
    if lane is None:
        yield
        return
    wait = _Wait(lane, targets)
    _refuse_circle(wait, event_type)
    _waits.append(wait)
    try:
        yield
    finally:
        _waits[:] = [one for one in _waits if one is not wait]


def _lane_of(frame: Frame | None) -> Lane | None:
    """Get the lane whose worker runs in `frame`, if there is one."""
    while frame is not None:
        if isinstance(frame.owner, Lane):
            return frame.owner
        frame = frame.parent
    return None


def _refuse_circle(wait: _Wait, event_type: type) -> None:
    seen = [wait]
    for one in seen:  # grows as it goes
        if one.is_blocked_by(wait):
            message = (
                f"{wait.lane.name} cannot publish {event_type.__name__} with wait=True: it would "
                f"wait for itself, as {_names(one.targets)} can only go on after it. Publish it "
                f"without wait=True, or from a command handler that is called from outside."
            )
            raise InsideHandlerError(message)
        seen += [other for other in _waits if other not in seen and one.is_blocked_by(other)]


def _names(lanes: Sequence[Lane]) -> str:
    return ", ".join(lane.name for lane in lanes)
