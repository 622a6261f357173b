"""`JournalDeadLetterStore`: the dead letters of a journal, and those added to it."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar, cast

import anyio

from msgbus.errors import ConfigurationError, DeadLetterStoreError, JournalError, MsgBusError
from msgbus.journal.letters import Letters
from msgbus.journal.ports import Journal
from msgbus.resilience.dead_letters.buffer import LetterBuffer
from msgbus.resilience.dead_letters.entry import DeadLetterEntry
from msgbus.resilience.dead_letters.filters import LetterFilter
from msgbus.resilience.dead_letters.journal_letters import JournalLetters, LetterJournal
from msgbus.resilience.dead_letters.store import (
    BoundedStore,
    LetterGroup,
    LetterPage,
    Notice,
    Overflow,
    Step,
)
from msgbus.runtime.arguments import missing_members, require_members
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.forks import tell_after_fork
from msgbus.telemetry.redaction import redact_exception

T = TypeVar("T")


class JournalDeadLetterStore(BoundedStore):
    """Keeps dead letters in a journal, where durable subscriptions keep theirs.

    Both are found, replayed, edited and discarded here. The letter of a durable handler is
    written in the commit that passes its message. What is added here is handed to a thread:
    `add` never waits, and a letter is safe once `flush` has returned.

    Close it before its journal. The journal is not closed by it.

    Args:
        journal: The journal, or a function that returns it when it is first needed; that may
            return `None` as long as there is none. Letters that come before wait for it.
        max_size: Letters to keep in the journal; no bound unless given.
        overflow: What is done with one letter too many, in the journal or on the way to it.
        buffer: Letters that may wait to be written.
        clock: The time of changes.

    Raises:
        ConfigurationError: `max_size` or `buffer` is not above 0, or the letters of the journal
            cannot be searched.
    """

    def __init__(
        self,
        journal: Journal | Callable[[], Journal | None],
        max_size: int | None = None,
        overflow: Overflow = Overflow.DROP_OLDEST,
        *,
        buffer: int = 10_000,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(max_size, overflow)
        if buffer < 1:
            raise ConfigurationError(f"buffer is {buffer}; it must be above 0.")
        self._clock: Clock = SystemClock() if clock is None else clock
        self._buffer = LetterBuffer(self._write, self.tell, buffer=buffer, overflow=self.overflow)
        self._letters: JournalLetters | None = None
        self._opening = threading.Lock()
        tell_after_fork(self)
        self._is_closed = False
        self._size = 0
        """Dead letters, as last counted."""
        if callable(journal) and missing_members(journal, Letters):
            self._find = journal
        else:
            self._letters = self._letters_of(journal)
            self._find = lambda: cast("Journal", journal)

    @property
    def file(self) -> str | None:
        """The file of the journal, if it has one."""
        return None if self._letters is None else getattr(self._letters.journal, "path", None)

    def forked(self) -> None:
        """Begin anew in the child of a process that was forked."""
        self._opening = threading.Lock()
        self._buffer.forked()

    def add(self, letter: DeadLetterEntry) -> str | None:
        """Hand a letter over to be written; return why not, if it is refused at once."""
        if self._is_closed:
            return "the store is closed"
        refused = self._buffer.add(letter)
        if refused is None and self._is_ready():
            self._buffer.start()
        return refused

    async def open(self) -> None:
        """Write what has waited.

        Raises:
            DeadLetterStoreError: There is no journal, or it cannot be read.
            ConfigurationError: Its letters cannot be searched.
        """
        self._is_closed = self._buffer.is_closing = False
        self._letters = None  # a bus that was started again has another journal
        await self._ask(JournalLetters.head)

    async def flush(self) -> None:
        """Return once everything that was added is in the journal, or was told as lost.

        Raises:
            DeadLetterStoreError: It cannot be written now, or there is no journal yet.
        """
        await self._flush()

    async def close(self) -> None:
        """Flush. The journal stays open; the store may be opened again."""
        self._is_closed = self._buffer.is_closing = True
        with anyio.CancelScope(shield=True):
            try:
                await self._flush()
            except MsgBusError as error:  # there is no journal to write to
                self._buffer.refuse_all(redact_exception(error))
                with suppress(MsgBusError):
                    await self._buffer.flush()  # what its thread has taken is told by that
            if self._letters is not None:
                with suppress(JournalError):  # then others end the member
                    await self._letters.claims.leave()
        self.size()  # the last that can be known once the journal is closed

    def size(self) -> int:
        """Return the number of dead letters in the journal; the last one known if it is closed.

        Opens nothing: 0 before the first use.
        """
        letters = self._letters
        if letters is not None:
            with suppress(JournalError):
                self._size = letters.journal.count_dead()
        return self._size

    # -- letters ---------------------------------------------------------------------------------

    async def get(self, letter_id: str) -> DeadLetterEntry | None:
        """Return one letter."""
        return await self._ask(lambda letters: letters.get(letter_id))

    async def page(
        self, which: LetterFilter, *, after: str | None = None, limit: int = 100
    ) -> LetterPage:
        """Return at most `limit` letters behind the cursor `after`."""
        return await self._ask(lambda letters: letters.page(which, after, limit))

    async def count(self, which: LetterFilter) -> int:
        """Return the number of letters."""
        return await self._ask(lambda letters: letters.count(which))

    async def groups(self, which: LetterFilter) -> Sequence[LetterGroup]:
        """Group letters by error type, handler and message type; the largest group first."""
        return await self._ask(lambda letters: letters.groups(which))

    async def head(self) -> str:
        """Return the cursor of the newest letter."""
        return await self._ask(JournalLetters.head)

    async def change(
        self, letter_id: str, step: Step, *, successor: DeadLetterEntry | None = None
    ) -> DeadLetterEntry | None:
        """Replace one letter by what `step` makes of it; `None` if there is none."""
        letter, notices = await self._run(
            lambda letters: letters.change(letter_id, step, successor)
        )
        self.tell(notices)
        return letter

    async def release(self) -> int:
        """Make letters dead again whose process ended while it replayed them; return how many."""
        return await self._run(JournalLetters.release)

    async def put(self, letters: Sequence[DeadLetterEntry]) -> int:
        """Add those whose ids are new, all or none; return how many were.

        Raises:
            DeadLetterStoreError: They do not fit.
        """
        number, notices = await self._run(lambda stored: stored.put(letters))
        self.tell(notices)
        return number

    # -- inside ----------------------------------------------------------------------------------

    def _closed(self) -> DeadLetterStoreError:
        return DeadLetterStoreError("The store of dead letters is closed. Open it again.")

    def _letters_of(self, journal: object) -> JournalLetters:
        fix = "Give dead_letters= a store of their own, such as SqliteDeadLetterStore(path)."
        require_members(journal, Letters, "The journal of these dead letters", fix)
        return JournalLetters(cast("LetterJournal", journal), self, self._clock)

    def _current(self) -> JournalLetters:
        """Return the letters of the journal.

        Raises:
            DeadLetterStoreError: There is no journal yet.
        """
        letters = self._letters
        if letters is not None:
            return letters
        with self._opening:
            if self._letters is None:
                journal = self._find()
                if journal is None:
                    raise DeadLetterStoreError(
                        "The journal of these dead letters is not open yet. Start the bus first."
                    )
                self._letters = self._letters_of(journal)
            return self._letters

    async def _ready_letters(self) -> JournalLetters:
        return self._current()

    def _is_ready(self) -> bool:
        """Tell whether letters can be written; until then they wait in line."""
        try:
            self._current()
        except MsgBusError:  # told when the store is opened or closed
            return False
        return True

    async def _flush(self) -> None:
        if len(self._buffer):
            with as_store_errors():
                await self._ready_letters()
            await self._buffer.flush()

    async def _ask(self, question: Callable[[JournalLetters], Awaitable[T]]) -> T:
        """Return the answer to a question, after what was added is written."""
        with as_store_errors():
            letters = await self._ready_letters()
            with suppress(DeadLetterStoreError):  # what cannot be written may still be read
                await self._flush()
            return await question(letters)

    async def _run(self, work: Callable[[JournalLetters], Awaitable[T]]) -> T:
        """Return the value of something that is written."""
        if self._is_closed:
            raise self._closed()
        await self._flush()
        with as_store_errors():
            return await work(await self._ready_letters())

    async def _write(self, letters: Sequence[DeadLetterEntry]) -> Sequence[Notice]:
        return await self._current().add(letters)


@contextmanager
def as_store_errors() -> Generator[None]:
    """Raise errors of a journal as those of a store."""
    try:
        yield
    except JournalError as error:
        raise DeadLetterStoreError(str(error)) from error
