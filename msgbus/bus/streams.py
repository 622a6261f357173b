"""`EventStream`: events as an async iterator; `Expectation`: the next event that matches."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, cast, final

import anyio

from msgbus.bus.protocols import E
from msgbus.errors import BusClosedError, BusStateError, ExpectTimeoutError
from msgbus.handlers.filters import FilterLike, passes
from msgbus.handlers.registration import Registration, make_registration, read_event_target
from msgbus.telemetry.logging import log

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from msgbus.bus.bus_state import BusState
    from msgbus.bus.subscription import Subscription


@final
class EventStream(Generic[E]):
    """Async iterator over events of one type, or of some topics, from its `async with` on.

    A slow reader misses the oldest events and never blocks the bus: `missed` counts them,
    and each gap is logged as `stream_lagged`.
    """

    def __init__(
        self,
        state: BusState,
        target: type[E] | str,
        buffer: int,
        register: Callable[[Registration], Subscription],
        *,
        session_id: str | None = None,
    ) -> None:
        if buffer < 1:
            message = f"buffer must be at least 1, not {buffer}."
            raise ValueError(message)
        self._state = state
        self._register = register
        self.session_id = session_id
        """The session it ends with, if it is of one."""
        self._target = target
        self._buffer: deque[E] = deque(maxlen=buffer)
        self._news = anyio.Event()
        self._subscription: Subscription | None = None
        self._target_name = ""
        self._closed = False
        self._in_gap = False
        self.missed = 0
        """Events dropped from the full buffer because the reader was too slow."""

    @property
    def lag(self) -> int:
        """Events that wait to be read."""
        return len(self._buffer)

    async def __aenter__(self) -> Self:
        self._state.require_own_thread("stream events of")
        classes, pattern = read_event_target(self._target)
        registration = make_registration(
            classes, self._take, pattern=pattern, inline=True, durable=False
        )
        self._target_name = registration.target_name
        self._subscription = self._register(registration)
        self._state.streams.add(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        self._state.streams.discard(self)
        if self._subscription is not None:
            await self._subscription.close(timeout=0)

    def end(self) -> None:
        """End the iteration after what is buffered."""
        self._closed = True
        self._news.set()
        if self._subscription is not None:
            # It ends with this run of the bus, and must not get events of the next one.
            self._state.registry.remove(self._subscription.registration, self.session_id)

    def _take(self, event: E) -> None:
        if len(self._buffer) == self._buffer.maxlen:
            self.missed += 1
            if not self._in_gap:
                self._in_gap = True
                log.warning(
                    "stream_lagged",
                    bus=self._state.config.name,
                    message_type=self._target_name,
                    missed=self.missed,
                )
        self._buffer.append(event)
        self._news.set()

    def __aiter__(self) -> Self:
        if self._subscription is None:
            message = "Enter the stream first: `async with bus.stream(...) as events:`."
            raise BusStateError(message)
        return self

    async def __anext__(self) -> E:
        while not self._buffer:
            if self._closed:
                raise StopAsyncIteration
            self._news = anyio.Event()
            await self._news.wait()
        self._in_gap = False
        return self._buffer.popleft()


Where: TypeAlias = Callable[[E], bool | Awaitable[bool]]
"""A condition on an event, sync or async; a `Filter` is one, too."""


@final
class EventMatcher(Generic[E]):
    """Handler that matches events of one type until one fits."""

    def __init__(
        self,
        state: BusState,
        target: type[E] | str,
        where: Where[E] | None,
        register: Callable[[Registration], Subscription],
        session_id: str | None,
    ) -> None:
        state.require_own_thread("wait for events of")
        classes, pattern = read_event_target(target)
        registration = make_registration(classes, self.expect, pattern=pattern, durable=False)
        self._state = state
        self._where = cast("FilterLike | None", where)
        self.session_id = session_id
        """The session it ends with, if it is of one."""
        self.target_name = registration.target_name
        self.seen = 0
        """Events that did not match."""
        self.event: E | None = None
        self.error: Exception | None = None
        """The error of `where`, if it raised."""
        self.over = anyio.Event()
        self._subscription: Subscription | None = register(registration)
        state.streams.add(self)

    async def expect(self, event: E) -> None:
        """Match one event; this is the registered handler."""
        if self._subscription is None:
            return  # it ended before this event
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
        """Stop matching, and unsubscribe."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            self._state.unsubscribe(subscription.registration, self.session_id)
            self._state.streams.discard(self)
            self.over.set()


@final
class Expectation(Generic[E]):
    """Awaitable for the next event that matches. Made by `bus.expect(...)`."""

    def __init__(
        self,
        state: BusState,
        target: type[E] | str,
        where: Where[E] | None,
        timeout: float | None,
        register: Callable[[Registration], Subscription],
        *,
        session_id: str | None = None,
    ) -> None:
        self._awaited = True
        self._clock = state.clock
        self._timeout = timeout
        self._due = None if timeout is None else state.clock.now() + timeout
        self._matcher = EventMatcher(state, target, where, register, session_id)
        self._awaited = False

    def __await__(self) -> Generator[Any, None, E]:
        self._awaited = True
        return self._wait().__await__()

    async def _wait(self) -> E:
        matcher = self._matcher
        try:
            with ExitStack() as limits:
                if self._due is not None:
                    left = max(0.0, self._due - self._clock.now())
                    # Real time is a second limit: a test that never advances its virtual
                    # clock should fail, not hang.
                    limits.enter_context(anyio.move_on_after(left))
                    limits.enter_context(self._clock.cancel_after(left))
                await matcher.over.wait()
        finally:
            ended = matcher.over.is_set()
            matcher.end()
        if matcher.error is not None:
            raise matcher.error
        if matcher.event is not None:
            return matcher.event
        if self._timeout is None or ended:
            what = "bus" if matcher.session_id is None else f"session {matcher.session_id!r}"
            message = f"The {what} ended before {matcher.target_name} was published."
            raise BusClosedError(message)
        raise ExpectTimeoutError(matcher.target_name, seconds=self._timeout, seen=matcher.seen)

    def __del__(self) -> None:
        if not self._awaited:
            self._matcher.end()
            warnings.warn(
                f"bus.expect({self._matcher.target_name}) was never awaited.",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        return f"<Expectation of {self._matcher.target_name}>"
