"""`JournalDeadLetterStore`: the dead letters of a journal, through the API of all stores."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar, final, runtime_checkable

import anyio

from msgbus.errors import ConfigurationError, DeadLetterStoreError, JournalError
from msgbus.journal.mailbag import Mailbag
from msgbus.journal.port import Journal
from msgbus.resilience.claims import Claim
from msgbus.resilience.letter_room import Room, check_sizes, release, tell
from msgbus.resilience.letter_rows import LetterRows
from msgbus.resilience.letters import DeadLetterEntry
from msgbus.resilience.stores import (
    LetterFilter,
    LetterGroup,
    LetterPage,
    Notice,
    Overflow,
    Record,
)
from msgbus.runtime import current_runtime

T = TypeVar("T")


@runtime_checkable
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
class JournalDeadLetterStore:
    """Keeps dead letters in a journal, where durable subscriptions keep theirs.

    Both are found, replayed, edited and discarded here. What a subscription gives up is written
    in the transaction that passes the message. What is added here is handed to the journal's
    writer: `add` never waits, and a letter is safe once `flush` has returned.

    Close it before its journal. The journal is not closed by it.

    Args:
        journal: The journal, or a function that gives it; that may give `None` as long as the
            journal is not open. Letters that come before wait for it.
        max_size: Letters to keep in the journal; no bound unless given.
        overflow: What is done with one letter too many, in the journal or on the way to it.
        buffer: Letters that may wait to be written.

    Raises:
        ConfigurationError: `max_size` or `buffer` is not above 0.
    """

    def __init__(
        self,
        journal: Journal | Callable[[], Journal | None],
        max_size: int | None = None,
        overflow: Overflow = Overflow.DROP_OLDEST,
        *,
        buffer: int = 10_000,
    ) -> None:
        check_sizes(max_size=max_size, buffer=buffer)
        self.max_size = max_size
        self.overflow = Overflow(overflow)
        self._found = (lambda: journal) if isinstance(journal, Journal) else journal
        self._room = Room(max_size, self.overflow)
        self._listeners: list[Callable[[Notice], None]] = []
        self._bag = Mailbag(
            self._keep_all,
            self._tell,
            lambda: self._found() is not None,
            buffer=buffer,
            overflow=self.overflow,
        )
        self._is_closed = False
        self._last_size = 0

    def add(self, letter: DeadLetterEntry) -> str | None:
        """Hand a letter over to be written; why not, if it is refused at once."""
        return "the store is closed" if self._is_closed else self._bag.add(letter)

    def listen(self, listener: Callable[[Notice], None]) -> None:
        """Tell about every letter that is dropped or refused, from whichever thread."""
        self._listeners.append(listener)

    async def open(self) -> None:
        """Write what has waited, on this event loop from now on.

        Raises:
            DeadLetterStoreError: There is no journal, or it cannot be read.
            ConfigurationError: The journal keeps no dead letters.
        """
        self._is_closed = self._bag.is_closing = False
        self._bag.runtime = current_runtime()
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
            if self._found() is None:
                self._bag.refuse_all("its journal was never opened")
            await self.flush()
        self.size()  # the last that can be known once the journal is closed
        self._bag.runtime = None

    async def get(self, letter_id: str) -> DeadLetterEntry | None:
        """One letter."""
        record = await self._asked(lambda rows: rows.get(letter_id))
        return None if record is None else record.letter

    async def page(
        self, which: LetterFilter, *, after: str | None = None, limit: int = 100
    ) -> LetterPage:
        """At most `limit` letters behind the cursor `after`."""
        return await self._asked(lambda rows: rows.page(which, after, limit))

    async def count(self, which: LetterFilter) -> int:
        """How many there are."""
        return await self._asked(lambda rows: rows.count(which))

    def size(self) -> int:
        """How many dead letters are in the journal; the last number known once it is closed."""
        journal = self._found()
        if isinstance(journal, LetterJournal):
            with suppress(JournalError, sqlite3.Error):
                self._last_size = journal.read_letters_now(lambda rows: rows.count(LetterFilter()))
        return self._last_size

    async def groups(self, which: LetterFilter) -> Sequence[LetterGroup]:
        """Letters by error type, handler and message type; the largest group first."""
        return await self._asked(lambda rows: rows.groups(which))

    async def head(self) -> str:
        """The place of the newest letter."""
        return str(await self._asked(LetterRows.head))

    async def change(
        self,
        letter_id: str,
        step: Callable[[Record], Record],
        *,
        successor: DeadLetterEntry | None = None,
    ) -> DeadLetterEntry | None:
        """Replace one record by what `step` makes of it; `None` if there is none."""
        letter, dropped = await self._written(
            lambda rows: self._room.change(rows, letter_id, step, successor)
        )
        tell(self._listeners, dropped)
        return letter

    async def release(self, is_void: Callable[[Claim], bool]) -> int:
        """Make every letter dead again whose claim is void; how many."""
        return await self._written(lambda rows: release(rows, is_void))

    async def put(self, letters: Sequence[DeadLetterEntry]) -> int:
        """Add those whose ids are new, all or none; how many were.

        Raises:
            DeadLetterStoreError: They do not fit.
        """
        number, dropped = await self._written(
            lambda rows: self._room.put(rows, letters, self._found())
        )
        tell(self._listeners, dropped)
        return number

    # -- inside ----------------------------------------------------------------------------------

    def _journal(self) -> LetterJournal:
        journal = self._found()
        if journal is None:
            raise DeadLetterStoreError(
                "The journal of these dead letters is not open yet. Start the bus first."
            )
        if not isinstance(journal, LetterJournal):
            raise ConfigurationError(
                f"{journal!r} keeps no dead letters that can be searched. Give dead_letters= a "
                f"store of their own, such as SqliteDeadLetterStore(path)."
            )
        return journal

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


@contextmanager
def _as_store_errors() -> Generator[None]:
    try:
        yield
    except JournalError as error:
        raise DeadLetterStoreError(str(error)) from error
