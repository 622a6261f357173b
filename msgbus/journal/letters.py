"""`JournalDeadLetterStore`: the dead letters of a journal, through the API of all stores."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar, cast, final

import anyio

from msgbus.errors import DeadLetterStoreError, JournalError, MsgBusError
from msgbus.journal.mailbag import Mailbag
from msgbus.journal.port import Journal
from msgbus.resilience.letter_room import tell
from msgbus.resilience.letter_rows import LetterRows
from msgbus.resilience.letters import DeadLetterEntry
from msgbus.resilience.stores import (
    LetterFilter,
    Notice,
    Overflow,
)
from msgbus.resilience.table_store import TableStore
from msgbus.runtime.arguments import missing_members, require_members
from msgbus.runtime.event_loop import current_runtime
from msgbus.telemetry.redaction import redact_exception

T = TypeVar("T")


class LetterJournal(Protocol):
    """A journal that keeps dead letters in a table; those of msgbus do."""

    async def write_letters(self, work: Callable[[LetterRows], T]) -> T:
        """The value of `work` on all letters, in one transaction; it may be called again."""
        ...

    async def read_letters(self, work: Callable[[LetterRows], T]) -> T:
        """The value of `work`, which only reads, on one state of all letters."""
        ...

    def read_letters_now(self, work: Callable[[LetterRows], T]) -> T:
        """The same at once, from any thread."""
        ...


@final
class JournalDeadLetterStore(TableStore):
    """Keeps dead letters in a journal, where durable subscriptions keep theirs.

    Both are found, replayed, edited and discarded here. What a subscription gives up is written
    in the transaction that passes the message. What is added here is handed to the journal's
    writer: `add` never waits, and a letter is safe once `flush` has returned.

    Close it before its journal. The journal is not closed by it.

    Args:
        journal: The journal, or a function that gives it when it is first needed; that may give
            `None` as long as there is none. Letters that come before wait for it.
        max_size: Letters to keep in the journal; no bound unless given.
        overflow: What is done with one letter too many, in the journal or on the way to it.
        buffer: Letters that may wait to be written.

    Raises:
        ConfigurationError: `max_size` or `buffer` is not above 0, or the journal keeps no dead
            letters that can be searched.
    """

    def __init__(
        self,
        journal: Journal | Callable[[], Journal | None],
        max_size: int | None = None,
        overflow: Overflow = Overflow.DROP_OLDEST,
        *,
        buffer: int = 10_000,
    ) -> None:
        super().__init__(max_size, overflow, buffer)
        self._find: Callable[[], Journal | None]
        self._known: LetterJournal | None
        if callable(journal) and missing_members(journal, LetterJournal):
            self._find, self._known = journal, None
        else:
            self._find, self._known = (lambda: cast("Journal", journal)), _with_letters(journal)
        self._bag = Mailbag(
            self._keep_all,
            self._tell,
            self._is_ready,
            buffer=buffer,
            overflow=self.overflow,
        )
        self._is_closed = False
        self._last_size = 0

    def add(self, letter: DeadLetterEntry) -> str | None:
        """Hand a letter over to be written; why not, if it is refused at once."""
        return "the store is closed" if self._is_closed else self._bag.add(letter)

    async def open(self) -> None:
        """Write what has waited, on this event loop from now on.

        Raises:
            DeadLetterStoreError: There is no journal, or it cannot be read.
            ConfigurationError: The journal keeps no dead letters.
        """
        self._is_closed = self._bag.is_closing = False
        self._bag.runtime = current_runtime()
        self._known = None  # a bus that was started again has another one
        await self._asked(LetterRows.head)

    async def flush(self) -> None:
        """Return once everything that was added is in the journal, or was told as lost.

        Raises:
            DeadLetterStoreError: Letters wait for a journal that is not open yet.
        """
        if not self._bag.is_empty:
            self._journal()
            await self._bag.empty()

    async def close(self) -> None:
        """Flush. The journal stays open; the store may be opened again."""
        self._is_closed = self._bag.is_closing = True
        with anyio.CancelScope(shield=True):
            try:
                await self.flush()
            except MsgBusError as error:  # there is no journal to write to
                self._bag.refuse_all(redact_exception(error))
        self.size()  # the last that can be known once the journal is closed
        self._bag.runtime = None

    def size(self) -> int:
        """How many dead letters are in the journal; the last number known once it is closed.

        Opens nothing: 0 before the first use.
        """
        journal = self._known
        if journal is not None:
            with suppress(JournalError, sqlite3.Error):
                self._last_size = journal.read_letters_now(lambda rows: rows.count(LetterFilter()))
        return self._last_size

    # -- inside ----------------------------------------------------------------------------------

    @property
    def _place(self) -> object:
        return self._known

    def _is_ready(self) -> bool:
        try:
            self._journal()
        except MsgBusError:  # said once more when it is closed
            return False
        return True

    def _journal(self) -> LetterJournal:
        if self._known is None:
            journal = self._find()
            if journal is None:
                raise DeadLetterStoreError(
                    "The journal of these dead letters is not open yet. Start the bus first."
                )
            self._known = _with_letters(journal)
        return self._known

    async def _asked(self, question: Callable[[LetterRows], T]) -> T:
        """The answer to a question, after what was added is written."""
        await self.flush()
        with _as_store_errors():
            return await self._journal().read_letters(question)

    async def _written(self, work: Callable[[LetterRows], T]) -> T:
        if self._is_closed:
            raise DeadLetterStoreError("The store of dead letters is closed. Open it again.")
        await self.flush()
        with _as_store_errors():
            return await self._journal().write_letters(work)

    async def _keep_all(self, letters: Sequence[DeadLetterEntry]) -> Sequence[Notice]:
        def work(rows: LetterRows) -> list[Notice]:
            return [notice for letter in letters for notice in self._room.keep(rows, letter)]

        return await self._journal().write_letters(work)

    def _tell(self, notice: Notice) -> None:
        tell(self._listeners, [notice])


def _with_letters(journal: object) -> LetterJournal:
    """The same journal.

    Raises:
        ConfigurationError: It keeps no dead letters that can be searched.
    """
    fix = "Give dead_letters= a store of their own, such as SqliteDeadLetterStore(path)."
    require_members(journal, LetterJournal, "The journal of these dead letters", fix)
    return cast("LetterJournal", journal)


@contextmanager
def _as_store_errors() -> Generator[None]:
    try:
        yield
    except JournalError as error:
        raise DeadLetterStoreError(str(error)) from error
