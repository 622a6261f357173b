"""Write rows back as messages: workers stage files, the driver loads them in one transaction.

Workers never write the journal themselves: a task may run twice, or fail after half its rows. The
transaction also notes which write it is, so that a repeated commit does nothing.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time as clock
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple, final
from uuid import UUID, uuid4

from pydantic_core import to_json
from pyspark.sql import types
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from msgbus.errors import InvalidTopicError, PipelineError
from msgbus.journal.operations import Append, Save
from msgbus.journal.records import Instance, Kind, Record
from msgbus.journal.sqlite.claims import JournalSteps
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.messages.topics.pattern import check_topic
from msgbus.pipeline.arrow import Batch, pa
from msgbus.pipeline.source.options import WriteOptions, microseconds, payload_codec
from msgbus.pipeline.source.tables import MESSAGES
from msgbus.runtime.private_files import PRIVATE, make_folder, open_private, permissions_of

Messages = Sequence[WriterCommitMessage | None]

WRITES: Final = "msgbus.writes"
"""Name of the instances that note the last batch of each job and stream."""


@dataclass
class StagedRows(WriterCommitMessage):
    """The file that one task has staged."""

    path: str
    rows: int


def stage(folder: str, batches: Iterator[Batch], permissions: int = PRIVATE) -> StagedRows:
    """Write batches to a new file; runs on a worker."""
    path = Path(folder, f"{uuid4().hex}.arrow")
    rows = 0
    writer = file = None
    try:
        for batch in batches:
            if not batch.num_rows:
                continue
            if writer is None:
                for one in (path.parent.parent, path.parent):
                    make_folder(one, permissions)
                file = open_private(path, "xb", permissions)
                writer = pa.ipc.new_file(file, batch.schema)
            writer.write_batch(batch)
            rows += batch.num_rows
    finally:
        if writer is not None:
            writer.close()
        if file is not None:
            file.close()
    return StagedRows(str(path), rows)


class WriteOnce(NamedTuple):
    """A write that happens once: the batch `number` of `key`, after all with lower numbers."""

    key: str
    number: int = 0

    @property
    def scope(self) -> str:
        """What tells its rows from equal rows of another write."""
        return f"{self.key}\n{self.number}"

    def is_done(self, known: Instance | None) -> bool:
        """Tell whether it has happened."""
        return known is not None and int(known.state) >= self.number

    def saved(self, known: Instance | None) -> Save:
        """Note that it has happened."""
        version = 1 if known is None else known.version + 1
        return Save(Instance(WRITES, self.key, str(self.number).encode(), None, version))


@final
class StagedWrite:
    """One write: reads the staged files a batch at a time, inside one transaction.

    Not a list of operations: a million rows would take a gigabyte.
    """

    def __init__(
        self, options: WriteOptions, staged: Sequence[StagedRows], once: WriteOnce | None
    ) -> None:
        self._options = options
        self._staged = staged
        self._once = once

    def __call__(self, steps: JournalSteps) -> bool:
        """Append the rows; false if that was done before. It may be called again."""
        store, once = steps.store, self._once
        if once is not None:
            known = store.reader.instance(WRITES, once.key)
            if once.is_done(known):
                return False
            store.apply([once.saved(known)])
        for records in self._records("" if once is None else once.scope):
            store.append([Append(record) for record in records])
        return True

    def _records(self, scope: str) -> Iterator[Iterator[Record]]:
        rows = RowRecords(self._options, scope)
        for one in self._staged:
            with pa.memory_map(one.path) as source, pa.ipc.open_file(source) as reader:
                for number in range(reader.num_record_batches):
                    yield rows.of(reader.get_batch(number))


def load(options: WriteOptions, messages: Messages, once: WriteOnce | None) -> bool:
    """Append staged rows to the journal, all or none; false if that was done before.

    Raises:
        PipelineError: A row cannot be a message, or a staged file is missing.
        JournalError: The journal cannot be written.
    """
    staged = [one for one in messages if isinstance(one, StagedRows) and one.rows]
    missing = [one.path for one in staged if not Path(one.path).is_file()]
    if missing:
        message = (
            f"The driver does not see {missing[0]}, which a worker has written. Name a folder "
            f"that all of them share: .option('staging', '/shared/folder')."
        )
        raise PipelineError(message)
    if not staged:
        return True

    async def commit() -> bool:
        # Without a reserve and retention: those are the bus's.
        codec = payload_codec(options.codec)
        async with SqliteJournal(options.path, reserve=0, codec=codec) as journal:
            return await journal.write_tables(StagedWrite(options, staged, once))

    try:
        return asyncio.run(commit())
    finally:
        discard(messages)


def discard(messages: Messages) -> None:
    """Remove staged files."""
    folders: set[Path] = set()
    for one in messages:
        if isinstance(one, StagedRows):
            Path(one.path).unlink(missing_ok=True)
            folders.add(Path(one.path).parent)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.parent.rmdir()  # ours too, unless another write is running


class _StagingWriter:
    def __init__(self, options: WriteOptions, schema: types.StructType) -> None:
        check_schema(schema, options)
        self._options = options
        self._folder = str(Path(options.staging, uuid4().hex))
        self._permissions = permissions_of(options.path)

    def write(self, iterator: Iterator[Batch]) -> WriterCommitMessage:
        """Stage the rows of one task; runs on a worker."""
        return stage(self._folder, iterator, self._permissions)

    def _discard(self, messages: Messages) -> None:
        """Remove what was staged, by tasks that failed too."""
        discard(messages)
        shutil.rmtree(self._folder, ignore_errors=True)


class JournalWriter(_StagingWriter, DataSourceArrowWriter):
    """Appends the rows of a frame."""

    def commit(self, messages: Messages) -> None:
        """Load the rows of all tasks."""
        job = self._options.job
        load(self._options, messages, None if job is None else WriteOnce(f"job:{job}"))

    def abort(self, messages: Messages) -> None:
        """Remove what was staged."""
        self._discard(messages)


class JournalStreamWriter(_StagingWriter, DataSourceStreamArrowWriter):
    """Appends the rows of each micro-batch once, however often Spark repeats it."""

    def commit(self, messages: Messages, batchId: int) -> None:  # noqa: N803
        """Load the rows of all tasks of a micro-batch, unless that was done before."""
        query = self._options.job or query_id(self._options.checkpoint)
        load(self._options, messages, WriteOnce(f"stream:{query}", batchId))

    def abort(self, messages: Messages, batchId: int) -> None:  # noqa: N803
        """Remove what was staged."""
        del batchId
        self._discard(messages)


def query_id(checkpoint: str | None) -> str:
    """The id of a streaming query, from its checkpoint: it lives as long as that.

    Raises:
        PipelineError: It cannot be read.
    """
    hint = (
        "Write with .option('checkpointLocation', ...) on a disk that the driver sees, or with "
        ".option('job', ...), a name that is new whenever the checkpoint is."
    )
    if checkpoint is None:
        message = f"The stream has no checkpoint. {hint}"
        raise PipelineError(message)
    file = Path(checkpoint.removeprefix("file://").removeprefix("file:"), "metadata")
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError) as error:
        message = f"The id of the query cannot be read from {file}: {error}. {hint}"
        raise PipelineError(message) from error


_NUMBERS: Final = (types.ByteType, types.ShortType, types.IntegerType, types.LongType)
_ENVELOPE: Final[Mapping[str, tuple[type[types.DataType], ...]]] = {
    name: _NUMBERS if isinstance(column.type, types.IntegerType) else (type(column.type),)
    for name, column in MESSAGES.columns.items()
    if name not in ("offset", "payload", "_corrupt")
}
_SHOWN: Final = ("message_id", "name", "version", "topic", "kind", "time")
LEFT_OUT: Final = frozenset({"offset", "_corrupt", "_error"})
"""Columns of frames that were read, which are no part of a new message."""


def check_schema(schema: types.StructType, options: WriteOptions) -> None:
    """Raise unless rows of this schema can be messages.

    Raises:
        PipelineError: A column is missing, or has the wrong type.
    """
    columns = {field.name: field.dataType for field in schema.fields}
    if "name" not in columns and options.name is None:
        message = (
            "Rows need a wire name to be messages: give the frame a column 'name', or write with "
            ".option('name', 'shop.OrderPlaced')."
        )
        raise PipelineError(message)
    for name, wanted in _ENVELOPE.items():
        if name in columns and not isinstance(columns[name], wanted):
            message = (
                f"The column {name!r} of messages is {wanted[-1].typeName()}, not "
                f"{columns[name].simpleString()}. Cast it first."
            )
            raise PipelineError(message)
    if "payload" in columns and not isinstance(
        columns["payload"], (types.StringType, types.StructType)
    ):
        message = (
            f"The column 'payload' is JSON text or a struct, not "
            f"{columns['payload'].simpleString()}. Cast it first."
        )
        raise PipelineError(message)


@final
class RowRecords:
    """Converts the batches of one write to records."""

    def __init__(self, options: WriteOptions, scope: str) -> None:
        self._options = options
        self._ids = MessageIds(scope)
        self._now = clock.time()
        self._topics: set[str] = set()

    def of(self, batch: Batch) -> Iterator[Record]:
        """The records of a batch.

        Raises:
            PipelineError: A row cannot be a message.
        """
        for row in batch.to_pylist(maps_as_pydicts="lossy"):
            yield self._record(row)

    def _record(self, row: dict[str, Any]) -> Record:
        name = row.get("name") or self._options.name
        if not name:
            raise _wrong(row, "has no name")
        topic = row.get("topic") or name
        self._check_topic(topic, row)
        message_id = row.get("message_id") or ""
        causation_id = row.get("causation_id")
        correlation_id = row.get("correlation_id") or causation_id or ""
        record = Record(
            message_id, name, row.get("version") or 1, topic, row.get("key"), _kind(row),
            self._time(row.get("time")), correlation_id, causation_id,
            row.get("root_id") or correlation_id, _depth(row), row.get("session_id"),
            dict(row.get("headers") or ()), _payload(row),
        )  # fmt: skip
        if message_id:
            return _rooted(record)
        return _rooted(record._replace(message_id=self._ids.of(record)))

    def _time(self, moment: datetime | None) -> float:
        return self._now if moment is None else microseconds(moment) / 1_000_000

    def _check_topic(self, topic: str, row: Mapping[str, Any]) -> None:
        if topic in self._topics:
            return
        try:
            check_topic(topic)
        except InvalidTopicError as error:
            raise _wrong(row, f"has the topic {topic!r}: {error}") from None
        self._topics.add(topic)


def _rooted(record: Record) -> Record:
    """A message without a cause is its own root."""
    own = record.message_id
    return record._replace(
        correlation_id=record.correlation_id or own, root_id=record.root_id or own
    )


def _kind(row: Mapping[str, Any]) -> Kind:
    kind = row.get("kind") or Kind.EVENT.value
    if kind not in (Kind.EVENT, Kind.COMMAND):
        raise _wrong(row, f"has the kind {kind!r}; write event or command")
    return Kind(kind)


def _depth(row: Mapping[str, Any]) -> int:
    depth: int | None = row.get("depth")
    if depth is not None:
        return depth
    return 0 if row.get("causation_id") is None else 1


def _payload(row: Mapping[str, Any]) -> bytes:
    if "payload" not in row:
        fields = {
            name: value
            for name, value in row.items()
            if name not in _ENVELOPE and name not in LEFT_OUT
        }
        return to_json(fields, inf_nan_mode="strings")
    payload = row["payload"]
    if isinstance(payload, dict):
        return to_json(payload, inf_nan_mode="strings")
    try:
        json.loads(payload)
    except (TypeError, ValueError):
        raise _wrong(row, f"has a payload that is not JSON, but {type(payload).__name__}") from None
    return str(payload).encode()


def _wrong(row: Mapping[str, Any], problem: str) -> PipelineError:
    # Neither the payload nor the key, which is part of it.
    shown = {name: row[name] for name in _SHOWN if name in row}
    return PipelineError(
        f"A row {problem}. Nothing of this write was stored. The row: {shown!r:.300}"
    )


@final
class MessageIds:
    """Ids for the messages of one write: UUIDv7 of the row's time and a hash of its content.

    So the journal recognizes rows that are written again. Equal rows are told apart by counting.
    """

    def __init__(self, scope: str = "") -> None:
        self._scope = scope
        self._seen: Counter[bytes] = Counter()

    def of(self, record: Record) -> str:
        """The id of a record, whatever its own `message_id` is."""
        content = blake2b(_content(record, self._scope), digest_size=16).digest()
        nth = self._seen[content]
        self._seen[content] += 1
        if nth:
            content = blake2b(content + nth.to_bytes(8, "big"), digest_size=16).digest()
        return v7(int(record.time * 1000), int.from_bytes(content, "big"))


def v7(milliseconds: int, entropy: int) -> str:
    """A UUIDv7 of a time and the lowest 74 bits of a number."""
    time = max(0, milliseconds) & (2**48 - 1)
    high, low = (entropy >> 62) & 0xFFF, entropy & (2**62 - 1)
    return str(UUID(int=time << 80 | 7 << 76 | high << 64 | 2 << 62 | low))


def _content(record: Record, scope: str) -> bytes:
    fields = (
        scope, record.name, record.version, record.topic, record.key, record.kind.value,
        repr(record.time), record.correlation_id, record.causation_id, record.root_id,
        record.depth, record.session_id, sorted(record.headers.items()),
    )  # fmt: skip
    # With repr a text holds no separator, and None is not "None".
    return "\n".join(map(repr, fields)).encode() + b"\n" + record.payload
