"""What an active subscription writes to its journal and reads from it, fenced by its lease."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

from msgbus.journal import operations as op
from msgbus.journal.records import Cursor, Page, Record, Scheduled
from msgbus.subscriptions.letters import letter_of
from msgbus.subscriptions.window import Entry

if TYPE_CHECKING:
    from msgbus.journal.port import Journal
    from msgbus.runtime.clock import Clock
    from msgbus.subscriptions.desk import Desk
    from msgbus.subscriptions.tenure import Tenure

INFINITY = float("inf")

OnDeadLetter: TypeAlias = "Callable[[Record, BaseException | None, int], Sequence[op.Operation]]"
"""Given a record, its last error and the number of tries: what to write with its dead letter."""


class Source(NamedTuple):
    """Which messages of the journal a subscription is about."""

    topic: str | None = None
    """Only this topic."""
    names: Collection[str] | None = None
    """Only these wire names."""
    matches: Callable[[Record], bool] | None = None
    """Only records for which this is true."""
    target: str = ""
    """What its handler is registered for; dead letters say so."""


@final
class Ledger:
    """Turns what happened at the desk into transactions; what is not written stays to be."""

    def __init__(
        self,
        journal: Journal,
        name: str,
        desk: Desk,
        tenure: Tenure,
        clock: Clock,
        source: Source,
        on_dead_letter: OnDeadLetter | None = None,
    ) -> None:
        self._journal = journal
        self._name = name
        self._desk = desk
        self._tenure = tenure
        self._clock = clock
        self._source = source
        self._on_dead_letter = on_dead_letter

    # -- reading -------------------------------------------------------------------------------

    async def read(self, start: int, limit: int) -> tuple[list[Record], int]:
        """Messages from `start` on, and the offset up to which there are no others."""
        source = self._source
        page: Page = await self._journal.read(start, limit, source.topic, names=source.names)
        if source.matches is None:
            return list(page), page.next - 1
        return [record for record in page if source.matches(record)], page.next - 1

    async def begin(self, offset: int) -> Cursor:
        """The cursor; a new one is written at once, behind `offset`.

        Raises:
            CursorError: It cannot be read.
        """
        epoch = self._tenure.epoch
        await self._journal.commit([op.CreateCursor(self._name, offset, epoch)])
        cursor = await self._journal.cursor(self._name)
        assert cursor is not None  # noqa: S101 (it was just made)
        return cursor

    async def attempts(self) -> dict[int, int]:
        """Tries beyond the cursor that the journal knows of."""
        return await self._journal.attempts(self._name)

    async def head(self) -> int:
        """The newest offset of the journal."""
        return await self._journal.head()

    async def scheduled(self, limit: int) -> list[Scheduled]:
        """The retries of this subscription, in the order of their time."""
        return await self._journal.due(INFINITY, limit, subscription=self._name)

    async def count_scheduled(self) -> int:
        """How many retries of this subscription wait."""
        return await self._journal.count_scheduled(subscription=self._name)

    async def dates(self, records: Iterable[Record]) -> dict[str, Scheduled]:
        """When these may be tried again, by message id, if the schedule knows of them."""
        ids = [self.retry_id(record.message_id) for record in records]
        return {entry.record.message_id: entry for entry in await self._journal.scheduled(ids)}

    async def letters_by_key(self) -> dict[str, int]:
        """The newest dead letter of each key."""
        newest: dict[str, int] = {}
        last = 0
        while letters := await self._journal.dead_letters(self._name, after=last):
            last = letters[-1].id
            for letter in letters:
                key = self._desk.key_of(letter.record)
                if key is not None:
                    newest[key] = letter.id
        return newest

    async def has_letter(self, number: int) -> bool:
        """Whether this dead letter is still there."""
        letters = await self._journal.dead_letters(self._name, after=number - 1, limit=1)
        return bool(letters) and letters[0].id == number

    async def marked(self, records: Iterable[Record]) -> set[str]:
        """Ids of those that were handled already."""
        return await self._journal.marked(self._name, [record.message_id for record in records])

    # -- writing -------------------------------------------------------------------------------

    async def commit(
        self,
        operations: Sequence[op.Operation] = (),
        *,
        done: Collection[int] = (),
        close: bool = False,
    ) -> None:
        """Write these, and with them everything that waits to be written.

        `done` are offsets that these operations settle; the cursor is written as if they
        were passed already. Only a success makes the cursor clean.

        Raises:
            LeaseLostError: Another engine has taken over; nothing was written.
        """
        desk = self._desk
        cursor = desk.cursor
        position = cursor.position_after(done)
        marks, unschedule = len(desk.marks), len(desk.unschedule)
        epoch = self._tenure.epoch
        everything: list[op.Operation] = [op.Fence(self._name, epoch), *operations]
        everything += [op.Mark(self._name, message_id) for message_id in desk.marks]
        everything += [op.Unschedule(self.retry_id(entry)) for entry in desk.unschedule]
        if position > cursor.persisted or close:
            everything.append(op.MoveCursor(self._name, position, epoch, close))
        await self._journal.commit(everything)
        if position > cursor.persisted:
            desk.counts.flushes += 1
        cursor.written(position)
        desk.dirty_since = self._clock.now() if cursor.is_dirty else None
        del desk.marks[:marks]
        del desk.unschedule[:unschedule]

    async def seek(self, offset: int) -> None:
        """Put the cursor to `offset`."""
        await self._journal.commit([op.SeekCursor(self._name, offset, self._tenure.epoch)])

    # -- operations ----------------------------------------------------------------------------

    def opened(self, last: int) -> op.Operation:
        """Messages up to `last` are handed out."""
        return op.OpenWindow(self._name, last, self._tenure.epoch)

    def passed(self, last: int) -> op.Operation:
        """Messages up to `last` count as done, before they are handed out."""
        return op.MoveCursor(self._name, last, self._tenure.epoch)

    def counted(self, entries: Iterable[Entry]) -> op.Operation:
        """The next try of each begins."""
        offsets = [entry.offset for entry in entries for _ in range(entry.attempt - entry.stored)]
        return op.CountAttempts(self._name, offsets, self._tenure.epoch)

    def retry_id(self, message_id: str) -> str:
        """The name under which a retry is scheduled."""
        return f"{self._name}/{message_id}"

    def retry(self, entry: Entry, due: float, attempt: int) -> Scheduled:
        """Try number `attempt`, to begin at `due`, seconds since the epoch."""
        record = entry.record
        return Scheduled(self.retry_id(record.message_id), due, record, self._name, attempt)

    def undated(self, entry: Entry) -> op.Operation:
        """The schedule need not keep it any more."""
        return op.Unschedule(self.retry_id(entry.record.message_id))

    def letter(self, entry: Entry) -> list[op.Operation]:
        """It is given up."""
        letter = letter_of(self._name, self._source.target, entry, self._desk, self._clock.time())
        operations: list[op.Operation] = [op.AddDeadLetter(letter)]
        if self._on_dead_letter is not None:
            operations += self._on_dead_letter(entry.record, entry.error, entry.attempt)
        return operations
