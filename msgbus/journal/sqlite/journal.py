"""`SqliteJournal`: a journal in one file, with a thread that writes and readers beside it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from functools import partial, wraps
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar, cast, final

import anyio
import anyio.to_thread

from msgbus.errors import JournalFullError, JournalOpenError
from msgbus.journal.operations import Operation
from msgbus.journal.options import parse_options, seconds
from msgbus.journal.ports import CommitParticipant, Scan
from msgbus.journal.records import Appended, Member, Pending, Promises, Selection, State
from msgbus.journal.reports import Retention, TrimReport
from msgbus.journal.sqlite import letter_reads, upkeep
from msgbus.journal.sqlite.claims import JoinedMember, JournalSteps
from msgbus.journal.sqlite.faults import closed, forked, translated
from msgbus.journal.sqlite.files import (
    MEMORY,
    Connect,
    connect,
    open_reader,
    parse_url,
)
from msgbus.journal.sqlite.questions import QuestionReader
from msgbus.journal.sqlite.readers import ChangeDetector, Readers
from msgbus.journal.sqlite.reads import Source
from msgbus.journal.sqlite.reserve import DEFAULT_SIZE, Reserve
from msgbus.journal.sqlite.retention import Retainer, Trimming, checkpoint
from msgbus.journal.sqlite.schema import open_writer, read_meta
from msgbus.journal.sqlite.store import Store
from msgbus.journal.sqlite.transactions import WriteTransaction
from msgbus.journal.sqlite.verify import verify
from msgbus.journal.sqlite.writer import CommitWriter
from msgbus.journal.watch import Watch
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.forks import tell_after_fork
from msgbus.telemetry.logging import log

if TYPE_CHECKING:
    from msgbus.journal.codec import PayloadCodec

P = ParamSpec("P")
T = TypeVar("T")

_PROMISES: Final = Promises(
    survives_kill=True,
    survives_power_cut=True,
    survives_node_loss=False,
    dedupe_window=None,
    failover=0.5,
    is_ordered=True,
)


def _reads(
    step: Callable[Concatenate[QuestionReader, P], T],
) -> Callable[Concatenate[SqliteJournal, P], CoroutineType[Any, Any, T]]:
    """Make a method of the journal that reads."""

    @wraps(step)
    async def read(self: SqliteJournal, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.read_tables(lambda reader: step(reader, *args, **kwargs))

    return read  # type: ignore[return-value]  # mypy and pyright differ on `async def`


def _reads_letters(
    step: Callable[Concatenate[QuestionReader, P], T],
) -> Callable[Concatenate[SqliteJournal, P], CoroutineType[Any, Any, T]]:
    """Make a method of the journal that reads, also after it was closed."""

    @wraps(step)
    async def read(self: SqliteJournal, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.read_file(lambda reader: step(reader, *args, **kwargs))

    return read  # type: ignore[return-value]  # as above


def _writes(
    step: Callable[Concatenate[JournalSteps, P], T],
) -> Callable[Concatenate[SqliteJournal, P], CoroutineType[Any, Any, T]]:
    """Make a method of the journal that is a commit of its own."""

    @wraps(step)
    async def write(self: SqliteJournal, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.write_tables(lambda steps: step(steps, *args, **kwargs))

    return write  # type: ignore[return-value]  # as above


@final
class SqliteJournal:
    """A journal in one SQLite file, durable at every commit that returned.

    The file is opened at once, and made if it is new. Several processes may have it open.

    Args:
        url: A path or a URL: `shop.db`, `sqlite:///shop.db`, `sqlite:////var/lib/shop.db`,
            `sqlite:///:memory:`; `?adopt=true&max_age=86400` and the like may follow.
        clock: Time for waiting, and the age of messages.
        codec: Encrypts or signs payloads, headers, results, states and texts of errors.
        retention: How much to keep. Seen to every thousand messages, and when the disk is full.
        reserve: Bytes of a file beside the journal that is deleted when the disk is full.
        lock_timeout: Seconds to wait for other processes.
        adopt: Whether the journal may live in a database with tables of yours.
        member_ttl: Seconds without a renewal after which others end a member.

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
        member_ttl: float | None = None,
        _connect: Connect = connect,
    ) -> None:
        path, text = parse_url(str(url))
        options = parse_options(text, _OPTIONS, str(url))
        lock_timeout = options.get("lock_timeout", lock_timeout)
        is_memory = path == MEMORY
        # The working folder may change; errors name the file as it was given.
        self.path = absolute = path if is_memory else os.path.abspath(path)  # noqa: PTH100 (a text)

        def connect_here(_: str, timeout: float) -> sqlite3.Connection:
            return _connect(absolute, timeout)

        self.member_ttl: float | None = options.get("member_ttl", member_ttl)
        self._retention = _retention(options) or retention or Retention()
        self._reserve = Reserve(absolute, 0 if is_memory else options.get("reserve", reserve))
        self._clock = clock or SystemClock()
        self._connect = partial(connect_here, path, lock_timeout)
        self._source = Source(path, codec)
        self._readers: Readers | None = None
        self._detector: ChangeDetector | None = None
        self._is_closed = False
        self._closed_by = closed
        with ExitStack() as opened, translated(path):
            self._connection = self._open_writer(
                partial(
                    open_writer,
                    path,
                    lock_timeout,
                    adopt=options.get("adopt", adopt),
                    codec=codec,
                    connect=connect_here,
                )
            )
            opened.callback(self._connection.close)
            self.id: Final = read_meta(self._connection, "journal_id")
            steps = JournalSteps(Store(self._connection, self._source))
            self._tail = steps.store.transaction.tail
            self._limit_log(steps.store.transaction)
            if not is_memory:
                place = steps.store.transaction.place
                self._readers = Readers(place, path, lock_timeout, connect_here)
                reader = open_reader(path, 0.0, connect_here)
                self._detector = ChangeDetector(
                    reader,
                    self._source,
                    place,
                    lambda: steps.store.transaction.commits,
                    lambda: self._writer.look_for_others(),  # noqa: PLW0108 (made below)
                )
                opened.callback(self._detector.close)
            self._watch = Watch(self._clock, self._detector)
            self._watch.head = steps.store.reader.head()
            retainer = self._retainer(steps)
            opened.pop_all()  # from here on `close` sees to it
        self._writer = CommitWriter(steps, retainer, self._watch.tell)
        self._reserve.fill()
        tell_after_fork(self)

    def forked(self) -> None:
        """Refuse everything from now on, in the child of a process that was forked."""
        self._is_closed, self._closed_by = True, forked
        self._writer.forked()
        if self._readers is not None:
            self._readers.forked()

    def _open_writer(self, make: Callable[[], sqlite3.Connection]) -> sqlite3.Connection:
        """Open the connection that writes, on a full disk with the space of the reserve."""
        try:
            return make()
        except JournalFullError:
            if not self._reserve.drop():
                raise
        return make()

    def _limit_log(self, transaction: WriteTransaction) -> None:
        """Keep the write-ahead log so short that the reserve can hold it."""
        pages = self._reserve.log_pages(transaction.page_size)
        self._connection.execute(f"PRAGMA wal_autocheckpoint = {pages}").fetchall()
        if self._reserve.size:
            transaction.reserve = self._reserve

    def _retainer(self, steps: JournalSteps) -> Retainer | None:
        if self._retention == Retention():
            return None  # everything is kept
        return Retainer(steps, self._retention, self._reserve, self._clock)

    def __repr__(self) -> str:
        return f"<SqliteJournal {self.path}>"

    @property
    def promises(self) -> Promises:
        """What a commit has reached when it returns."""
        if self._readers is None:
            return replace(_PROMISES, survives_kill=False, survives_power_cut=False)
        return _PROMISES

    # -- where things run --------------------------------------------------------------------

    async def write_tables(self, work: Callable[[JournalSteps], T]) -> T:
        """Run `work` inside the next commit; for the methods below."""
        return cast("T", await self._writer.run(self._writer.request(work=work)))

    async def read_tables(self, function: Callable[[QuestionReader], T]) -> T:
        """Run `function` on a snapshot; for the methods below."""
        if self._readers is not None:
            return await self._readers.run(partial(self._ask, function))
        # A database in memory has one connection only.
        request = self._writer.request(work=lambda _: self._ask(function, self._connection))
        request.is_read = True
        return cast("T", await self._writer.run(request))

    async def read_file(self, function: Callable[[QuestionReader], T]) -> T:
        """Run `function` on a snapshot, also if the journal was closed."""
        if not self._is_closed or self._readers is None:
            return await self.read_tables(function)
        return await anyio.to_thread.run_sync(
            partial(self._readers.run_alone, partial(self._ask, function))
        )

    def _ask(self, function: Callable[[QuestionReader], T], connection: sqlite3.Connection) -> T:
        return function(QuestionReader(connection, self._source))

    # -- Log ---------------------------------------------------------------------------------

    async def commit(
        self, operations: Sequence[Operation], member: Member | None = None
    ) -> list[Appended]:
        """Apply all of this or nothing; see `Log.commit`."""
        request = self._writer.request(operations, member)
        return cast("list[Appended]", await self._writer.run(request))

    async def read(
        self,
        after: int,
        limit: int,
        selection: Selection,
        partitions: Collection[int] | None = None,
    ) -> Scan:
        """Read records behind the offset `after`; see `Log.read`."""
        found = None if self._is_closed else self._tail.scan(after, limit, selection, partitions)
        if found is not None:
            return found
        return await self._read(after, limit, selection, partitions)

    _read = _reads(QuestionReader.read)
    head = _reads(QuestionReader.head)

    async def changed(
        self, since: int, timeout: float | None = None, *, others: bool = False
    ) -> int:
        """Return a number that grows with commits; see `Log.changed`."""
        self._require_open()
        watch = self._watch
        if others:
            await watch.until(lambda: watch.foreign != since, timeout, others=True)
        else:
            await watch.until(lambda: watch.version != since, timeout)
        self._require_open()
        return watch.foreign if others else watch.version

    def _require_open(self) -> None:
        if self._is_closed:
            raise self._closed_by(self.path)

    async def close(self) -> None:
        """Write what has arrived, end the thread and close the file; may be called again."""
        thread = self._writer.close()
        with anyio.CancelScope(shield=True):
            if thread is not None:
                await anyio.to_thread.run_sync(thread.join)
            if not self._is_closed:
                self._is_closed = True
                self._watch.tell(
                    0, others=True
                )  # those who wait for a change need not wait for ever
                await anyio.to_thread.run_sync(self._release)

    def _release(self) -> None:
        if self._readers is not None:
            self._readers.close()
        if self._detector is not None:
            self._detector.close()
        # Last: the one that closes last moves the log into the file.
        self._connection.close()

    async def __aenter__(self) -> Self:
        """Return the journal itself."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close it."""
        await self.close()

    # -- Members -----------------------------------------------------------------------------

    async def join(
        self,
        process: str,
        serves: Mapping[str, str],
        *,
        every: float | None = None,
        on_lost: Callable[[], object] | None = None,
    ) -> Member:
        """Become a member; see `Members.join`."""
        request = self._writer.request(work=lambda steps: steps.join(process, serves))
        renewals, runtime = self._writer.renewals, request.runtime

        def begin(member: Member) -> None:
            if not request.is_abandoned:
                renewals.add(JoinedMember(member.id, every, on_lost, runtime))

        request.on_commit = begin
        try:
            return cast("Member", await self._writer.run(request))
        except BaseException:
            if isinstance(request.value, Member):
                # Nobody knows of it: without renewals others will end it.
                renewals.drop(request.value.id)
            raise

    async def end(self, member: Member) -> bool:
        """Delete a member that was not renewed since it was read; see `Members.end`."""
        request = self._writer.request(work=lambda steps: steps.end(member))

        def forget(is_ended: bool) -> None:
            if is_ended:
                self._writer.renewals.drop(member.id)  # it is not lost: this process ended it

        request.on_commit = forget
        return cast("bool", await self._writer.run(request))

    renew = _writes(JournalSteps.renew)
    members = _reads(QuestionReader.members)
    open = _writes(JournalSteps.open)
    cursors = _reads(QuestionReader.cursors)
    acquire = _writes(JournalSteps.acquire)

    # -- Deliveries --------------------------------------------------------------------------

    def attach(self, participants: Sequence[CommitParticipant], member: Member | None) -> None:
        """Let these ride in every commit; see `Deliveries.attach`."""
        self._writer.attach(participants, member)

    claim = _writes(JournalSteps.claim)

    # -- Rows --------------------------------------------------------------------------------

    find = _reads(QuestionReader.find)
    count = _reads(QuestionReader.count)
    blocked_keys = _reads(QuestionReader.blocked_keys)
    key_rows = _reads(QuestionReader.key_rows)
    next_due = _reads(QuestionReader.next_due)
    row = _reads(QuestionReader.row)
    record = _reads(QuestionReader.record)
    letter = _reads(QuestionReader.letter)
    result = _reads(QuestionReader.result)
    results = _reads(QuestionReader.results)
    instance = _reads(QuestionReader.instance)
    due_instances = _reads(QuestionReader.due_instances)

    async def due(self, name: str, now: float, limit: int = 100) -> list[Pending]:
        """Return waiting rows whose time has come; damaged ones are set aside."""
        while True:
            found = await self.read_tables(lambda reader: reader.due(name, now, limit))
            damaged = [row for row in found if row.state is State.DAMAGED]
            if not damaged:
                return found
            await self.write_tables(partial(_set_aside, damaged))
            offsets = [row.offset for row in damaged]
            log.warning(
                "messages_damaged", subscription=name, damaged=len(damaged), offsets=offsets
            )

    # -- Questions ---------------------------------------------------------------------------

    first = _reads(QuestionReader.first)
    offset_at = _reads(QuestionReader.offset_at)
    message = _reads(QuestionReader.message)
    find_messages = _reads(QuestionReader.find_messages)
    flow = _reads(QuestionReader.flow)
    deliveries = _reads(QuestionReader.deliveries)
    delivery_counts = _reads(QuestionReader.delivery_counts)
    letter_groups = _reads(QuestionReader.letter_groups)

    # -- Letters -----------------------------------------------------------------------------

    find_letters = _reads_letters(letter_reads.find_letters)
    count_letters = _reads_letters(letter_reads.count_letters)
    total_letters = _reads_letters(letter_reads.total_letters)
    last_letter = _reads_letters(letter_reads.last_letter)

    def count_dead(self) -> int:
        """Return the number of dead letters at once; see `Letters.count_dead`."""
        self._require_open()
        if self._readers is not None:
            return self._readers.run_now(letter_reads.count_dead)
        with translated(self.path):
            return letter_reads.count_dead(self._connection)

    # -- upkeep ------------------------------------------------------------------------------

    verify = _reads(verify)
    backup = _reads(upkeep.backup)

    async def trim(
        self, retention: Retention | None = None, *, before: int | None = None
    ) -> TrimReport:
        """Remove the oldest messages, in small commits; also on a full disk.

        Args:
            retention: How much to keep, instead of what the journal was opened with.
            before: Also remove what lies before this offset.

        Raises:
            CursorError: A cursor is damaged: nobody knows what its subscription needs.
        """
        self._require_open()
        wanted = self._retention if retention is None else retention
        trimming, has_more = Trimming(wanted, before, self._clock.time()), True
        try:
            while has_more:
                step = copy(trimming)  # what it has done counts only once it is committed
                try:
                    has_more = await self._trim_some(step)
                except JournalFullError:
                    if not self._reserve.drop():
                        raise
                else:
                    step.log_from(trimming, self.path)
                    trimming = step
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._reserve.fill)
        return trimming.report

    async def _trim_some(self, step: Trimming) -> bool:
        request = self._writer.request(work=step.step)
        request.on_commit = lambda _: checkpoint(self._connection)
        return cast("bool", await self._writer.run(request))

    async def compact(self) -> None:
        """Make the file as small as possible; nobody can write until it is done."""
        self._require_open()
        if self._readers is not None:
            await anyio.to_thread.run_sync(upkeep.compact, self.path, self._connect)

    # -- Tables ------------------------------------------------------------------------------

    async def transact(
        self,
        function: Callable[[sqlite3.Connection], T],
        operations: Sequence[Operation] = (),
        *,
        member: Member | None = None,
    ) -> tuple[T, list[Appended]]:
        """Run SQL of the user inside the next commit; see `Tables.transact`."""

        def work(steps: JournalSteps) -> tuple[T, list[Appended]]:
            if member is not None:
                steps.require(member)
            value = steps.store.transaction.call(function)
            return value, steps.store.apply(operations, member)

        request = self._writer.request(operations, work=work)
        request.is_of_user = True
        return cast("tuple[T, list[Appended]]", await self._writer.run(request))


def _set_aside(damaged: Sequence[Pending], steps: JournalSteps) -> None:
    steps.store.rows.set_aside(damaged)


def _retention(options: dict[str, Any]) -> Retention | None:
    limits = {name: options[name] for name in _LIMITS if name in options}
    try:
        return Retention(**limits) if limits else None
    except ValueError as error:
        raise JournalOpenError(str(error)) from error


_LIMITS: Final[dict[str, Callable[[str], Any]]] = {
    "max_age": float,
    "max_bytes": int,
    "max_count": int,
    "hold_age": float,
    "hold_bytes": int,
    "hold_count": int,
    "beyond": {"warn": "warn", "skip": "skip"}.__getitem__,
    "warn_for": float,
}
_OPTIONS: Final[dict[str, Callable[[str], Any]]] = {
    "adopt": {"true": True, "false": False}.__getitem__,
    "lock_timeout": float,
    "reserve": int,
    "member_ttl": seconds,
    **_LIMITS,
}
