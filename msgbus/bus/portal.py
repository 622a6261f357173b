"""`BusPortal`: the bus for other threads, with blocking calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, TypeVar, cast, final

from typing_extensions import ParamSpec

from msgbus.bus.protocols import E, SendingMethods

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from msgbus.bus.bus import MessageBus
    from msgbus.bus.bus_state import BusState
    from msgbus.bus.streams import EventStream, Where

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Run a method of the bus on its event loop while the caller's thread waits."""
    name = method.__name__

    @wraps(method)
    def send(self: BusPortal, /, *args: P.args, **options: P.kwargs) -> T:
        return cast("T", self.wait(lambda: getattr(self.bus, name)(*args, **options)))

    del send.__wrapped__  # it would pass for a coroutine function
    vars(send)["__signature__"] = inspect.signature(method)
    return send


@final
class BusPortal:
    """Blocking calls for other threads. Made by `bus.portal()`; thread-safe.

    Each call runs on the bus's event loop and blocks its thread until it is done. After a
    restart of the bus it goes to the new loop.
    """

    def __init__(self, bus: MessageBus, state: BusState) -> None:
        self.bus = bus
        """The bus itself, which belongs to its event loop."""
        self._state = state
        self._runtime = state.require_runtime()

    execute = _blocking(SendingMethods.execute)
    call = _blocking(SendingMethods.call)
    publish = _blocking(SendingMethods.publish)
    publish_many = _blocking(SendingMethods.publish_many)
    request = _blocking(SendingMethods.request)
    enqueue = _blocking(SendingMethods.enqueue)

    def stream(self, event_type: type[E] | str, *, buffer: int = 1000) -> BlockingStream[E]:
        """Events as an iterator: `with portal.stream(OrderPlaced) as events:`."""
        return BlockingStream(self.bus.stream(event_type, buffer=buffer), self)

    def expect(
        self,
        event_type: type[E] | str,
        *,
        where: Where[E] | None = None,
        timeout: float | None = None,
    ) -> E:
        """Wait for the next event that matches, published after this call."""

        async def wait() -> E:
            return await self.bus.expect(event_type, where=where, timeout=timeout)

        return self.wait(wait)

    def wait(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine function on the bus's event loop, and return its value.

        Raises:
            BusStateError: Called on that loop's own thread, which would wait for itself.
        """
        self._state.require_not_forked("call")
        # Once the bus has stopped, its last loop raises or ends a stream; the next start may be
        # on another loop.
        self._runtime = self._state.runtime or self._runtime
        return self._runtime.run_from_thread(function)


@final
class BlockingStream(Generic[E]):
    """Blocking iterator over an `EventStream`, for other threads."""

    def __init__(self, stream: EventStream[E], portal: BusPortal) -> None:
        self._stream = stream
        self._portal = portal

    @property
    def missed(self) -> int:
        """Events that fell out of the buffer because the reader was too slow."""
        return self._stream.missed

    @property
    def lag(self) -> int:
        """Events that wait to be read."""
        return self._stream.lag

    def __enter__(self) -> Self:
        self._portal.wait(self._stream.__aenter__)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._portal.wait(lambda: self._stream.__aexit__(kind, error, trace))

    def __iter__(self) -> Self:
        aiter(self._stream)  # refuses one that was not entered
        return self

    def __next__(self) -> E:
        async def read() -> E | None:
            return await anext(self._stream, None)

        event = self._portal.wait(read)
        if event is None:
            raise StopIteration
        return event
