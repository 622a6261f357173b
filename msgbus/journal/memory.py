"""`MemoryJournal`: the same tables and rules in this process's memory, for tests and trials."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Final, TypeVar, final

import anyio.lowlevel

from msgbus.errors import JournalClosedError, LeaseLostError
from msgbus.journal.records import AckLevel, Lease
from msgbus.journal.sqlite.faults import closed
from msgbus.journal.sqlite.files import MEMORY, open_writer
from msgbus.journal.sqlite.readers import snapshot
from msgbus.journal.sqlite.store import Store
from msgbus.journal.tables import TableJournal
from msgbus.journal.watch import Watch
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.event_loop import Runtime, current_runtime

if TYPE_CHECKING:
    from msgbus.journal.codec import PayloadCodec
    from msgbus.runtime.event_loop import Task

T = TypeVar("T")

_numbers: Final = count(1)


@final
class MemoryJournal(TableJournal):
    """A journal that ends with the process.

    There is no thread: each call is done where it is made, so a test on virtual time gives
    the same answer every time. It belongs to one event loop.
    """

    def __init__(self, *, clock: Clock | None = None, codec: PayloadCodec | None = None) -> None:
        super().__init__(f"memory-{next(_numbers)}", AckLevel.MEMORY, codec)
        self._clock = clock or SystemClock()
        self._store = Store(open_writer(MEMORY, 0.0), self.path, self._level, codec)
        self._watch = Watch(self._clock)
        self._keepers: dict[str, Task] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<MemoryJournal {self.path}>"

    async def _write(self, work: Callable[[Store], T]) -> T:
        # Written in the order of the calls, so nothing else may run in between; and a caller
        # that is cancelled must not miss that it was written.
        await anyio.lowlevel.checkpoint_if_cancelled()
        try:
            return self._write_now(work)
        finally:
            await anyio.lowlevel.cancel_shielded_checkpoint()

    def _write_now(self, work: Callable[[Store], T]) -> T:
        if self._is_closed:
            raise closed(self.path)
        store = self._store
        store.begin()
        try:
            value = work(store)
            store.commit()
        except BaseException:
            store.rollback()
            raise
        self._watch.tell(store.head)
        return value

    async def _read(self, function: Callable[[sqlite3.Connection], T]) -> T:
        await anyio.lowlevel.checkpoint()
        if self._is_closed:
            raise closed(self.path)
        return snapshot(self._store.connection, function)

    def _read_now(self, function: Callable[[sqlite3.Connection], T]) -> T:
        if self._is_closed:
            raise closed(self.path)
        return function(self._store.connection)

    async def keep(
        self, lease: Lease, every: float, *, on_lost: Callable[[], object] | None = None
    ) -> None:
        """Renew by itself every so many seconds; see `Journal.keep`."""
        await self.renew(lease)
        self._drop_keeper(lease.name)
        runtime: Runtime = current_runtime()
        self._keepers[lease.name] = runtime.spawn(
            self._keep, lease, every, on_lost, name=f"msgbus lease of {lease.name}"
        )

    async def _keep(self, lease: Lease, every: float, on_lost: Callable[[], object] | None) -> None:
        while not self._is_closed:
            await self._clock.sleep(every)
            try:
                self._write_now(lambda store: store.renew(lease))
            except JournalClosedError:
                return
            except LeaseLostError:
                if on_lost is not None:
                    on_lost()
                return

    async def release(self, lease: Lease) -> None:
        """Let the next holder in at once; nothing happens if it is lost already."""
        self._drop_keeper(lease.name)
        await super().release(lease)

    def _drop_keeper(self, name: str) -> None:
        keeper = self._keepers.pop(name, None)
        if keeper is not None:
            keeper.cancel()

    async def close(self) -> None:
        """Forget everything; may be called again."""
        for name in list(self._keepers):
            self._drop_keeper(name)
        if not self._is_closed:
            self._is_closed = True
            self._store.connection.close()
