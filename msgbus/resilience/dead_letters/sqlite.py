"""`SqliteDeadLetterStore`: dead letters in a file of their own, a journal of letters only."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, final

import anyio
import anyio.to_thread
from typing_extensions import override

from msgbus.errors import DeadLetterStoreError
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.journal.sqlite.letter_reads import count_dead_in_file
from msgbus.resilience.dead_letters.journal_letters import JournalLetters
from msgbus.resilience.dead_letters.journal_store import JournalDeadLetterStore, as_store_errors
from msgbus.resilience.dead_letters.store import Overflow
from msgbus.runtime.clock import Clock

if TYPE_CHECKING:
    from msgbus.journal.codec import PayloadCodec

T = TypeVar("T")


@final
class SqliteDeadLetterStore(JournalDeadLetterStore):
    """Keeps dead letters in a SQLite file (WAL, fsync at each commit).

    `add` hands a letter to a thread and returns: it never waits for the disk. A letter is safe
    once `flush` has returned; a process that ends without a `close` writes its letters first.
    Several processes may use one file, if they are on one machine.

    Args:
        path: The file; made if it is not there. Its folder must be.
        max_size: Letters to keep in the file; no bound unless given.
        overflow: What is done with one letter too many, in the file or on the way to it.
        buffer: Letters that may wait to be written.
        clock: The time of changes.
        timeout: Seconds to wait for another process that has locked the file.
        codec: Encrypts or signs the letters; see `PayloadCodec`.

    Raises:
        ConfigurationError: `max_size` or `buffer` is not above 0.
    """

    def __init__(
        self,
        path: str | Path,
        max_size: int | None = None,
        overflow: Overflow = Overflow.DROP_OLDEST,
        *,
        buffer: int = 10_000,
        clock: Clock | None = None,
        timeout: float = 5.0,
        codec: PayloadCodec | None = None,
    ) -> None:
        super().__init__(self._open_journal, max_size, overflow, buffer=buffer, clock=clock)
        self.path = Path(path).absolute()
        self._open_file = partial(
            SqliteJournal, self.path, reserve=0, lock_timeout=timeout, codec=codec
        )
        self._timeout = timeout
        self._end: weakref.finalize[..., SqliteDeadLetterStore] | None = None
        """Closes the file of a store that nobody has closed."""

    @override
    async def open(self) -> None:
        """Open or make the file.

        Raises:
            DeadLetterStoreError: It cannot be opened, or is none of ours.
        """
        self._is_closed = self._buffer.is_closing = False
        await self._run(_check)

    @override
    async def flush(self) -> None:
        """Return once everything that was added is in the file, or was told as lost.

        Raises:
            DeadLetterStoreError: The file cannot be written now, or the store is closed.
        """
        if self._is_closed:
            raise self._closed()
        await self._flush()

    @override
    async def close(self) -> None:
        """Flush, and release the file. It may be read, and opened again."""
        await super().close()
        letters, self._letters = self._letters, None
        if self._end is not None:
            self._end.detach()
        if letters is not None:
            with anyio.CancelScope(shield=True):
                await letters.journal.close()

    @override
    def size(self) -> int:
        """Return the number of dead letters in the file; the last one known if it is closed."""
        if self._letters is None and not self._is_closed and self.path.exists():
            with as_store_errors():
                self._size = count_dead_in_file(str(self.path), self._timeout)
        return super().size()

    # -- inside ----------------------------------------------------------------------------------

    @override
    def _closed(self) -> DeadLetterStoreError:
        return DeadLetterStoreError(f"The store {self.path} is closed. Open it again.")

    def _open_journal(self) -> SqliteJournal:
        journal = self._open_file()
        # It knows nothing of this store, which so ends with its last user.
        self._end = weakref.finalize(self, _close_in_thread, journal)
        self._end.atexit = False
        return journal

    @override
    async def _ready_letters(self) -> JournalLetters:
        letters = self._letters
        return await anyio.to_thread.run_sync(self._current) if letters is None else letters

    @override
    def _is_ready(self) -> bool:
        return True  # the file is opened by the thread that writes

    @override
    async def _ask(self, question: Callable[[JournalLetters], Awaitable[T]]) -> T:
        if not self._is_closed:
            return await super()._ask(question)
        # What was written can be read all the same, but nothing is made anew.
        if not self.path.exists():
            raise self._closed()
        with as_store_errors():
            async with await anyio.to_thread.run_sync(self._open_file) as journal:
                return await question(self._letters_of(journal))


async def _check(letters: JournalLetters) -> None:
    """Raise if the file cannot be written."""
    await letters.journal.commit([])


def _close_in_thread(journal: SqliteJournal) -> None:
    if threading.main_thread().is_alive():  # else the process ends, and a thread would never begin
        closing = partial(anyio.run, journal.close)
        threading.Thread(target=closing, name="msgbus dead letters").start()
