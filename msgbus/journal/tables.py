"""All calls of a journal that is made of tables; where they run is said by subclasses."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Self, TypeVar

from msgbus.journal.operations import Operation
from msgbus.journal.records import (
    Ack,
    AckLevel,
    Cursor,
    DeadLetter,
    DeliveryRecord,
    FlowNode,
    Kind,
    Lease,
    Page,
    Record,
    Scheduled,
    TicketRow,
)
from msgbus.journal.sqlite import queries, reads, schedules
from msgbus.journal.sqlite.letters import JournalRows
from msgbus.journal.sqlite.queries import Source
from msgbus.journal.sqlite.schedules import Whose
from msgbus.journal.sqlite.store import Store
from msgbus.journal.watch import Watch

if TYPE_CHECKING:
    from msgbus.journal.codec import PayloadCodec
    from msgbus.resilience.letter_rows import LetterRows

T = TypeVar("T")


class TableJournal(ABC):
    """What `SqliteJournal` and `MemoryJournal` have in common: the port, word for word."""

    def __init__(self, path: str, level: AckLevel, codec: PayloadCodec | None) -> None:
        self.path = path
        self._level = level
        self._codec = codec
        self._watch: Watch

    @property
    def level(self) -> AckLevel:
        """What an append has reached when it returns."""
        return self._level

    @abstractmethod
    async def _write(self, work: Callable[[Store], T]) -> T:
        """The value of `work`, all of it or nothing, once it is committed."""

    @abstractmethod
    async def _read(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """The value of `function` on one state of the tables."""

    @abstractmethod
    def _read_now(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """The same in the caller's thread; what is being written may show."""

    @abstractmethod
    async def close(self) -> None:
        """Finish what was begun and let go of everything; may be called again."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _source(self, connection: sqlite3.Connection) -> Source:
        return Source(connection, self.path, self._codec)

    def _rows(self, connection: sqlite3.Connection) -> JournalRows:
        return JournalRows(connection, self.path, self._codec)

    # -- writing -----------------------------------------------------------------------------

    async def append(self, records: Sequence[Record]) -> list[Ack]:
        """Add messages, all or none; see `Journal.append`."""
        return await self._write(lambda store: store.append(records))

    async def commit(self, operations: Sequence[Operation]) -> list[Ack]:
        """Do all of this or nothing; see `Journal.commit`."""
        return await self._write(lambda store: store.apply_all(operations))

    async def transact(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """The value of `function` inside a transaction; see `Journal.transact`."""
        return await self._write(lambda store: store.call(function))

    # -- messages ----------------------------------------------------------------------------

    async def read(
        self,
        start: int,
        limit: int = 1000,
        topic: str | None = None,
        *,
        names: Collection[str] | None = None,
    ) -> Page:
        """Records from offset `start` on; see `Journal.read`."""
        return await self._read(
            lambda connection: queries.read(self._source(connection), start, limit, topic, names)
        )

    async def head(self) -> int:
        """The highest offset ever given, 0 if there was none."""
        return await self._read(reads.head)

    async def first(self) -> int:
        """The lowest offset that is left; behind the head if none is."""
        return await self._read(queries.first)

    async def offset_at(self, time: float) -> int:
        """The lowest offset recorded at `time` or later; behind the head if there is none."""
        return await self._read(lambda connection: queries.offset_at(connection, time))

    async def wait(self, after: int, timeout: float | None = None) -> int:
        """The head, as soon as it is beyond `after`; see `Journal.wait`."""
        await self._watch.until(lambda: self._watch.head > after, timeout)
        return self._watch.head

    async def changed(self, since: int, timeout: float | None = None) -> int:
        """A number that grows with every commit seen; see `Journal.changed`."""
        await self._watch.until(lambda: self._watch.version != since, timeout)
        return self._watch.version

    async def message(self, message_id: str) -> Record | None:
        """The message of this id."""
        return await self._read(
            lambda connection: queries.message(self._source(connection), message_id)
        )

    async def flow(self, correlation_id: str) -> tuple[FlowNode, ...]:
        """All messages of one flow as trees; see `Journal.flow`."""
        return await self._read(
            lambda connection: queries.flow(self._source(connection), correlation_id)
        )

    async def find(
        self,
        *,
        topic: str | None = None,
        name: str | None = None,
        key: str | None = None,
        kind: Kind | None = None,
        session_id: str | None = None,
        correlation_id: str | None = None,
        since: float | None = None,
        until: float | None = None,
        start: int = 0,
        limit: int = 100,
        newest_first: bool = False,
    ) -> Page:
        """Messages that fit everything given, page by page; see `Journal.find`."""
        return await self._read(
            lambda connection: queries.find(
                self._source(connection),
                topic=topic,
                name=name,
                key=key,
                kind=kind,
                session_id=session_id,
                correlation_id=correlation_id,
                since=since,
                until=until,
                start=start,
                limit=limit,
                newest_first=newest_first,
            )
        )

    async def deliveries(self, message_id: str) -> list[DeliveryRecord]:
        """How the deliveries of one message ended, in the order they were recorded."""
        return await self._read(lambda connection: reads.deliveries(connection, message_id))

    # -- subscriptions -----------------------------------------------------------------------

    async def cursor(self, name: str) -> Cursor | None:
        """How far a subscription has come; see `Journal.cursor`."""
        return await self._read(lambda connection: reads.cursor(connection, name, self.path))

    async def cursors(self) -> list[Cursor]:
        """All of them, by name."""
        return await self._read(lambda connection: reads.cursors(connection, self.path))

    async def attempts(self, name: str) -> dict[int, int]:
        """How often messages beyond the cursor were tried, by offset, if counted."""
        return await self._read(lambda connection: reads.attempts(connection, name))

    async def marked(self, subscription: str, message_ids: Iterable[str]) -> set[str]:
        """Those of the ids that the subscription has marked as handled."""
        wanted = list(message_ids)
        return await self._read(lambda connection: reads.marked(connection, subscription, wanted))

    async def dead_letters(
        self, subscription: str | None = None, *, after: int = 0, limit: int = 100
    ) -> list[DeadLetter]:
        """Dead letters with an id beyond `after`, oldest first; see `Journal.dead_letters`."""
        return await self._read(
            lambda connection: self._rows(connection).open_letters(subscription, after, limit)
        )

    async def write_letters(self, work: Callable[[LetterRows], T]) -> T:
        """The value of `work` on all letters, in one transaction; it may be called again."""
        return await self._write(lambda store: work(self._rows(store.connection)))

    async def read_letters(self, work: Callable[[LetterRows], T]) -> T:
        """The value of `work`, which only reads, on one state of all letters."""
        return await self._read(lambda connection: work(self._rows(connection)))

    def read_letters_now(self, work: Callable[[LetterRows], T]) -> T:
        """The same at once, from any thread: for numbers that are asked for seldom."""
        return self._read_now(lambda connection: work(self._rows(connection)))

    async def due(
        self,
        time: float,
        limit: int = 100,
        *,
        subscription: str | None = None,
        names: Collection[str] | None = None,
    ) -> list[Scheduled]:
        """What is due at `time`, the longest overdue first; see `Journal.due`."""
        whose = Whose(subscription, names)
        return await self._read(
            lambda connection: schedules.due(self._source(connection), time, limit, whose)
        )

    async def next_due(
        self, *, subscription: str | None = None, names: Collection[str] | None = None
    ) -> float | None:
        """When the next of those that `due` is about is due."""
        whose = Whose(subscription, names)
        return await self._read(lambda connection: schedules.next_due(connection, whose))

    async def scheduled(self, ids: Iterable[str]) -> list[Scheduled]:
        """Those of these entries that are in the schedule, whoever they are for."""
        wanted = list(ids)
        return await self._read(
            lambda connection: schedules.entries(self._source(connection), wanted)
        )

    async def count_scheduled(
        self, *, subscription: str | None = None, names: Collection[str] | None = None
    ) -> int:
        """How many of those that `due` is about wait in all, due or not."""
        whose = Whose(subscription, names)
        return await self._read(lambda connection: schedules.count(connection, whose))

    async def ticket(self, message_id: str) -> TicketRow | None:
        """How an enqueued command stands."""
        found = await self.tickets([message_id])
        return found[0] if found else None

    async def tickets(self, message_ids: Iterable[str]) -> list[TicketRow]:
        """How several of them stand; those that were never enqueued are left out."""
        wanted = list(message_ids)
        return await self._read(lambda connection: reads.tickets(connection, wanted))

    # -- leases ------------------------------------------------------------------------------

    async def acquire(self, name: str, holder: str, *, seen: Lease | None = None) -> Lease:
        """The lease as it now stands; see `Journal.acquire`."""
        return await self._write(lambda store: store.acquire(name, holder, seen))

    async def renew(self, lease: Lease) -> Lease:
        """Show that the holder is alive; see `Journal.renew`."""
        return await self._write(lambda store: store.renew(lease))

    async def release(self, lease: Lease) -> None:
        """Let the next holder in at once; nothing happens if it is lost already."""
        await self._write(lambda store: store.release(lease))

    async def lease(self, name: str) -> Lease | None:
        """Who holds it, if anybody ever did."""
        return await self._read(lambda connection: reads.lease(connection, name))
