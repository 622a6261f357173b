"""`Pipeline`: one journal as Spark DataFrames."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from msgbus.errors import PipelineOptionError
from msgbus.messages.message import Message
from msgbus.pipeline.arrow_decoding import (
    COLUMNS,
    SOURCE,
    Decoder,
    envelope_names,
)
from msgbus.pipeline.handlers import BatchHandler
from msgbus.pipeline.lake import ExportReport, export, trimmable
from msgbus.pipeline.lake.reading import parts_of, read_all
from msgbus.pipeline.projections import Key, Projection, plan
from msgbus.pipeline.schemas import spark_schema
from msgbus.pipeline.session import session, showing_progress
from msgbus.pipeline.source import register
from msgbus.pipeline.source.journal_file import bounds_of
from msgbus.pipeline.source.options import journal_path, payload_codec
from msgbus.pipeline.source.selection import Bound, RowSelection, Where
from msgbus.pipeline.source.tables import DELIVERIES, MESSAGES, Table, table_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from msgbus.pipeline.runs import BatchRun


@final
class Pipeline:
    """One journal as Spark DataFrames; made by `msgbus.pipeline.open`.

    A frame shows the journal as it is when the first action on it runs, and stays so: ask
    for a new frame to see later messages. The bus may write meanwhile.
    """

    def __init__(
        self,
        url: str,
        spark: SparkSession | None = None,
        *,
        lake: str | None = None,
        types: Iterable[type[Message]] = (),
        codec: str | None = None,
    ) -> None:
        self.path = journal_path(url)
        """The journal's file."""
        self.codec = codec
        """Where the codec of its payloads is, as `module:name`."""
        bounds_of(self.path)  # errors of the journal come before a JVM starts
        payload_codec(codec)
        self.lake = lake
        """The folder of the lake, if there is one."""
        self.types = tuple(types)
        """Message classes for `events`, besides the subclasses of its argument."""
        self.spark = session(spark)
        """The session all frames belong to."""
        register(self.spark)

    def __repr__(self) -> str:
        return f"<Pipeline {self.path}>"

    @property
    def source(self) -> dict[str, str]:
        """Options of the data source for this journal."""
        codec = {} if self.codec is None else {"codec": self.codec}
        return {"url": self.path, **codec}

    # -- tables ------------------------------------------------------------------------------

    def messages(
        self,
        *,
        since: Bound | None = None,
        until: Bound | None = None,
        columns: Sequence[str] | None = None,
        where: Where | None = None,
    ) -> DataFrame:
        """One row per message, from `since` on and before `until`.

        Only the `columns` are read, and only rows `where` columns have these values, such as
        `{"name": "shop.OrderPlaced", "session_id": ["job-1", "job-2"]}`. Spark's own conditions
        on the frame give the same rows, after reading all.

        A record that is damaged or missing has its offset, the reason in `_corrupt`, and NULL in
        all other columns.
        """
        return read_all(self, RowSelection(MESSAGES, since, until, columns, where))

    def events(
        self,
        message_type: type[Message],
        *,
        since: Bound | None = None,
        until: Bound | None = None,
    ) -> DataFrame:
        """One row per message of a class, with its fields as typed columns.

        Messages of known subclasses are included, with the fields of `message_type`; the column
        `name` tells them apart. Old versions are upcast. What cannot be decoded has its text in
        `_corrupt`, the reason in `_error`, and no fields; so has a record that is damaged or
        missing, of whatever class it was: of it, there is nothing but its offset.
        """
        decoder = Decoder.of(message_type, self.types)
        where = {"name": decoder.names}
        return decoder.frame(self.messages(since=since, until=until, columns=SOURCE, where=where))

    def decoded(self, frame: DataFrame, message_type: type[Message]) -> DataFrame:
        """The rows of `messages` or `stream` as events of one class; see `events`."""
        decoder = Decoder.of(message_type, self.types)
        name = frame["name"]
        return decoder.frame(frame.where(name.isin(decoder.names) | name.isNull()))

    def corrupt(self, *message_types: type[Message]) -> DataFrame:
        """Count messages, and those that cannot be decoded, by name and version."""
        from pyspark.sql import functions as f

        frames: list[DataFrame] = []
        for one in message_types:
            names = envelope_names(spark_schema(one).fieldNames())
            columns = [f.col(names[name]).alias(name) for name in ("name", "version")]
            frames.append(self.events(one).select(*columns, "_corrupt"))
        if not message_types:
            frames.append(self.messages(columns=["name", "version", "_corrupt"]))
        counts = (f.count(f.lit(1)).alias("messages"), f.count("_corrupt").alias("corrupt"))
        found = [frame.groupBy("name", "version").agg(*counts) for frame in frames]
        return reduce(lambda one, other: one.unionAll(other), found)

    def deliveries(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        columns: Sequence[str] | None = None,
        where: Where | None = None,
    ) -> DataFrame:
        """One row per attempt to handle a message."""
        return read_all(self, RowSelection(DELIVERIES, since, until, columns, where))

    def stream(
        self,
        *,
        start: int | Literal["earliest", "latest"] = "earliest",
        max_rows: int | None = None,
        columns: Sequence[str] | None = None,
        where: Where | None = None,
        table: Literal["messages", "deliveries"] = "messages",
    ) -> DataFrame:
        """The messages as a stream, for `writeStream` with a checkpoint.

        A new query begins at `start`; one with a checkpoint goes on from there. A micro-batch
        covers at most `max_rows` offsets.
        """
        options = {**self.source, "startingOffsets": str(start)}
        if max_rows is not None:
            options["maxRowsPerBatch"] = str(max_rows)
        selection = RowSelection(table_of(table), columns=columns, where=where)
        return selection.load(self.spark.readStream, {**options, **selection.options()})

    # -- lake and report -----------------------------------------------------------------------

    def export(self, lake: str | os.PathLike[str] | None = None) -> ExportReport:
        """Export new messages and deliveries to a lake of Parquet files.

        From then on this pipeline reads sealed rows from there. An export may be interrupted and
        repeated at any time: every row is in the lake once.

        Args:
            lake: Its folder; by default the one this pipeline was opened with.

        Raises:
            LakeBusyError: Another export is running.
            WrongLakeError: It holds the messages of another journal.
            LakeDamagedError: Its manifest cannot be read.
            PipelineOptionError: There is no lake.
        """
        folder = self._lake(lake)
        with showing_progress(self.spark, "export"):
            report = export(self, folder)
        self.lake = folder
        return report

    def trimmable(self, lake: str | os.PathLike[str] | None = None) -> int:
        """The offset before which the journal may be trimmed: a lake has everything below it.

        For `await journal.trim(before=pipe.trimmable())`.
        """
        return trimmable(self, self._lake(lake))

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        since: Bound | None = None,
        until: Bound | None = None,
        stuck_after: float = 300.0,
    ) -> Path:
        """Write a report as one self-contained HTML file, and return its path.

        Args:
            path: The file; an existing one is replaced when the new one is complete.
            since: Messages from this offset or time on.
            until: Messages before this offset or time.
            stuck_after: Seconds after which an unanswered message counts as stuck.
        """
        from msgbus.pipeline.report import write_report

        with showing_progress(self.spark, "report"):
            return write_report(self, path, since=since, until=until, stuck_after=stuck_after)

    def _lake(self, given: str | os.PathLike[str] | None) -> str:
        lake = self.lake if given is None else os.fspath(given)
        if lake is None:
            message = 'Say which lake: pipe.export("lake/"), or pipeline.open(url, lake="lake/").'
            raise PipelineOptionError(message, option="lake")
        return lake

    def journal(
        self,
        table: Table = MESSAGES,
        *,
        since: Bound | None = None,
        until: Bound | None = None,
        columns: Sequence[str] | None = None,
        where: Where | None = None,
        sealed: int | None = None,
    ) -> DataFrame:
        """A table as the journal's file has it, without the lake.

        With `sealed`, the last offset that a lake holds, a query fails with `TrimmedError` if the
        journal was trimmed beyond it meanwhile.
        """
        selection = RowSelection(table, since, until, columns, where)
        options = {**self.source, **selection.options()}
        if sealed is not None:
            options["sealed"] = str(sealed)
        return selection.load(self.spark.read, options)

    # -- projections and batch handlers ----------------------------------------------------------

    def replay(
        self,
        projection: type[Projection[Any, Any]] | Projection[Any, Any],
        *,
        key: Key | None = None,
        since: Bound | None = None,
        until: Bound | None = None,
        partitions: int | None = None,
        skip_corrupt: bool = False,
    ) -> DataFrame:
        """Fold history into the rows of a projection, equal to those of `msgbus.pipeline.fold`.

        Keys are folded in parallel, the events of each key in the order of their offsets. Workers
        must be able to import the projection and its events, or they are in `__main__`.

        Args:
            projection: Its class, or an instance.
            key: A field, or a function of an event, instead of the projection's own key.
            since: The first offset or time; states begin as initial there.
            until: The offset or time to end before.
            partitions: Into how many parts to split the keys; by default as Spark shuffles.
            skip_corrupt: Leave out events that do not decode, instead of failing.

        Raises:
            ProjectionError: Its events, its row or its key are unknown.
            PipelineOptionError: `partitions` is less than 1.
            TrimmedError: The journal no longer has what the lake does not have.
        """
        from msgbus.pipeline.replay import replayed

        if partitions is not None and partitions < 1:
            message = f"'partitions' is {partitions}; write a whole number of at least 1."
            raise PipelineOptionError(message, option="partitions")
        fold = plan(projection, key=key, skip_corrupt=skip_corrupt)
        selection = RowSelection(MESSAGES, since, until, COLUMNS, {"name": fold.names})
        return replayed(self.spark, parts_of(self, selection), fold, partitions=partitions)

    def run(
        self,
        *handlers: BatchHandler[Any],
        checkpoint: str | None = None,
        once: bool = False,
        every: float | None = None,
        max_rows: int | None = None,
        start: int | Literal["earliest", "latest"] = "earliest",
    ) -> BatchRun:
        """Start handlers made with `@pipeline.on_batch`, and return at once.

        Each is a durable subscriber: it goes on from its checkpoint, and the journal keeps what it
        has not seen. An interrupted batch comes again.

        Args:
            handlers: The handlers to run.
            checkpoint: A folder for all of them; by default beside the journal.
            once: End with what is there now, instead of waiting for more.
            every: Seconds from the start of one batch to the next; by default none.
            max_rows: Messages per batch at most, those of other classes included.
            start: Where a handler without a checkpoint begins: earliest, latest or an offset.
        """
        from msgbus.pipeline.runs import started

        folder = checkpoint or f"{self.path}.checkpoints"
        return started(
            self, handlers, folder, once=once, every=every, max_rows=max_rows, start=start
        )
