"""Limit on concurrent messages; excess messages wait in order."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count
from typing import Any, Final, final

import anyio

from msgbus.errors import ConfigurationError
from msgbus.messages.frame import Frame, current_frame
from msgbus.middleware.chain import CallNext
from msgbus.middleware.delivery import KeyOf, messages_in, refuse_foreign_loop


@final
class _KeySlots:
    """The slots of one key, the frames that hold one, and the messages that wait."""

    __slots__ = ("_holders", "_slots", "number", "users")

    def __init__(self, limit: int, number: int) -> None:
        self.number = number
        self.users = 0
        self._slots = anyio.Semaphore(limit, fast_acquire=True)
        self._holders: dict[Frame | None, anyio.Semaphore] = {}

    async def acquire(self, frame: Frame | None) -> anyio.Semaphore:
        """Wait for a slot; the semaphore returned must be released by the caller."""
        lender = self._lender_of(frame)
        if lender is None:
            await self._slots.acquire()
            return self._slots
        try:
            self._slots.acquire_nowait()
            return self._slots
        except anyio.WouldBlock:
            # A handler that waits for its own command lends it its slot, one command at a
            # time: otherwise both would wait for ever.
            await lender.acquire()
            return lender

    def _lender_of(self, frame: Frame | None) -> anyio.Semaphore | None:
        while frame is not None:
            if frame in self._holders:
                return self._holders[frame]
            frame = frame.parent
        return None

    def hold(self, frame: Frame | None) -> bool:
        """Let commands sent from `frame` borrow its slot; whether that is new."""
        if frame is None or frame in self._holders:
            return False
        self._holders[frame] = anyio.Semaphore(1, fast_acquire=True)
        return True

    def release(self, frame: Frame | None) -> None:
        """Undo `hold`."""
        del self._holders[frame]


@final
class ConcurrencyLimitMiddleware:
    """Limit the messages handled at once; excess messages wait in order of arrival.

    A message that is cancelled while it waits takes no slot.

    A command that a handler sends and waits for may use that handler's slot, one command at
    a time, so nested commands of one key never deadlock. Handlers that nest commands of
    *different* keys are like nested locks: they must all nest them in the same order.

    A list for a batch handler takes one slot; with `key`, one slot of each of its keys.

    Args:
        limit: Messages at once, in total or per key.
        key: Maps a message to the key it is counted under, `None` for no limit; all messages
            are counted together unless given. A key is forgotten once it is unused.

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
        self._slots_by_key: dict[Hashable, _KeySlots] = {}
        self._numbers = count()

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        """Call the handler once there is a slot for this message."""
        refuse_foreign_loop()
        by_key = {key: self._join(key) for key in self._keys_of(message)}
        frame = current_frame.get()
        acquired: list[anyio.Semaphore] = []
        held: list[_KeySlots] = []
        try:
            # In one order for all, so that no two lists wait for each other.
            for slots in sorted(by_key.values(), key=lambda slots: slots.number):
                acquired.append(await slots.acquire(frame))
                if slots.hold(frame):
                    held.append(slots)
            return await call_next(message)
        finally:
            for slots in held:
                slots.release(frame)
            for semaphore in acquired:
                semaphore.release()
            for key, slots in by_key.items():
                self._leave(key, slots)

    def _keys_of(self, handled: Any) -> set[Hashable]:
        if self._key is None:
            return {""}
        return {self._key(message) for message in messages_in(handled)} - {None}

    def _join(self, key: Hashable) -> _KeySlots:
        slots = self._slots_by_key.get(key)
        if slots is None:
            slots = self._slots_by_key[key] = _KeySlots(self._limit, next(self._numbers))
        slots.users += 1
        return slots

    def _leave(self, key: Hashable, slots: _KeySlots) -> None:
        slots.users -= 1
        if not slots.users:
            del self._slots_by_key[key]
