"""So many messages at once, and the rest in line."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count
from typing import Any, Final, final

import anyio

from msgbus.bus.context import Frame, current_frame
from msgbus.errors import ConfigurationError
from msgbus.middleware.chain import CallNext
from msgbus.middleware.delivery import KeyOf, messages_in, refuse_foreign_loop


@final
class _Room:
    """The places of one key, those who have one and those who wait in line."""

    __slots__ = ("_holders", "_places", "number", "users")

    def __init__(self, limit: int, number: int) -> None:
        self.number = number
        self.users = 0
        self._places = anyio.Semaphore(limit, fast_acquire=True)
        self._holders: dict[Frame | None, anyio.Semaphore] = {}

    async def enter(self, frame: Frame | None) -> anyio.Semaphore:
        """Wait for a place; what is given back must be released in the end."""
        lender = self._lender_of(frame)
        if lender is None:
            await self._places.acquire()
            return self._places
        try:
            self._places.acquire_nowait()
            return self._places
        except anyio.WouldBlock:
            # A handler that waits for its own command needs no place meanwhile, and would
            # wait for ever if it kept it. It lends it to one such command at a time.
            await lender.acquire()
            return lender

    def _lender_of(self, frame: Frame | None) -> anyio.Semaphore | None:
        while frame is not None:
            if frame in self._holders:
                return self._holders[frame]
            frame = frame.parent
        return None

    def hold(self, frame: Frame | None) -> bool:
        """Let commands sent from `frame` borrow its place; whether that is new."""
        if frame is None or frame in self._holders:
            return False
        self._holders[frame] = anyio.Semaphore(1, fast_acquire=True)
        return True

    def let_go(self, frame: Frame | None) -> None:
        """End what `hold` began."""
        del self._holders[frame]


@final
class ConcurrencyLimitMiddleware:
    """Lets at most `limit` messages be handled at once; the rest waits in order of arrival.

    One that is cancelled in line leaves it, and those behind it move up.

    A command that a handler sends and waits for may run on that handler's own place, one
    at a time, so nested commands of one key never wait for each other. Handlers that nest
    commands of *different* keys are like locks taken inside of locks: they must all do so
    in one order.

    A list for a batch handler takes one place; with `key` one place of each of its keys.

    Args:
        limit: Messages at once, in all or per key.
        key: From a message to what it is counted under, `None` for no limit; all messages
            are counted together unless given. A key is forgotten when nobody uses it.

    Raises:
        ConfigurationError: `limit` is below 1.
    """

    batch: Final = True

    def __init__(self, limit: int, *, key: KeyOf | None = None) -> None:
        if limit < 1:
            message = f"limit must be at least 1, not {limit}: no message would ever get through."
            raise ConfigurationError(message)
        self._limit = limit
        self._key = key
        self._rooms: dict[Hashable, _Room] = {}
        self._numbers = count()

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        """Call on, when there is a place for this message."""
        refuse_foreign_loop()
        rooms = {key: self._join(key) for key in self._keys_of(message)}
        frame = current_frame.get()
        taken: list[anyio.Semaphore] = []
        held: list[_Room] = []
        try:
            # In one order for all, so that no two lists wait for each other.
            for room in sorted(rooms.values(), key=lambda room: room.number):
                taken.append(await room.enter(frame))
                if room.hold(frame):
                    held.append(room)
            return await call_next(message)
        finally:
            for room in held:
                room.let_go(frame)
            for places in taken:
                places.release()
            for key, room in rooms.items():
                self._leave(key, room)

    def _keys_of(self, handled: Any) -> set[Hashable]:
        if self._key is None:
            return {""}
        return {self._key(message) for message in messages_in(handled)} - {None}

    def _join(self, key: Hashable) -> _Room:
        room = self._rooms.get(key)
        if room is None:
            room = self._rooms[key] = _Room(self._limit, next(self._numbers))
        room.users += 1
        return room

    def _leave(self, key: Hashable, room: _Room) -> None:
        room.users -= 1
        if not room.users:
            del self._rooms[key]
