"""Detect a handler that blocks the event loop.

A thread schedules a callback on the loop at intervals. If it does not run in time, the thread
reads the stack of the loop's own thread, and finds the handler there. The hot paths do nothing
for this.
"""

from __future__ import annotations

import sys
import threading
import weakref
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Final, NamedTuple, final

from msgbus.messages.frame import Frame
from msgbus.runtime.clock import VirtualClock
from msgbus.telemetry.logging import log
from msgbus.telemetry.tracebacks import is_of_msgbus, redacted_stack

if TYPE_CHECKING:
    from msgbus.bus.bus import MessageBus
    from msgbus.runtime.event_loop import Runtime, Task

_JOIN_TIMEOUT: Final = 1.0
"""Seconds to wait for the thread to end: its log handler might wait for this loop."""


class _Block(NamedTuple):
    """A handler that blocks the loop, and its stack."""

    handler: str
    message_type: str
    stack: str


@final
class LoopWatch:
    """Watches the event loop of one bus from its start to its stop.

    The thread begins once the bus has run for a while, so that short-lived buses do not pay for
    it. It ends with `stop`, with the loop, or with the bus, whatever comes first.

    If the thread itself could not run, as in a suspended process, nothing is logged.

    Args:
        bus: Only its handlers are named.
        runtime: Its event loop.
        limit: Seconds that the loop may take to answer.
    """

    def __init__(self, bus: MessageBus, runtime: Runtime, limit: float) -> None:
        # Weak: a bus that is dropped without `stop` can be collected.
        self._bus = weakref.ref(bus)
        self._name = bus.config.name
        self._runtime = runtime
        self._limit = limit
        self._pause = limit / 4
        self._asked_at = 0.0
        self._answered_at: float | None = None
        self._block: _Block | None = None
        """What was logged, until the loop answers."""
        self._thread: threading.Thread | None = None
        self._timer: Task = runtime.call_later(self._pause, self._begin)

    def stop(self) -> None:
        """End the thread, if there is one; called on the event loop."""
        self._timer.cancel()
        if self._thread is not None:
            self._stopping.set()
            self._thread.join(_JOIN_TIMEOUT)

    def _begin(self) -> None:
        self._stopping = threading.Event()
        name = f"msgbus loop watch {self._name}"
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        is_loop_there = self._ask()
        while is_loop_there and self._bus() is not None:
            before = monotonic()
            if self._stopping.wait(self._pause):
                break
            now = monotonic()
            if self._answered_at is not None:
                self._end_block(self._answered_at)
                is_loop_there = self._ask()
            elif now - before > self._pause + self._limit / 2:
                self._asked_at = now  # this thread could not run either: start over
            elif self._block is None and now - self._asked_at >= self._limit:
                self._look(now)
        self._end_block(monotonic())

    def _ask(self) -> bool:
        """Schedule the callback on the loop; false if the loop has ended."""
        self._answered_at = None
        self._asked_at = monotonic()
        return self._runtime.call_soon(self._answer)

    def _answer(self) -> None:
        self._answered_at = monotonic()

    def _look(self, now: float) -> None:
        """Log the handler that blocks the loop, if it is one of this bus."""
        block = self._find()
        if block is None or self._answered_at is not None:
            return
        self._block = block
        log.warning(
            "event_loop_blocked",
            bus=self._name,
            handler=block.handler,
            message_type=block.message_type,
            seconds=now - self._asked_at,
            limit=self._limit,
            traceback=block.stack,
        )

    def _end_block(self, ended_at: float) -> None:
        block, self._block = self._block, None
        if block is not None:
            log.warning(
                "event_loop_unblocked",
                bus=self._name,
                handler=block.handler,
                message_type=block.message_type,
                seconds=ended_at - self._asked_at,
            )

    def _find(self) -> _Block | None:
        # The only way to see what another thread does.
        stacks = sys._current_frames()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        call = stacks.get(self._runtime.thread_id)
        calls: list[tuple[FrameType, int]] = []
        while call is not None:
            calls.append((call, call.f_lineno))
            handling = _handled_by(call)
            if handling is not None:
                if handling.owner.bus is not self._bus():
                    return None  # that bus has its own watch
                stack = redacted_stack(calls[::-1])
                return _Block(handling.owner.name, type(handling.message).__name__, stack)
            call = call.f_back
        return None


def watch_loop(bus: MessageBus, runtime: Runtime) -> LoopWatch | None:
    """Watch the event loop of a bus, unless that is switched off or its time is virtual."""
    limit = bus.config.slow_callback
    if limit is None or isinstance(bus.clock, VirtualClock):
        return None
    return LoopWatch(bus, runtime, limit)


def _handled_by(call: FrameType) -> Frame | None:
    """Get the frame of a function of msgbus that calls handlers.

    All of them have it in a variable of the same name.
    """
    if not is_of_msgbus(call.f_code.co_filename):
        return None
    handling = call.f_locals.get("frame")
    return handling if isinstance(handling, Frame) else None
