"""Phases of a bus, and the guards against calls in the wrong phase or on the wrong event loop."""

from __future__ import annotations

from enum import Enum
from threading import get_ident
from typing import TYPE_CHECKING

from msgbus.errors import (
    BusClosedError,
    BusNotStartedError,
    BusStateError,
    ForeignLoopError,
    InsideHandlerError,
)
from msgbus.messages.frame import Frame, current_frame
from msgbus.runtime.event_loop import foreign_loop

if TYPE_CHECKING:
    from msgbus.runtime.event_loop import Runtime


class Phase(Enum):
    """Phase of a bus, in this order; a stopped bus may be started again."""

    NEW = "new"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"


class RunGuards:
    """The phase and the event loop of a bus, and the guards that check them."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        """The event loop that handlers run on; `None` while the bus does not run."""
        self.bound_runtime: Runtime | None = None
        """The same, from the beginning of a start to the end of a stop."""
        self.phase = Phase.NEW
        self.is_forked = False
        """Set in a forked child if the bus was started before: it is the parent's."""
        self.accepting = True
        """Whether calls from outside handlers are accepted: before and while it runs. Afterwards
        no plan is kept, so that every call takes the slow path, which checks its origin."""

    def is_foreign_thread(self) -> bool:
        """Whether the caller is on another thread than the event loop of the bus."""
        return self.bound_runtime is not None and self.bound_runtime.thread_id != get_ident()

    def require_runtime(self) -> Runtime:
        """Get the event loop of the running bus.

        Raises:
            BusNotStartedError: The bus was not started.
            BusClosedError: The bus has stopped.
        """
        if self.runtime is None:
            if self.phase is Phase.STOPPED:
                raise self._has_stopped("use")
            message = "This bus is not started. Use `async with bus:` or `await bus.start()`."
            raise BusNotStartedError(message)
        return self.runtime

    def require_open(self, what: str, frame: Frame | None = None) -> None:
        """Raise if the bus does not accept this call.

        Raises:
            BusClosedError: It is stopping or has stopped.
            ForeignLoopError: It runs on another event loop than the caller.
        """
        self.require_own_thread(what)
        if self.accepting:
            return
        if self.phase is Phase.DRAINING:
            if self.is_inside_handler(frame):
                return
            message = f"Cannot {what} this bus: it is stopping, and takes work only from handlers."
            raise BusClosedError(message)
        raise self._has_stopped(what)

    def require_own_thread(self, what: str) -> None:
        """Raise if the bus runs on another thread's event loop than the caller.

        Its queues and workers belong to that loop: nothing here would wake them.

        Raises:
            ForeignLoopError: The caller is on another thread.
        """
        if self.is_forked:  # not by a call: every durable publish comes here
            raise self._has_stopped(what)
        bound = self.bound_runtime
        if bound is not None and bound.thread_id != get_ident():
            raise self._foreign(what)

    def require_not_forked(self, what: str) -> None:
        """Raise in the child of the process that has started the bus.

        Raises:
            BusClosedError: So it is.
        """
        if self.is_forked:
            raise self._has_stopped(what)

    def require_own_loop(self, what: str) -> None:
        """Raise if the bus runs on another event loop than the caller's; slower than by thread.

        Raises:
            ForeignLoopError: The bus runs on another event loop than the caller, or did so
                when that loop ended.
        """
        self.require_not_forked(what)
        if self.bound_runtime is not None and not self.bound_runtime.is_running_here():
            raise self._foreign(what)

    def _foreign(self, what: str) -> ForeignLoopError:
        if self.bound_runtime is None or not self.bound_runtime.has_ended():
            return foreign_loop(what)
        message = (
            f"Cannot {what} this bus: the event loop that it was started on has ended without "
            f"bus.stop(). Stop it with `await bus.stop()`, then start it again."
        )
        return ForeignLoopError(message)

    def require_set_up(self, what: str) -> None:
        """Raise if chains are built already; they are built anew at each start.

        Raises:
            BusStateError: The bus runs, or is stopping.
        """
        if self.phase not in (Phase.NEW, Phase.STOPPED):
            message = f"{what} must be set before the bus is started, or once it has stopped."
            raise BusStateError(message)

    def is_inside_handler(self, frame: Frame | None) -> bool:
        """Whether `frame` was called from a handler of this bus."""
        while frame is not None:
            if frame.owner.host is self:
                return True
            frame = frame.parent
        return False

    def refuse_inside_handler(self, what: str) -> None:
        """Raise if the caller is a handler of this bus, which would wait for itself."""
        if self.is_inside_handler(current_frame.get()):
            message = (
                f"{what} was called inside a handler of the same bus, or in a task that one "
                f"started, and would wait for that handler to end. Call it from outside."
            )
            raise InsideHandlerError(message)

    def _has_stopped(self, what: str) -> BusClosedError:
        if self.is_forked:
            message = (
                f"Cannot {what} this bus: it was started before this process was forked, and its "
                f"handlers run in the parent. Start a bus after the fork, and only then, or start "
                f"processes by 'spawn'."
            )
            return BusClosedError(message)
        message = (
            f"Cannot {what} this bus: it has stopped. Start it again with `await bus.start()`."
        )
        return BusClosedError(message)
