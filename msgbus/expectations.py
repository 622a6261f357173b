"""Waiting for the next event that fits."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, cast, final

import anyio

from msgbus.bus.protocols import E
from msgbus.errors import BusClosedError, ExpectTimeoutError
from msgbus.handlers.filters import FilterLike, passes
from msgbus.handlers.registration import Registration, make_registration, read_event_target

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusCore
    from msgbus.bus.subscription import Subscription

Where: TypeAlias = Callable[[E], bool | Awaitable[bool]]
"""A condition on an event, sync or async; a `Filter` is one, too."""


@final
class Watch(Generic[E]):
    """Looks at events of one kind until one fits, as a handler of the bus."""

    def __init__(
        self,
        core: BusCore,
        target: type[E] | str,
        where: Where[E] | None,
        register: Callable[[Registration], Subscription],
        session_id: str | None,
    ) -> None:
        core.require_home("wait for events of")
        classes, pattern = read_event_target(target)
        registration = make_registration(classes, self.expect, pattern=pattern, durable=False)
        self._core = core
        self._where = cast("FilterLike | None", where)
        self.session_id = session_id
        """The session it ends with, if it is of one."""
        self.target_name = registration.target_name
        self.seen = 0
        """Events that did not fit."""
        self.event: E | None = None
        self.error: Exception | None = None
        """The error of `where`, if it raised."""
        self.over = anyio.Event()
        self._subscription: Subscription | None = register(registration)
        core.streams.add(self)

    async def expect(self, event: E) -> None:
        """Look at one event; the handler that the bus knows."""
        if self._subscription is None:
            return  # it was over before this one came
        try:
            fits = self._where is None or await passes(self._where, event)
        except Exception as error:
            self.error = error
        else:
            if not fits:
                self.seen += 1
                return
            self.event = event
        self.end()

    def end(self) -> None:
        """Look at no more events."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            self._core.unsubscribe(subscription.registration, self.session_id)
            self._core.streams.discard(self)
            self.over.set()


@final
class Expectation(Generic[E]):
    """The next event that fits: `await` it. Made by `bus.expect(...)`, which starts to look."""

    def __init__(
        self,
        core: BusCore,
        target: type[E] | str,
        where: Where[E] | None,
        timeout: float | None,
        register: Callable[[Registration], Subscription],
        *,
        session_id: str | None = None,
    ) -> None:
        self._awaited = True
        self._clock = core.clock
        self._timeout = timeout
        self._due = None if timeout is None else core.clock.now() + timeout
        self._watch = Watch(core, target, where, register, session_id)
        self._awaited = False

    def __await__(self) -> Generator[Any, None, E]:
        self._awaited = True
        return self._wait().__await__()

    async def _wait(self) -> E:
        watch = self._watch
        try:
            with ExitStack() as limits:
                if self._due is not None:
                    left = max(0.0, self._due - self._clock.now())
                    # Real time is a second limit: a test that never advances its virtual
                    # clock should fail, not hang.
                    limits.enter_context(anyio.move_on_after(left))
                    limits.enter_context(self._clock.cancel_after(left))
                await watch.over.wait()
        finally:
            ended = watch.over.is_set()
            watch.end()
        if watch.error is not None:
            raise watch.error
        if watch.event is not None:
            return watch.event
        if self._timeout is None or ended:
            what = "bus" if watch.session_id is None else f"session {watch.session_id!r}"
            message = f"The {what} ended before {watch.target_name} came."
            raise BusClosedError(message)
        raise ExpectTimeoutError(watch.target_name, seconds=self._timeout, seen=watch.seen)

    def __del__(self) -> None:
        if not self._awaited:
            self._watch.end()
            warnings.warn(
                f"bus.expect({self._watch.target_name}) was never awaited.",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        return f"<Expectation of {self._watch.target_name}>"
