"""Events as an async iterator, for code that would rather loop than be called."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, final

import anyio

from msgbus.bus.protocols import E
from msgbus.errors import BusStateError
from msgbus.handlers.registration import Registration, make_registration, read_event_target
from msgbus.telemetry.logging import log

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from msgbus.bus.bus_state import BusCore
    from msgbus.bus.subscription import Subscription


@final
class EventStream(Generic[E]):
    """Events of one type, or of some topics, from the moment it is entered.

    A reader that is too slow misses the oldest events rather than holding up the bus:
    `missed` counts them, and each gap is logged as `stream_lagged`.
    """

    def __init__(
        self,
        core: BusCore,
        target: type[E] | str,
        buffer: int,
        register: Callable[[Registration], Subscription],
        *,
        session_id: str | None = None,
    ) -> None:
        if buffer < 1:
            message = f"buffer must be at least 1, not {buffer}."
            raise ValueError(message)
        self._core = core
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
        """Events that fell out of the buffer because the reader was too slow."""

    @property
    def lag(self) -> int:
        """Events that wait to be read."""
        return len(self._buffer)

    async def __aenter__(self) -> Self:
        self._core.require_home("stream events of")
        classes, pattern = read_event_target(self._target)
        registration = make_registration(
            classes, self._take, pattern=pattern, inline=True, durable=False
        )
        self._target_name = registration.target_name
        self._subscription = self._register(registration)
        self._core.streams.add(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        self._core.streams.discard(self)
        if self._subscription is not None:
            await self._subscription.close(timeout=0)

    def end(self) -> None:
        """Let the reader's loop end after what is buffered."""
        self._closed = True
        self._news.set()
        if self._subscription is not None:
            # It ends with this run of the bus, and must not see the next one.
            self._core.registry.remove(self._subscription.registration, self.session_id)

    def _take(self, event: E) -> None:
        if len(self._buffer) == self._buffer.maxlen:
            self.missed += 1
            if not self._in_gap:
                self._in_gap = True
                log.warning(
                    "stream_lagged",
                    bus=self._core.config.name,
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
