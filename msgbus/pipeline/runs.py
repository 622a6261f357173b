"""Run batch handlers, each as a streaming query with a checkpoint of its own."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast, final

from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as sql

from msgbus.errors import ConfigurationError, PipelineError, StaleError
from msgbus.journal.operations import Pass
from msgbus.journal.records import Selection
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.messages.message import Command, Message
from msgbus.pipeline.arrow_decoding import Decoder
from msgbus.pipeline.handlers import BatchHandler, MicroBatch
from msgbus.pipeline.source import NAME
from msgbus.pipeline.source.journal_file import bounds_of
from msgbus.pipeline.source.options import payload_codec
from msgbus.pipeline.source.writer import query_id
from msgbus.pipeline.tracebacks import what_happened
from msgbus.runtime.private_files import make_folder, permissions_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from msgbus.pipeline.pipeline import Pipeline

Start: TypeAlias = int | Literal["earliest", "latest"]

CURSOR: Final = "pipeline."
"""Prefix of the subscriptions of batch handlers: a cursor each, without an owner."""

_SELECTION: Final = Selection(text="pipeline")
"""What it takes is Spark's business: members neither serve nor claim it."""


@final
class BatchRun:
    """Running batch handlers; leaving `with` stops them. A new run goes on where this one ended."""

    def __init__(self, handlers: Sequence[HandlerQuery], queries: Sequence[StreamingQuery]) -> None:
        self._handlers = handlers
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
        """Whether any handler is still running."""
        return any(query.isActive for query in self.queries)

    def await_end(self, timeout: float | None = None) -> bool:
        """Wait until all have ended; false after `timeout` seconds.

        Raises:
            PipelineError: A handler failed; the others are stopped.
        """
        end = None if timeout is None else time.monotonic() + timeout
        for index, query in enumerate(self.queries):
            try:
                if end is None:
                    query.awaitTermination()
                elif not wait(query, max(0.001, end - time.monotonic())):
                    return False
            except StreamingQueryException as error:
                self.stop()
                raise self._failed(index, error) from error
        self._move_cursors()
        return True

    def stop(self) -> None:
        """Stop all of them; a batch in flight comes again in the next run."""
        for query in self.queries:
            query.stop()
        self._move_cursors()

    def _failed(self, index: int, error: Exception) -> PipelineError:
        name = self._handlers[index].handler.name if self._handlers else "into a table"
        return PipelineError(
            f"The stream {name!r} has failed, and ended: {what_happened(str(error))} "
            f"Fix the cause and run it again: it goes on with the same batch."
        )

    def _move_cursors(self) -> None:
        for one in self._handlers:
            one.move_cursor()


@final
class HandlerQuery:
    """One batch handler, its checkpoint and its cursor in the journal."""

    def __init__(
        self,
        handler: BatchHandler[Any],
        decoder: Decoder,
        *,
        path: str,
        checkpoint: str,
        codec: str | None,
    ) -> None:
        self.handler = handler
        self.checkpoint = checkpoint
        self._decoder = decoder
        self._path = path
        self._codec = codec
        self._cursor = CURSOR + handler.name
        self._moved: int | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Handle one micro-batch; called by Spark."""
        # Spark has committed everything before this batch.
        self._move(read_up_to(self.checkpoint, batch_id - 1))
        batch = MicroBatch(batch_id, query_id(self.checkpoint))
        found = self.handler.handle(self._decoder.frame(frame), batch)
        if found is not None:
            returns = self.handler.returns
            write_back(found, self._path, job=batch.key, message_type=returns, codec=self._codec)

    def begin(self, first: int) -> None:
        """Have retention keep everything after `first`, if this handler is new."""
        if committed(self.checkpoint) is None:
            self._move(first)

    def move_cursor(self) -> None:
        """Move the cursor to the last batch that Spark has committed."""
        self._move(committed(self.checkpoint))

    def _move(self, offset: int | None) -> None:
        if offset is None or offset == self._moved:
            return
        move_cursor(self._path, self._cursor, offset, codec=self._codec)
        self._moved = offset


def move_cursor(path: str, cursor: str, offset: int, *, codec: str | None = None) -> None:
    """Move a cursor to `offset`, and create it if it is missing: retention keeps what is after.

    It never goes back.
    """

    async def move() -> None:
        async with SqliteJournal(path, reserve=0, codec=payload_codec(codec)) as journal:
            (found,) = await journal.open(cursor, _SELECTION, offset)
            if found.acked < offset:
                # Another run that has just moved it will do so again.
                with suppress(StaleError):
                    await journal.commit([Pass(found, offset, offset)])

    # On a thread of its own: in a notebook this one already runs an event loop.
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
    """Append rows to the journal as messages, once per `job`."""
    if message_type is not None:
        frame = _as_messages(frame, message_type)
    writer = frame.write.format(NAME).option("url", path).option("job", job)
    if codec is not None:
        writer = writer.option("codec", codec)
    writer.mode("append").save()


def _as_messages(frame: DataFrame, message_type: type[Message]) -> DataFrame:
    """Add the envelope of a class as columns, where the frame has none of that name."""
    wire = message_type.__wire__
    envelope: dict[str, Any] = {
        "name": wire.name,
        "version": wire.version,
        "topic": wire.topic or wire.name,
        "kind": "command" if issubclass(message_type, Command) else "event",
    }
    for name, value in envelope.items():
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
    """Start handlers, each with its own checkpoint below `folder`."""
    names = [handler.name for handler in handlers]
    if not names or len(set(names)) < len(names):
        message = (
            f"Each handler of a run needs a name of its own, not {', '.join(names) or 'none'}: "
            f"@pipeline.on_batch(OrderPlaced, name='totals')."
        )
        raise ConfigurationError(message)
    running: list[HandlerQuery] = []
    queries: list[StreamingQuery] = []
    for handler in handlers:
        checkpoint = os.path.join(folder, handler.name)  # noqa: PTH118 (may be a URL)
        if "://" not in checkpoint:
            checkpoint = os.path.abspath(checkpoint)  # noqa: PTH100 (the same)
        _close_to_others(checkpoint, pipe.path)
        decoder = Decoder.of(handler.message_type, pipe.types)
        frame = pipe.stream(start=start, max_rows=max_rows, where={"name": decoder.names})
        one = HandlerQuery(
            handler, decoder, path=pipe.path, checkpoint=checkpoint, codec=pipe.codec
        )
        one.begin(_before(pipe.path, start))
        writer = frame.writeStream.queryName(handler.name).foreachBatch(one)
        running.append(one)
        queries.append(_start(writer, checkpoint, once=once, every=every))
    return BatchRun(running, queries)


def _before(path: str, start: Start) -> int:
    """The last offset before a new stream."""
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
    """Stream all messages into a folder of Parquet files, each exactly once."""
    frame = pipe.stream(start=start, max_rows=max_rows)
    for folder in (table, checkpoint):
        _close_to_others(folder, pipe.path)
    writer = frame.writeStream.format("parquet").option("path", table)
    return BatchRun([], [_start(writer, checkpoint, once=once, every=every)])


def _close_to_others(folder: str, journal: str) -> None:
    """Make a local folder that only those may enter who may read the journal.

    Spark gives the files that it makes there the permissions of its session.
    """
    if "://" not in folder or folder.startswith("file://"):
        make_folder(local_folder(folder), permissions_of(journal))


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
    """Whether a query ended in time; Spark takes fractions of seconds, unlike its types."""
    return bool(query.awaitTermination(cast("int", seconds)))


# -- Spark's checkpoints ----------------------------------------------------------------------


def local_folder(checkpoint: str) -> Path:
    """The folder of a checkpoint on a local disk."""
    return Path(checkpoint.removeprefix("file://").removeprefix("file:"))


def committed(checkpoint: str) -> int | None:
    """The last offset that Spark has committed."""
    folder = local_folder(checkpoint) / "commits"
    done = [int(file.name) for file in folder.glob("*") if file.name.isdigit()]
    return read_up_to(checkpoint, max(done)) if done else None


def read_up_to(checkpoint: str, batch_id: int) -> int | None:
    """The last offset of a batch; `None` if there is no such batch, or it cannot be read."""
    try:
        lines = (local_folder(checkpoint) / "offsets" / str(batch_id)).read_text().splitlines()
        return int(json.loads(lines[-1])["offset"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
