"""Dead letters in one SQLite file, which several processes may share."""

from __future__ import annotations

import functools
import sqlite3
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, final

import anyio
import anyio.to_thread

from msgbus.errors import DeadLetterStoreError, MsgBusError
from msgbus.resilience import sqlite_schema as schema
from msgbus.resilience.letter_room import Room, tell
from msgbus.resilience.letter_rows import LetterRows
from msgbus.resilience.letters import DeadLetterEntry
from msgbus.resilience.sqlite_writer import Writer
from msgbus.resilience.stores import (
    LetterFilter,
    Notice,
    Overflow,
)
from msgbus.resilience.table_store import TableStore
from msgbus.runtime.event_loop import current_runtime

T = TypeVar("T")


@final
class SqliteDeadLetterStore(TableStore):
    """Keeps dead letters in a SQLite file (WAL, fsync at each commit).

    `add` hands a letter to a thread and returns: it never waits for the disk. A letter is safe
    once `flush` has returned. Questions see every letter that was added before. Several
    processes may use one file, if they are on one machine.

    Args:
        path: The file; made if it is not there. Its folder must be.
        max_size: Letters to keep in the file; no bound unless given.
        overflow: What is done with one letter too many, in the file or on the way to it.
        buffer: Letters that may wait to be written.
        timeout: Seconds to wait for another process that has locked the file.

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
        timeout: float = 5.0,
    ) -> None:
        super().__init__(max_size, overflow, buffer)
        self.path = Path(path).absolute()
        self._buffer = buffer
        self._timeout = timeout
        self._starting = threading.Lock()
        self._writer: Writer | None = None
        self._is_closed = False
        self._readers = _Readers(self.path, timeout)

    def add(self, letter: DeadLetterEntry) -> str | None:
        """Hand a letter over to be written; why not, if it is refused at once."""
        if self._is_closed:
            return "the store is closed"
        return self._started().offer(letter)

    async def open(self) -> None:
        """Open or make the file.

        Raises:
            DeadLetterStoreError: It cannot be opened, or is none of ours.
        """
        self._is_closed = self._readers.is_closed = False
        await self.flush()

    async def flush(self) -> None:
        """Return once everything that was added is in the file, or was told as lost.

        Raises:
            DeadLetterStoreError: The file cannot be written.
        """
        await self._written(lambda _: None)

    async def close(self) -> None:
        """Flush, and let go of the file and the thread. It may be read, and opened again."""
        self._is_closed = True
        writer, self._writer = self._writer, None
        with anyio.CancelScope(shield=True):
            if writer is not None:
                writer.stop()
                await anyio.to_thread.run_sync(writer.join)
            await anyio.to_thread.run_sync(self._readers.close)

    def size(self) -> int:
        """How many dead letters are in the file, read in the caller's thread."""
        if not self.path.exists():
            return 0
        return self._readers.ask(lambda rows: rows.count(LetterFilter()))

    @property
    def _place(self) -> Path:
        return self.path

    # -- writing -----------------------------------------------------------------------------------

    def _started(self) -> Writer:
        with self._starting:
            if self._writer is None:
                writer = Writer(
                    self.path,
                    keep=functools.partial(_keep, self._room),
                    timeout=self._timeout,
                    buffer=self._buffer,
                    overflow=self.overflow,
                    tell=functools.partial(_tell_one, self._listeners),
                )
                # It knows nothing of this store, so that one nobody closes ends with its last
                # user. At exit, too: what was handed over is written before the process ends.
                weakref.finalize(self, _end, writer, self._timeout + 1)
                self._writer = writer
            return self._writer

    async def _written(self, work: Callable[[LetterRows], T]) -> T:
        if self._is_closed:
            raise DeadLetterStoreError(f"The store {self.path} is closed. Open it again.")
        return await _result(
            self._started().submit(lambda connection: work(schema.rows_of(connection)))
        )

    # -- reading -----------------------------------------------------------------------------------

    async def _asked(self, question: Callable[[LetterRows], T]) -> T:
        """The answer to a question, asked in a thread, after what was added is written."""
        writer = self._writer
        if self._is_closed:
            # What was written can be read all the same, but nothing is made anew.
            if not self.path.exists():
                raise DeadLetterStoreError(f"The store {self.path} is closed. Open it again.")
        elif writer is None:
            await self.flush()
        elif not writer.is_idle:
            # A file that cannot be written may still be read.
            with suppress(DeadLetterStoreError):
                await self.flush()
        return await anyio.to_thread.run_sync(self._readers.ask, question)


@final
class _Readers:
    """Connections for questions, used by one thread at a time."""

    def __init__(self, path: Path, timeout: float) -> None:
        self._path = path
        self._timeout = timeout
        self._free: list[sqlite3.Connection] = []
        self.is_closed = False
        """Whether connections are closed after use."""
        weakref.finalize(self, _close_all, self._free)

    def ask(self, question: Callable[[LetterRows], T]) -> T:
        """What `question` says of the letters.

        Raises:
            DeadLetterStoreError: The file cannot be read.
        """
        try:
            connection = self._take()
            try:
                answer = question(schema.rows_of(connection))
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            raise schema.explained(error, self._path) from error
        self._free.append(connection)
        if self.is_closed:
            _close_all(self._free)
        return answer

    def close(self) -> None:
        """Close those that are not in use, and from now on each after use."""
        self.is_closed = True
        _close_all(self._free)

    def _take(self) -> sqlite3.Connection:
        try:
            return self._free.pop()
        except IndexError:
            return schema.open_reader(self._path, timeout=self._timeout)


def _keep(room: Room, connection: sqlite3.Connection, letter: DeadLetterEntry) -> Sequence[Notice]:
    return room.keep(schema.rows_of(connection), letter)


def _tell_one(listeners: Sequence[Callable[[Notice], None]], notice: Notice) -> None:
    tell(listeners, [notice])


def _close_all(connections: list[sqlite3.Connection]) -> None:
    while connections:
        connections.pop().close()


def _end(writer: Writer, seconds: float) -> None:
    writer.stop()
    writer.join(seconds)


async def _result(future: Future[T]) -> T:
    """Await a future of another thread, on asyncio or trio, without a thread to wait in."""
    runtime = current_runtime()
    done = anyio.Event()
    future.add_done_callback(lambda _: runtime.call_soon(done.set))
    await done.wait()
    try:
        return future.result()
    except MsgBusError as error:
        # Made in another thread: the traceback that helps is this one.
        raise error.with_traceback(None) from error.__cause__
