"""Running batch handlers: each is a streaming query with a checkpoint of its own."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast, final

from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as sql

from msgbus.errors import ConfigurationError, PipelineError
from msgbus.journal.operations import CreateCursor, MoveCursor
from msgbus.journal.sqlite import SqliteJournal
from msgbus.messages.message import Command, Message
from msgbus.pipeline.arrow_decoding import SOURCE, Decoder, classes_of, event_schema
from msgbus.pipeline.handlers import BatchHandler, MicroBatch
from msgbus.pipeline.source import NAME
from msgbus.pipeline.source.ranges import bounds_of
from msgbus.pipeline.source.tasks import mapped
from msgbus.pipeline.source.writer import query_id
from msgbus.pipeline.tracebacks import what_happened

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from msgbus.pipeline.pipeline import Pipeline

Start: TypeAlias = int | Literal["earliest", "latest"]

CURSOR: Final = "pipeline."
"""Begins the names of cursors that belong to batch handlers."""


@final
class BatchRun:
    """Handlers at work. `with` stops them in the end; a new run goes on where this one ended."""

    def __init__(self, works: Sequence[Work], queries: Sequence[StreamingQuery]) -> None:
        self._works = works
        self.queries = tuple(queries)
        """Spark's own handles, in the order of the handlers."""

    def __enter__(self) -> BatchRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def is_active(self) -> bool:
        """Whether any handler is still at work."""
        return any(query.isActive for query in self.queries)

    def await_end(self, timeout: float | None = None) -> bool:
        """Wait until all have ended; false if time ran out before.

        Raises:
            PipelineError: A handler failed; the others are stopped.
        """
        end = None if timeout is None else time.monotonic() + timeout
        for place, query in enumerate(self.queries):
            try:
                if end is None:
                    query.awaitTermination()
                elif not wait(query, max(0.001, end - time.monotonic())):
                    return False
            except StreamingQueryException as error:
                self.stop()
                raise self._failed(place, error) from error
        self._settle()
        return True

    def stop(self) -> None:
        """Stop all of them; a batch that is being worked on comes again in the next run."""
        for query in self.queries:
            query.stop()
        self._settle()

    def _failed(self, place: int, error: Exception) -> PipelineError:
        name = self._works[place].handler.name if self._works else "into a table"
        return PipelineError(
            f"The stream {name!r} has failed, and ended: {what_happened(str(error))} "
            f"Mend the cause and run it again: it goes on with the same batch."
        )

    def _settle(self) -> None:
        for work in self._works:
            work.settle()


@final
class Typed:
    """Gives messages the columns of one class, as `Pipeline.events` does."""

    def __init__(self, message_type: type[Message], types: Iterable[type[Message]]) -> None:
        classes = classes_of(message_type, types)
        self.names = sorted(classes)
        self._decoder = Decoder.of(message_type, classes)
        self._schema = event_schema(message_type)

    def __call__(self, frame: DataFrame) -> DataFrame:
        """A frame of events, from one of messages."""
        return mapped(frame.select(*SOURCE), self._decoder.run, self._schema)


@final
class Work:
    """One handler, and where it is in the journal."""

    def __init__(
        self,
        handler: BatchHandler[Any],
        typed: Typed,
        *,
        path: str,
        checkpoint: str,
        codec: str | None,
    ) -> None:
        self.handler = handler
        self.checkpoint = checkpoint
        self._typed = typed
        self._path = path
        self._codec = codec
        self._cursor = CURSOR + handler.name
        self._moved: int | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """What Spark calls for each micro-batch."""
        # Everything before this batch is done, and that Spark knows it is done.
        self._move(read_up_to(self.checkpoint, batch_id - 1))
        batch = MicroBatch(batch_id, query_id(self.checkpoint))
        found = self.handler.handle(self._typed(frame), batch)
        if found is not None:
            returns = self.handler.returns
            write_back(found, self._path, job=batch.key, message_type=returns, codec=self._codec)

    def begin(self, first: int) -> None:
        """Have the journal keep everything behind `first`, if this is a new handler."""
        if committed(self.checkpoint) is None:
            self._move(first)

    def settle(self) -> None:
        """Say in the journal how far the handler has come."""
        self._move(committed(self.checkpoint))

    def _move(self, offset: int | None) -> None:
        """Have retention keep what is not done yet, as for every durable subscription."""
        if offset is None or offset == self._moved:
            return
        move_cursor(self._path, self._cursor, offset)
        self._moved = offset


def move_cursor(path: str, cursor: str, offset: int) -> None:
    """Say that everything up to `offset` is done; makes the cursor if it is not there."""

    async def move() -> None:
        async with SqliteJournal(path, reserve=0) as journal:
            await journal.commit([CreateCursor(cursor, offset), MoveCursor(cursor, offset)])

    # On a thread of its own: in a notebook this one has an event loop already.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(move())).result()


def write_back(
    frame: DataFrame,
    path: str,
    *,
    job: str,
    message_type: type[Message] | None,
    codec: str | None = None,
) -> None:
    """Append rows as messages, once for each `job`."""
    if message_type is not None:
        frame = _as_messages(frame, message_type)
    writer = frame.write.format(NAME).option("url", path).option("job", job)
    if codec is not None:
        writer = writer.option("codec", codec)
    writer.mode("append").save()


def _as_messages(frame: DataFrame, message_type: type[Message]) -> DataFrame:
    """Say by columns what the class says, unless the frame says it itself."""
    wire = message_type.__wire__
    said: dict[str, Any] = {
        "name": wire.name,
        "version": wire.version,
        "topic": wire.topic or wire.name,
        "kind": "command" if issubclass(message_type, Command) else "event",
    }
    for name, value in said.items():
        if name not in frame.columns:
            frame = frame.withColumn(name, sql.lit(value))
    if isinstance(wire.key, str) and "key" not in frame.columns and wire.key in frame.columns:
        frame = frame.withColumn("key", sql.col(wire.key).cast("string"))
    return frame


# -- starting --------------------------------------------------------------------------------


def started(
    pipe: Pipeline,
    handlers: Sequence[BatchHandler[Any]],
    folder: str,
    *,
    once: bool,
    every: float | None,
    max_rows: int | None,
    start: Start,
) -> BatchRun:
    """Handlers at work, each with a folder of its own in `folder`."""
    names = [handler.name for handler in handlers]
    if not names or len(set(names)) < len(names):
        message = (
            f"Each handler of a run needs a name of its own, not {', '.join(names) or 'none'}: "
            f"@pipeline.on_batch(OrderPlaced, name='totals')."
        )
        raise ConfigurationError(message)
    works: list[Work] = []
    queries: list[StreamingQuery] = []
    for handler in handlers:
        checkpoint = os.path.join(folder, handler.name)  # noqa: PTH118 (may be a URL)
        if "://" not in checkpoint:
            checkpoint = os.path.abspath(checkpoint)  # noqa: PTH100 (the same)
        typed = Typed(handler.message_type, pipe.types)
        frame = pipe.stream(start=start, max_rows=max_rows, where={"name": typed.names})
        work = Work(handler, typed, path=pipe.path, checkpoint=checkpoint, codec=pipe.codec)
        work.begin(_before(pipe.path, start))
        writer = frame.writeStream.queryName(handler.name).foreachBatch(work)
        works.append(work)
        queries.append(_start(writer, checkpoint, once=once, every=every))
    return BatchRun(works, queries)


def _before(path: str, start: Start) -> int:
    """The last offset that a new stream leaves out."""
    found = bounds_of(path)
    if start == "latest":
        return found.last
    first = found.first if start == "earliest" else int(start)
    return min(max(first, found.first) - 1, found.last)


def into_table(
    pipe: Pipeline,
    table: str,
    *,
    checkpoint: str,
    once: bool,
    every: float | None,
    max_rows: int | None,
    start: Start,
) -> BatchRun:
    """All messages as they come, into Parquet files of one folder; none is lost or doubled."""
    frame = pipe.stream(start=start, max_rows=max_rows)
    writer = frame.writeStream.format("parquet").option("path", table)
    return BatchRun([], [_start(writer, checkpoint, once=once, every=every)])


def _start(
    writer: DataStreamWriter, checkpoint: str, *, once: bool, every: float | None
) -> StreamingQuery:
    writer = writer.option("checkpointLocation", checkpoint)
    if once:
        writer = writer.trigger(availableNow=True)
    elif every is not None:
        writer = writer.trigger(processingTime=f"{max(1, round(every * 1000))} milliseconds")
    return writer.start()


def wait(query: StreamingQuery, seconds: float) -> bool:
    """Whether a query ended in time; Spark takes fractions, whatever its types say."""
    return bool(query.awaitTermination(cast("int", seconds)))


# -- Spark's checkpoints ----------------------------------------------------------------------


def local_folder(checkpoint: str) -> Path:
    """The folder of a checkpoint, if it is on a disk of this machine."""
    return Path(checkpoint.removeprefix("file://").removeprefix("file:"))


def committed(checkpoint: str) -> int | None:
    """The last offset of which Spark knows that it is done."""
    folder = local_folder(checkpoint) / "commits"
    done = [int(file.name) for file in folder.glob("*") if file.name.isdigit()]
    return read_up_to(checkpoint, max(done)) if done else None


def read_up_to(checkpoint: str, batch_id: int) -> int | None:
    """The last offset of a batch; `None` if there was no such batch, or it is not to be seen."""
    try:
        lines = (local_folder(checkpoint) / "offsets" / str(batch_id)).read_text().splitlines()
        return int(json.loads(lines[-1])["offset"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
