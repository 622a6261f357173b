"""One effect per key, however often a message comes."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple, cast, final

import anyio

from msgbus.bus.context import Frame, current_frame
from msgbus.errors import MiddlewareError
from msgbus.messages.message import Event, message_type_of
from msgbus.middleware.chain import CallNext
from msgbus.middleware.delivery import (
    KeyOf,
    clock_at_hand,
    current_handler,
    refuse_foreign_loop,
    require_above_zero,
)
from msgbus.runtime.clock import Clock


class _Place(NamedTuple):
    """Whose effect, and of what."""

    handler: Hashable
    key: Hashable


@final
class _Flight:
    """A call that is under way, and those who wait for its value."""

    __slots__ = ("_landed", "frame", "succeeded", "value")

    def __init__(self, frame: Frame | None) -> None:
        self.frame = frame
        self.succeeded = False
        self.value: Any = None
        self._landed: anyio.Event | None = None

    async def wait(self) -> None:
        """Return when it has ended, in whatever way."""
        if self._landed is None:
            self._landed = anyio.Event()
        await self._landed.wait()

    def land(self) -> None:
        """Let the waiters look."""
        if self._landed is not None:
            self._landed.set()


@final
class IdempotencyMiddleware:
    """Lets each handler handle each key once; a duplicate gets the first one's value.

    A duplicate that comes while the first is under way waits for it. A failure is not
    remembered: the next duplicate, or one of those that wait, tries again; the same if the
    first is cancelled. Values are kept in memory: after a restart, or once `max_size` newer
    keys have come, a duplicate is new again.

    It remembers what stands inside of it: list it before middleware whose failure should
    let a duplicate try again. Two handlers of one event never share a key, even if they
    have the same name.

    A list for a batch handler is thinned: the handler gets the events that are new, and is
    not called if there are none.

    Args:
        key: From a message to its key, `None` for messages that are never duplicates; the
            message id unless given.
        max_size: Keys to remember; the one used longest ago is forgotten first.
        ttl: Seconds to remember a key for; without end unless given.
        clock: Where time comes from; the bus's clock unless given.

    Raises:
        ConfigurationError: `max_size` or `ttl` is not above 0.
    """

    batch: Final = True

    def __init__(
        self,
        *,
        key: KeyOf | None = None,
        max_size: int = 10_000,
        ttl: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        require_above_zero("max_size", max_size)
        require_above_zero("ttl", ttl)
        self._key = key
        self._max_size = max_size
        self._ttl = ttl
        self._clock = clock
        self._known: OrderedDict[object, tuple[Any, float]] = OrderedDict()
        self._flights: dict[object, _Flight] = {}

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        """The value of the first such message, by handling this one if it is the first.

        Raises:
            MiddlewareError: The handler of the first asks for its own value.
        """
        refuse_foreign_loop()
        if isinstance(message, list):
            return await self._thin(cast("list[Event]", message), call_next)
        place = self._place_of(message)
        if place is None:
            return await call_next(message)
        while not self._knows(place):
            flight = self._flights.get(place)
            if flight is None:
                return await self._fly((place,), message, call_next)
            await self._wait_for(flight, message)
            if flight.succeeded:
                return flight.value
        return self._known[place][0]

    async def _thin(self, events: list[Event], call_next: CallNext) -> Any:
        left: dict[object, Event] = {}
        for event in events:
            # One without a key is like no other, and is not remembered.
            left.setdefault(self._place_of(event) or object(), event)
        value: Any = None
        while left:
            left = {place: event for place, event in left.items() if not self._knows(place)}
            new = [place for place in left if place not in self._flights]
            if new:
                # Never while waiting for another list, so that no two wait for each other.
                value = await self._fly(new, [left.pop(place) for place in new], call_next)
            elif left:
                place = next(iter(left))
                flight = self._flights[place]
                await self._wait_for(flight, events)
                if flight.succeeded:
                    del left[place]
        return value

    async def _fly(self, places: Sequence[object], message: Any, call_next: CallNext) -> Any:
        flight = _Flight(current_frame.get())
        for place in places:
            self._flights[place] = flight
        try:
            flight.value = await call_next(message)
            flight.succeeded = True
            self._remember(places, flight.value)
            return flight.value
        finally:
            for place in places:
                del self._flights[place]
            flight.land()

    async def _wait_for(self, flight: _Flight, message: Any) -> None:
        frame = current_frame.get()
        while frame is not None:
            if frame is flight.frame:
                text = (
                    f"{current_handler()} was asked for a message with the key of the one it is "
                    f"at work on, and would wait for itself. Give the inner message another key."
                )
                raise MiddlewareError(
                    text, handler=current_handler(), message_type=message_type_of(message)
                )
            frame = frame.parent
        await flight.wait()

    def _place_of(self, message: Any) -> _Place | None:
        key = message.message_id if self._key is None else self._key(message)
        if key is None:
            return None
        frame = current_frame.get()
        if frame is not None and frame.is_replay:
            return None  # it is shown again on purpose
        # Not its name, which two handlers may share; and weak, as its session may end.
        handler = None if frame is None else weakref.ref(frame.owner.registration)
        return _Place(handler, key)

    def _knows(self, place: object) -> bool:
        known = self._known.get(place)
        if known is None:
            return False
        if self._ttl is not None and clock_at_hand(self._clock).now() >= known[1]:
            del self._known[place]
            return False
        self._known.move_to_end(place)
        return True

    def _remember(self, places: Sequence[object], value: Any) -> None:
        until = 0.0 if self._ttl is None else clock_at_hand(self._clock).now() + self._ttl
        for place in places:
            if isinstance(place, _Place):
                self._known[place] = (value, until)
        while len(self._known) > self._max_size:
            self._known.popitem(last=False)
