"""Writing rows back as messages: workers stage files, the driver loads them at once.

Workers never write the journal themselves: a task may run twice, or fail after half its rows.
What they leave in files becomes one transaction of the journal when Spark commits the whole
write, with a marker that makes a repeated commit do nothing.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final, overload
from uuid import uuid4

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from msgbus.errors import JournalConflictError, PipelineError
from msgbus.journal.operations import Append, Mark, Operation
from msgbus.journal.sqlite import SqliteJournal
from msgbus.pipeline.arrow import Batch, pa
from msgbus.pipeline.source.options import WriteOptions, payload_codec
from msgbus.pipeline.source.rows import RowRecords, check_schema

Messages = Sequence[WriterCommitMessage | None]


@dataclass
class Staged(WriterCommitMessage):
    """What a task has left for the driver."""

    path: str
    rows: int


def stage(folder: str, batches: Iterator[Batch]) -> Staged:
    """Write batches to a file of their own; runs on a worker."""
    path = Path(folder, f"{uuid4().hex}.arrow")
    rows = 0
    writer = None
    try:
        for batch in batches:
            if not batch.num_rows:
                continue
            if writer is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                writer = pa.ipc.new_file(str(path), batch.schema)
            writer.write_batch(batch)
            rows += batch.num_rows
    finally:
        if writer is not None:
            writer.close()
    return Staged(str(path), rows)


@final
class Load(Sequence[Operation]):
    """The operations of one write, read from the staged files whenever they are asked for.

    A million rows as a list would be a gigabyte, and a commit that has to be repeated asks
    for them again.
    """

    def __init__(self, options: WriteOptions, staged: Sequence[Staged], mark: Mark | None) -> None:
        self._options = options
        self._staged = staged
        self._mark = mark
        self._rows = sum(one.rows for one in staged)

    def __len__(self) -> int:
        return self._rows + (self._mark is not None)

    def __iter__(self) -> Iterator[Operation]:
        mark = self._mark
        if mark is not None:
            yield mark
        scope = "" if mark is None else f"{mark.subscription}\n{mark.message_id}"
        records = RowRecords(self._options, scope)
        for one in self._staged:
            with pa.memory_map(one.path) as source, pa.ipc.open_file(source) as reader:
                for number in range(reader.num_record_batches):
                    for record in records.of(reader.get_batch(number)):
                        yield Append(record)

    @overload
    def __getitem__(self, index: int) -> Operation: ...
    @overload
    def __getitem__(self, index: slice) -> list[Operation]: ...
    def __getitem__(self, index: int | slice) -> Operation | list[Operation]:
        """One or some of them, for completeness: it reads all."""
        return list(self)[index]


def load(options: WriteOptions, messages: Messages, mark: Mark | None) -> bool:
    """Bring staged rows into the journal, all of them or none; false if that was done before.

    Raises:
        PipelineError: A row cannot be a message, or a staged file is not there.
        JournalError: The journal cannot be written.
    """
    staged = [one for one in messages if isinstance(one, Staged) and one.rows]
    missing = [one.path for one in staged if not Path(one.path).is_file()]
    if missing:
        message = (
            f"The driver does not see {missing[0]}, which a worker has written. Name a folder "
            f"that all of them share: .option('staging', '/shared/folder')."
        )
        raise PipelineError(message)
    if not staged:
        return True

    async def commit() -> None:
        # Without a reserve and retention: those are the bus's to keep.
        codec = payload_codec(options.codec)
        async with SqliteJournal(options.path, reserve=0, codec=codec) as journal:
            await journal.commit(Load(options, staged, mark))

    try:
        asyncio.run(commit())
    except JournalConflictError:
        return False
    finally:
        discard(messages)
    return True


def discard(messages: Messages) -> None:
    """Remove what was staged."""
    folders: set[Path] = set()
    for one in messages:
        if isinstance(one, Staged):
            Path(one.path).unlink(missing_ok=True)
            folders.add(Path(one.path).parent)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.parent.rmdir()  # ours too, if nobody else is writing


class JournalWriter(DataSourceArrowWriter):
    """Appends the rows of a frame."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_schema(schema, options)
        self._options = options
        self._folder = str(Path(options.staging, uuid4().hex))

    def write(self, iterator: Iterator[Batch]) -> WriterCommitMessage:
        """Stage the rows of one task."""
        return stage(self._folder, iterator)

    def commit(self, messages: Messages) -> None:
        """Load what all tasks have staged."""
        job = self._options.job
        load(self._options, messages, None if job is None else Mark(f"job:{job}", "0", once=True))

    def abort(self, messages: Messages) -> None:
        """Forget what was staged, by tasks that failed as well."""
        discard(messages)
        shutil.rmtree(self._folder, ignore_errors=True)


class JournalStreamWriter(DataSourceStreamArrowWriter):
    """Appends the rows of each micro-batch, once, however often Spark repeats it."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_schema(schema, options)
        self._options = options
        self._folder = str(Path(options.staging, uuid4().hex))

    def write(self, iterator: Iterator[Batch]) -> WriterCommitMessage:
        """Stage the rows of one task."""
        return stage(self._folder, iterator)

    def commit(self, messages: Messages, batchId: int) -> None:  # noqa: N803
        """Load what all tasks of a micro-batch have staged, unless it has been done."""
        query = self._options.job or query_id(self._options.checkpoint)
        load(self._options, messages, Mark(f"stream:{query}", str(batchId), once=True))

    def abort(self, messages: Messages, batchId: int) -> None:  # noqa: N803
        """Forget what was staged."""
        del batchId
        discard(messages)
        shutil.rmtree(self._folder, ignore_errors=True)


def query_id(checkpoint: str | None) -> str:
    """The id of a streaming query, which lives as long as its checkpoint.

    Not the place of the checkpoint: a new query there counts its batches from 0 again.

    Raises:
        PipelineError: It cannot be read.
    """
    hint = (
        "Write with .option('checkpointLocation', ...) on a disk that the driver sees, or with "
        ".option('job', ...), a name that is new whenever the checkpoint is."
    )
    if checkpoint is None:
        message = f"The stream does not say where its checkpoint is. {hint}"
        raise PipelineError(message)
    file = Path(checkpoint.removeprefix("file://").removeprefix("file:"), "metadata")
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError) as error:
        message = f"The id of the query cannot be read from {file}: {error}. {hint}"
        raise PipelineError(message) from error
