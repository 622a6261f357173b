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
from typing import Any, TypeVar, final

import anyio
import anyio.to_thread

from msgbus.errors import ConfigurationError, DeadLetterStoreError, MsgBusError
from msgbus.resilience import sqlite_schema as schema
from msgbus.resilience.claims import Claim
from msgbus.resilience.letters import DeadLetterEntry, moment
from msgbus.resilience.sqlite_room import Room, stored_record
from msgbus.resilience.sqlite_writer import Writer
from msgbus.resilience.stores import (
    LetterFilter,
    LetterGroup,
    LetterPage,
    Notice,
    Overflow,
    Record,
    released,
)
from msgbus.runtime import current_runtime

T = TypeVar("T")


@final
class SqliteDeadLetterStore:
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
        for name, value in (("max_size", max_size), ("buffer", buffer)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} is {value}; it must be above 0.")
        self.path = Path(path).absolute()
        self.max_size = max_size
        self.overflow = Overflow(overflow)
        self._buffer = buffer
        self._timeout = timeout
        self._listeners: list[Callable[[Notice], None]] = []
        self._room = Room(max_size, self.overflow)
        self._starting = threading.Lock()
        self._writer: Writer | None = None
        self._is_closed = False
        self._readers = _Readers(self.path, timeout)

    def add(self, letter: DeadLetterEntry) -> str | None:
        """Hand a letter over to be written; why not, if it is refused at once."""
        if self._is_closed:
            return "the store is closed"
        return self._started().offer(letter)

    def listen(self, listener: Callable[[Notice], None]) -> None:
        """Tell about every letter that is dropped or refused, from whichever thread."""
        self._listeners.append(listener)

    async def open(self) -> None:
        """Open or make the file.

        Raises:
            DeadLetterStoreError: It cannot be opened, or is none of ours.
        """
        self._is_closed = False
        await self.flush()

    async def flush(self) -> None:
        """Return once everything that was added is in the file, or was told as lost.

        Raises:
            DeadLetterStoreError: The file cannot be written.
        """
        await self._written(lambda _: None)

    async def close(self) -> None:
        """Flush, and let go of the file and the thread. It may be opened again."""
        self._is_closed = True
        writer, self._writer = self._writer, None
        with anyio.CancelScope(shield=True):
            if writer is not None:
                writer.stop()
                await anyio.to_thread.run_sync(writer.join)
            await anyio.to_thread.run_sync(self._readers.close)

    async def get(self, letter_id: str) -> DeadLetterEntry | None:
        """One letter."""
        rows = await self._rows(schema.GET, [letter_id])
        return schema.record_of(rows[0]).letter if rows else None

    async def page(
        self, which: LetterFilter, *, after: str | None = None, limit: int = 100
    ) -> LetterPage:
        """At most `limit` letters behind the cursor `after`."""
        # One more than asked for says whether there is a next page.
        rows = await self._rows(*schema.page_query(which, after, limit + 1))
        letters = tuple(schema.record_of(row[1:]).letter for row in rows[:limit])
        return LetterPage(letters, str(rows[limit - 1][0]) if len(rows) > limit else None)

    async def count(self, which: LetterFilter) -> int:
        """How many there are."""
        rows = await self._rows(*schema.count_query(which))
        number: int = rows[0][0]
        return number

    def size(self) -> int:
        """How many dead letters are in the file, read in the caller's thread."""
        if not self.path.exists():
            return 0
        number: int = self._readers.ask(*schema.count_query(LetterFilter()))[0][0]
        return number

    async def groups(self, which: LetterFilter) -> Sequence[LetterGroup]:
        """Letters by error type, handler and message type; the largest group first."""
        return [
            LetterGroup(
                error_type=error_type,
                handler=handler,
                message_type=message_type,
                count=number,
                first=moment(first),
                last=moment(last),
                sample=sample,
            )
            for error_type, handler, message_type, number, first, last, sample in await self._rows(
                *schema.groups_query(which)
            )
        ]

    async def head(self) -> str:
        """The place of the newest letter."""
        return str((await self._rows(schema.HEAD, []))[0][0])

    async def change(
        self,
        letter_id: str,
        step: Callable[[Record], Record],
        *,
        successor: DeadLetterEntry | None = None,
    ) -> DeadLetterEntry | None:
        """Replace one record by what `step` makes of it; `None` if there is none."""
        dropped: list[Notice] = []

        def work(connection: sqlite3.Connection) -> DeadLetterEntry | None:
            record = stored_record(connection, letter_id)
            if record is None:
                return None
            changed = step(record)
            if changed is not record:
                connection.execute(schema.UPDATE, (*schema.row_of(changed), letter_id))
            if successor is not None:
                dropped.extend(self._room.insert(connection, Record(successor), must_fit=True))
            return changed.letter

        letter = await self._written(work)
        for notice in dropped:
            _tell(self._listeners, notice)
        return letter

    async def release(self, is_void: Callable[[Claim], bool]) -> int:
        """Make every letter dead again whose claim is void; how many."""

        def work(connection: sqlite3.Connection) -> int:
            records = [schema.record_of(row) for row in connection.execute(schema.CLAIMED)]
            void = [one for one in records if one.claim is None or is_void(one.claim)]
            for record in void:
                row = schema.row_of(released(record))
                connection.execute(schema.UPDATE, (*row, record.letter.letter_id))
            return len(void)

        return await self._written(work)

    async def put(self, letters: Sequence[DeadLetterEntry]) -> int:
        """Add those whose ids are new, all or none; how many were.

        Raises:
            DeadLetterStoreError: They do not fit.
        """
        dropped: list[Notice] = []

        def work(connection: sqlite3.Connection) -> int:
            number = 0
            for letter in letters:
                if stored_record(connection, letter.letter_id) is None:
                    notices = self._room.insert(connection, Record(letter))
                    if any(notice.kind == "refused" for notice in notices):
                        raise DeadLetterStoreError(
                            f"{len(letters)} letters do not fit into {self.path}, which takes "
                            f"at most {self.max_size}. Make max_size larger, or discard some."
                        )
                    dropped.extend(notices)
                    number += 1
            return number

        number = await self._written(work)
        for notice in dropped:
            _tell(self._listeners, notice)
        return number

    # -- writing -----------------------------------------------------------------------------------

    def _started(self) -> Writer:
        with self._starting:
            if self._writer is None:
                writer = Writer(
                    self.path,
                    keep=self._room.keep,
                    timeout=self._timeout,
                    buffer=self._buffer,
                    overflow=self.overflow,
                    tell=functools.partial(_tell, self._listeners),
                )
                # It knows nothing of this store, so that one nobody closes ends with its last
                # user. At exit, too: what was handed over is written before the process ends.
                weakref.finalize(self, _end, writer, self._timeout + 1)
                self._writer = writer
            return self._writer

    async def _written(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._is_closed:
            raise DeadLetterStoreError(f"The store {self.path} is closed. Open it again.")
        return await _result(self._started().submit(work))

    # -- reading -----------------------------------------------------------------------------------

    async def _rows(self, sql: str, values: Sequence[Any]) -> list[Any]:
        """All rows of a question, asked in a thread, after what was added is written."""
        writer = self._writer
        if writer is None or self._is_closed:
            await self.flush()
        elif not writer.is_idle:
            # A file that cannot be written may still be read.
            with suppress(DeadLetterStoreError):
                await self.flush()
        return await anyio.to_thread.run_sync(self._readers.ask, sql, values)


@final
class _Readers:
    """Connections for questions, used by one thread at a time."""

    def __init__(self, path: Path, timeout: float) -> None:
        self._path = path
        self._timeout = timeout
        self._free: list[sqlite3.Connection] = []
        weakref.finalize(self, _close_all, self._free)

    def ask(self, sql: str, values: Sequence[Any]) -> list[Any]:
        """All rows.

        Raises:
            DeadLetterStoreError: The file cannot be read.
        """
        connection: sqlite3.Connection | None = None
        try:
            connection = self._take()
            rows = connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            if connection is not None:
                connection.close()
            raise schema.explained(error, self._path) from error
        self._free.append(connection)
        return rows

    def close(self) -> None:
        """Close those that are not in use."""
        _close_all(self._free)

    def _take(self) -> sqlite3.Connection:
        try:
            return self._free.pop()
        except IndexError:
            return schema.connect(self._path, timeout=self._timeout, read_only=True)


def _tell(listeners: Sequence[Callable[[Notice], None]], notice: Notice) -> None:
    for listener in listeners:
        listener(notice)


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
