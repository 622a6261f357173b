"""`SqliteJournal`: the journal in one file, with a thread that writes and readers beside it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, final

import anyio
import anyio.to_thread

from msgbus.errors import JournalFullError, JournalOpenError
from msgbus.journal.records import (
    Ack,
    AckLevel,
    Lease,
    Record,
    Retention,
    TrimReport,
    VerifyReport,
)
from msgbus.journal.sqlite import reads, upkeep
from msgbus.journal.sqlite.faults import translate, translated
from msgbus.journal.sqlite.files import (
    MEMORY,
    Connect,
    connect,
    open_reader,
    open_writer,
    parse_url,
)
from msgbus.journal.sqlite.lookout import Lookout
from msgbus.journal.sqlite.readers import Readers
from msgbus.journal.sqlite.reserve import DEFAULT_SIZE, Reserve
from msgbus.journal.sqlite.store import Store
from msgbus.journal.sqlite.writer import MOST, Writer
from msgbus.journal.tables import TableJournal
from msgbus.journal.watch import Watch
from msgbus.runtime.clock import Clock, SystemClock

if TYPE_CHECKING:
    import os

    from msgbus.journal.codec import PayloadCodec
    from msgbus.resilience.letter_rows import LetterRows

T = TypeVar("T")


@final
class SqliteJournal(TableJournal):
    """A journal in one SQLite file, durable at every acknowledgement.

    Takes a path or a URL: `shop.db`, `sqlite:///shop.db`, `sqlite:////var/lib/shop.db`,
    `sqlite:///:memory:`. The file is opened at once, and made if it is new. Several processes may
    have it open.

    Args:
        url: Where it is; `?adopt=true&lock_timeout=5` and the like may follow.
        clock: Time for retention and for waiting.
        codec: Encrypts or signs payloads.
        retention: What to keep. Seen to every thousand messages, and when the disk is full.
        reserve: Bytes of ballast to throw off on a full disk.
        lock_timeout: Seconds to wait for other processes.
        adopt: Whether the journal may live in a database with tables of yours.

    Raises:
        JournalOpenError: The file cannot be opened, is not a journal, or one of another version.
        JournalLockedError: Another process holds it.
        JournalCorruptError: It is damaged.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        codec: PayloadCodec | None = None,
        retention: Retention | None = None,
        reserve: int = DEFAULT_SIZE,
        lock_timeout: float = 30.0,
        adopt: bool = False,
        _connect: Connect = connect,
    ) -> None:
        path, text = parse_url(str(url))
        options = parse_options(text, str(url))
        lock_timeout = options.get("lock_timeout", lock_timeout)
        is_memory = path == MEMORY
        super().__init__(path, AckLevel.MEMORY if is_memory else AckLevel.FSYNC, codec)
        self._clock = clock or SystemClock()
        self._retention = options.get("retention", retention) or Retention()
        self._reserve = Reserve(path, 0 if is_memory else options.get("reserve", reserve))
        self._readers = None if is_memory else Readers(path, lock_timeout, _connect)
        self._lookout: Lookout | None = None
        self._is_closed = False
        with ExitStack() as opened, translated(path):
            self._connection = open_writer(
                path, lock_timeout, adopt=options.get("adopt", adopt), connect=_connect
            )
            opened.callback(self._connection.close)
            if not is_memory:
                self._lookout = Lookout(open_reader(path, 0.0, _connect))
                opened.callback(self._lookout.close)
            self._watch = Watch(self._clock, self._lookout)
            self._watch.head = self._trimmed_at = reads.head(self._connection)
            opened.pop_all()  # from here on `close` sees to it
        self._store = Store(self._connection, path, self._level, codec)
        self._writer = Writer(self._store, self._committed, self._make_room)
        self._reserve.fill()

    def __repr__(self) -> str:
        return f"<SqliteJournal {self.path}>"

    # -- where things run --------------------------------------------------------------------

    async def _write(self, work: Callable[[Store], T]) -> T:
        return cast("T", await self._writer.run(work))

    async def append(self, records: Sequence[Record]) -> list[Ack]:
        """Add messages, all or none; see `Journal.append`."""
        # Not by way of `run`: this is where most callers wait, and each layer costs.
        request = self._writer.submit(None, records)
        try:
            await request.reply
        except BaseException:
            request.is_abandoned = True
            raise
        acks: list[Ack] = request.result()
        return acks

    async def _read(self, function: Callable[[sqlite3.Connection], T]) -> T:
        if self._readers is None:
            # A database in memory has one connection only.
            return await self._write(lambda store: function(store.connection))
        return await self._readers.run(function)

    def _read_now(self, function: Callable[[sqlite3.Connection], T]) -> T:
        if self._readers is not None:
            return self._readers.run_now(function)
        with translated(self.path):
            return function(self._connection)

    async def read_letters(self, work: Callable[[LetterRows], T]) -> T:
        """The value of `work` on all letters; they can be read after `close`, too."""
        if not self._is_closed or self._readers is None:
            return await super().read_letters(work)
        readers = self._readers
        return await anyio.to_thread.run_sync(
            lambda: readers.run_alone(lambda connection: work(self._rows(connection)))
        )

    async def _alone(self, work: Callable[[Store], T]) -> T:
        """The value of `work`, run between two groups, with transactions of its own."""
        return cast("T", await self._writer.run(work, alone=True))

    # -- on the writer's thread --------------------------------------------------------------

    def _committed(self, head: int) -> None:
        self._watch.tell(head)
        if self._retention != Retention() and head - self._trimmed_at >= MOST:
            self._trimmed_at = head
            self._trim(self._store, self._retention, None)

    def _make_room(self) -> bool:
        """Whether retention could free some space."""
        if self._retention == Retention():
            return False
        return self._trim(self._store, self._retention, None).removed > 0

    def _trim(self, store: Store, retention: Retention, before: int | None) -> TrimReport:
        now = self._clock.time()
        try:
            return upkeep.trim(store, retention, now, before)
        except sqlite3.Error as error:
            if not isinstance(translate(error, self.path), JournalFullError):
                raise
            self._reserve.drop()
            return upkeep.trim(store, retention, now, before)
        finally:
            self._reserve.fill()

    # -- leases ------------------------------------------------------------------------------

    async def keep(
        self, lease: Lease, every: float, *, on_lost: Callable[[], object] | None = None
    ) -> None:
        """Renew by itself every so many seconds, on the writer's thread; see `Journal.keep`."""
        await self._writer.keep(lease, every, on_lost)

    async def release(self, lease: Lease) -> None:
        """Let the next holder in at once; nothing happens if it is lost already."""

        def work(store: Store) -> None:
            self._writer.drop(lease.name)
            store.release(lease)

        await self._write(work)

    # -- upkeep ------------------------------------------------------------------------------

    async def trim(
        self, retention: Retention | None = None, *, before: int | None = None
    ) -> TrimReport:
        """Remove the oldest messages, by `retention` (or the journal's own) and `before` an offset.

        What a cursor has not passed stays. Works on a full disk, thanks to the reserve.
        """
        wanted = self._retention if retention is None else retention
        return await self._alone(lambda store: self._trim(store, wanted, before))

    async def verify(self) -> VerifyReport:
        """Read everything, check every checksum, and say what is wrong."""
        return await self._read(lambda connection: upkeep.verify(self._source(connection)))

    async def compact(self) -> None:
        """Give free space back to the disk. Rewrites the file: for quiet hours."""
        await self._alone(lambda store: upkeep.compact(store.connection))

    async def backup(self, target: str | os.PathLike[str]) -> None:
        """Copy one consistent state into a new file, while others read and write.

        Raises:
            JournalOpenError: The file is there already, or its folder is not.
        """
        if self._readers is None:
            await self._alone(lambda store: upkeep.backup(store.connection, str(target)))
            return
        # Not on a snapshot: the copy takes its own.
        await self._readers.run(
            lambda connection: upkeep.backup(connection, str(target)), in_snapshot=False
        )

    async def close(self) -> None:
        """Write what has arrived, end the thread and close the file; may be called again."""
        thread = self._writer.close()
        with anyio.CancelScope(shield=True):
            if thread is not None:
                await anyio.to_thread.run_sync(thread.join)
            if not self._is_closed:
                self._is_closed = True
                if self._readers is not None:
                    self._readers.close()
                if self._lookout is not None:
                    self._lookout.close()
                # Last: the one that closes last moves the log into the file.
                await anyio.to_thread.run_sync(self._connection.close)


def parse_options(text: dict[str, str], url: str) -> dict[str, Any]:
    """Options of a URL, with their types.

    Raises:
        JournalOpenError: An option is unknown, or its value makes no sense.
    """
    options: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    try:
        for name, value in text.items():
            if name in {"max_age", "max_bytes", "max_count"}:
                limits[name] = float(value) if name == "max_age" else int(value)
            else:
                options[name] = _OPTIONS[name](value)
    except (KeyError, ValueError) as error:
        message = (
            f"{url!r} has an option that makes no sense ({error}). Known are: "
            f"{', '.join([*_OPTIONS, 'max_age', 'max_bytes', 'max_count'])}."
        )
        raise JournalOpenError(message) from error
    if limits:
        options["retention"] = Retention(**limits)
    return options


_OPTIONS: Final[dict[str, Callable[[str], Any]]] = {
    "adopt": {"true": True, "false": False}.__getitem__,
    "lock_timeout": float,
    "reserve": int,
}
