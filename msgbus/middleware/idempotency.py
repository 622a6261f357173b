"""Deduplication: each handler handles each key once."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple, cast, final

import anyio

from msgbus.errors import MiddlewareError
from msgbus.messages.frame import Frame, current_frame
from msgbus.messages.message import Event, message_type_of
from msgbus.middleware.chain import CallNext
from msgbus.middleware.delivery import (
    KeyOf,
    current_clock,
    current_handler,
    refuse_foreign_loop,
    require_above_zero,
)
from msgbus.runtime.clock import Clock


class _HandlerKey(NamedTuple):
    """A key of one handler."""

    handler: Hashable
    key: Hashable


@final
class _CallInFlight:
    """A call in flight, whose value duplicates wait for."""

    __slots__ = ("_ended", "frame", "succeeded", "value")

    def __init__(self, frame: Frame | None) -> None:
        self.frame = frame
        self.succeeded = False
        self.value: Any = None
        self._ended: anyio.Event | None = None

    async def wait(self) -> None:
        """Wait until it has ended, in whatever way."""
        if self._ended is None:
            self._ended = anyio.Event()
        await self._ended.wait()

    def end(self) -> None:
        """Wake the duplicates that wait."""
        if self._ended is not None:
            self._ended.set()


@final
class IdempotencyMiddleware:
    """Handle each key once per handler; a duplicate gets the value of the first message.

    A duplicate that arrives while the first is in flight waits for it. Failures and
    cancellations are not remembered: the next duplicate, or one that waits, is handled.
    Values are kept in memory: after a restart, or after `max_size` newer keys, a duplicate
    is handled again.

    It remembers the outcome of the rest of the chain: list it before middleware whose failure
    should not count as handled. Two handlers of one event never share a key, even if they
    have the same name.

    Of a list for a batch handler, the handler gets only the new events; without any it is not
    called.

    Args:
        key: Maps a message to its key, `None` for messages that are never duplicates; the
            message id unless given.
        max_size: Keys to remember; the least recently used is forgotten first.
        ttl: Seconds to remember a key; forever unless given.
        clock: Clock to use; the bus's clock unless given.

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
        self._in_flight: dict[object, _CallInFlight] = {}

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        """Handle the message if it is the first of its key, else return the first one's value.

        Raises:
            MiddlewareError: The handler of the first waits for its own value.
        """
        refuse_foreign_loop()
        if isinstance(message, list):
            return await self._call_with_new(cast("list[Event]", message), call_next)
        key = self._key_of(message)
        if key is None:
            return await call_next(message)
        while not self._knows(key):
            call = self._in_flight.get(key)
            if call is None:
                return await self._call((key,), message, call_next)
            await self._wait_for(call, message)
            if call.succeeded:
                return call.value
        return self._known[key][0]

    async def _call_with_new(self, events: list[Event], call_next: CallNext) -> Any:
        left: dict[object, Event] = {}
        for event in events:
            # An event without a key is unique, and is not remembered.
            left.setdefault(self._key_of(event) or object(), event)
        value: Any = None
        while left:
            left = {key: event for key, event in left.items() if not self._knows(key)}
            new = [key for key in left if key not in self._in_flight]
            if new:
                # Not while waiting for another list, so that no two lists deadlock.
                value = await self._call(new, [left.pop(key) for key in new], call_next)
            elif left:
                key = next(iter(left))
                call = self._in_flight[key]
                await self._wait_for(call, events)
                if call.succeeded:
                    del left[key]
        return value

    async def _call(self, keys: Sequence[object], message: Any, call_next: CallNext) -> Any:
        call = _CallInFlight(current_frame.get())
        for key in keys:
            self._in_flight[key] = call
        try:
            call.value = await call_next(message)
            call.succeeded = True
            self._remember(keys, call.value)
            return call.value
        finally:
            for key in keys:
                del self._in_flight[key]
            call.end()

    async def _wait_for(self, call: _CallInFlight, message: Any) -> None:
        frame = current_frame.get()
        while frame is not None:
            if frame is call.frame:
                text = (
                    f"{current_handler()} would wait for itself: the message has the key of the "
                    f"one that it is handling. Give the inner message another key."
                )
                raise MiddlewareError(
                    text, handler=current_handler(), message_type=message_type_of(message)
                )
            frame = frame.parent
        await call.wait()

    def _key_of(self, message: Any) -> _HandlerKey | None:
        key = message.message_id if self._key is None else self._key(message)
        if key is None:
            return None
        frame = current_frame.get()
        if frame is not None and frame.is_replay:
            return None  # delivered again on purpose
        # Not the name, which two handlers may share; weak, as its session may end.
        handler = None if frame is None else weakref.ref(frame.owner.registration)
        return _HandlerKey(handler, key)

    def _knows(self, key: object) -> bool:
        known = self._known.get(key)
        if known is None:
            return False
        if self._ttl is not None and current_clock(self._clock).now() >= known[1]:
            del self._known[key]
            return False
        self._known.move_to_end(key)
        return True

    def _remember(self, keys: Sequence[object], value: Any) -> None:
        until = 0.0 if self._ttl is None else current_clock(self._clock).now() + self._ttl
        for key in keys:
            if isinstance(key, _HandlerKey):
                self._known[key] = (value, until)
        while len(self._known) > self._max_size:
            self._known.popitem(last=False)
