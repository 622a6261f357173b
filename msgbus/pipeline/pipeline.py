"""`Pipeline`: one journal, as tables of Spark."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from msgbus.errors import PipelineOptionError
from msgbus.messages.message import Message
from msgbus.pipeline.arrow_decoding import (
    SOURCE,
    Decoder,
    classes_of,
    envelope_names,
    event_schema,
)
from msgbus.pipeline.asked import Asked, Bound
from msgbus.pipeline.handlers import BatchHandler
from msgbus.pipeline.lake import ExportReport, export, trimmable
from msgbus.pipeline.lake.reading import parts_of, read_all
from msgbus.pipeline.progress import showing_progress
from msgbus.pipeline.projections import Key, Projection, plan
from msgbus.pipeline.schemas import spark_schema
from msgbus.pipeline.session import session
from msgbus.pipeline.source import NAME, register
from msgbus.pipeline.source.options import journal_path, payload_codec
from msgbus.pipeline.source.ranges import bounds_of
from msgbus.pipeline.source.selection import Where
from msgbus.pipeline.source.tables import DELIVERIES, MESSAGES, Table, table_of
from msgbus.pipeline.source.tasks import mapped

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from msgbus.pipeline.runs import BatchRun


@final
class Pipeline:
    """Everything that one journal holds, as DataFrames; made by `msgbus.pipeline.open`.

    A frame shows the journal as it is when the first action on it runs, and stays so: ask
    for a new frame to see later messages. The bus may write all the while.
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
        """Where the codec of its payloads is, if it has one."""
        bounds_of(self.path)  # says what is wrong before a JVM is started
        payload_codec(codec)
        self.lake = lake
        """Where sealed ranges are, if there is a lake."""
        self.types = tuple(types)
        """Message classes that `events` should know beside the subclasses of what it is given."""
        self.spark = session(spark)
        """The session all frames belong to."""
        register(self.spark)

    def __repr__(self) -> str:
        return f"<Pipeline {self.path}>"

    @property
    def source(self) -> dict[str, str]:
        """The options by which the data source finds the journal."""
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
        """One row for each message, from `since` on and before `until`.

        Name the `columns` that are needed, and `where` what they must be, such as
        `{"name": "shop.OrderPlaced", "session_id": ["job-1", "job-2"]}`: what is not wanted is
        not read. Conditions of Spark on the frame give the same rows, after reading them all.
        """
        return read_all(self, Asked(MESSAGES, since, until, columns, where))

    def events(
        self,
        message_type: type[Message],
        *,
        since: Bound | None = None,
        until: Bound | None = None,
    ) -> DataFrame:
        """One row for each message of a class, with its fields as typed columns.

        Messages of known subclasses are there too, with the fields of `message_type`; the
        column `name` tells them apart. Old versions are brought up by their upcasters. What
        cannot be decoded has its text in `_corrupt`, the reason in `_error`, and no fields.
        """
        classes = classes_of(message_type, self.types)
        frame = self.messages(
            since=since, until=until, columns=SOURCE, where={"name": sorted(classes)}
        )
        return self.decoded(frame, message_type)

    def decoded(self, frame: DataFrame, message_type: type[Message]) -> DataFrame:
        """The rows of `messages` or `stream` as events of one class; see `events`."""
        classes = classes_of(message_type, self.types)
        rows = frame.where(frame["name"].isin(sorted(classes))).select(*SOURCE)
        run = Decoder.of(message_type, classes).run
        return mapped(rows, run, event_schema(message_type))

    def corrupt(self, *message_types: type[Message]) -> DataFrame:
        """How many messages there are, and how many cannot be decoded, by name and version."""
        from pyspark.sql import functions as f

        counted: DataFrame | None = None
        for one in message_types:
            rows = self.events(one)
            names = envelope_names([field.name for field in spark_schema(one).fields])
            counts = rows.groupBy(
                f.col(names["name"]).alias("name"), f.col(names["version"]).alias("version")
            ).agg(f.count(f.lit(1)).alias("messages"), f.count("_corrupt").alias("corrupt"))
            counted = counts if counted is None else counted.unionAll(counts)
        if counted is not None:
            return counted
        frame = self.messages(columns=["name", "version", "_corrupt"])
        return frame.groupBy("name", "version").agg(
            f.count(f.lit(1)).alias("messages"), f.count("_corrupt").alias("corrupt")
        )

    def deliveries(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        columns: Sequence[str] | None = None,
        where: Where | None = None,
    ) -> DataFrame:
        """One row for each try to handle a message."""
        return read_all(self, Asked(DELIVERIES, since, until, columns, where))

    def stream(
        self,
        *,
        start: int | Literal["earliest", "latest"] = "earliest",
        max_rows: int | None = None,
        columns: Sequence[str] | None = None,
        where: Where | None = None,
        table: Literal["messages", "deliveries"] = "messages",
    ) -> DataFrame:
        """The messages as a stream, for `writeStream` with a checkpoint of its own.

        A new query begins at `start`; one with a checkpoint goes on where it was. A micro-batch
        covers at most `max_rows` offsets.
        """
        source = table_of(table)
        options = {**self.source, **Asked(source, where=where).options()}
        reader = self.spark.readStream.format(NAME).options(**options)
        reader = reader.option("startingOffsets", str(start))
        if max_rows is not None:
            reader = reader.option("maxRowsPerBatch", str(max_rows))
        if columns is not None:
            reader = reader.schema(source.select(columns))
        return reader.load()

    # -- what is made of them ------------------------------------------------------------------

    def export(self, lake: str | os.PathLike[str] | None = None) -> ExportReport:
        """Add to a lake of Parquet files what it does not have yet, messages and deliveries.

        From then on this pipeline reads sealed rows from there. May be broken off and repeated at
        any time: every row is in the lake once.

        Args:
            lake: Its folder; the one this pipeline was opened with, if not given.

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
        """The offset before which the journal may be trimmed, as a lake has everything of it.

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
        """Write a report as one HTML file, to be opened anywhere, and return its path.

        Args:
            path: The file; one that is there is replaced when the new one is complete.
            since: Messages from this offset or time on.
            until: Messages before this offset or time.
            stuck_after: Seconds after which a message that nobody has answered counts as stuck.
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

    # -- the journal alone -----------------------------------------------------------------------

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
        journal was trimmed beyond it in the meantime.
        """
        options = {**self.source, **Asked(table, since, until, columns, where).options()}
        if sealed is not None:
            options["sealed"] = str(sealed)
        reader = self.spark.read.format(NAME).options(**options)
        if columns is not None:
            reader = reader.schema(table.select(columns))
        return reader.load()

    # -- work on them ------------------------------------------------------------------------

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
        """The rows of a projection over history, equal to those of `msgbus.pipeline.fold`.

        Keys are folded side by side; the events of each in the order of their offsets. `apply`
        and the classes of the events must be importable by the workers, or be in `__main__`.

        Args:
            projection: Its class, or an object of it.
            key: A field, or a function of an event, instead of the projection's own key.
            since: Where to begin, with initial states: an offset or a time.
            until: Where to end before.
            partitions: Into how many parts to split the keys; Spark's own number if not given.
            skip_corrupt: Leave out events that do not decode, instead of failing.

        Raises:
            ProjectionError: Its events, its row or its key cannot be told.
            PipelineOptionError: `partitions` is less than 1.
            TrimmedError: What the lake does not have is not in the journal any more.
        """
        from msgbus.pipeline.replay import COLUMNS, replayed

        if partitions is not None and partitions < 1:
            message = f"'partitions' is {partitions}; write a whole number of at least 1."
            raise PipelineOptionError(message, option="partitions")
        fold = plan(projection, key=key, skip_corrupt=skip_corrupt)
        asked = Asked(MESSAGES, since, until, COLUMNS, {"name": fold.names})
        return replayed(self.spark, parts_of(self, asked), fold, partitions=partitions)

    def run(
        self,
        *handlers: BatchHandler[Any],
        checkpoint: str | None = None,
        once: bool = False,
        every: float | None = None,
        max_rows: int | None = None,
        start: int | Literal["earliest", "latest"] = "earliest",
    ) -> BatchRun:
        """Start handlers that were made with `@pipeline.on_batch`, and return at once.

        Each is a durable subscriber: it goes on where its checkpoint says, and the journal keeps
        what it has not seen. A batch that was interrupted comes again.

        Args:
            handlers: What to run.
            checkpoint: A folder for all of them; beside the journal if not given.
            once: End with what is there now, instead of waiting for more.
            every: Seconds between the beginnings of batches; as soon as possible if not given.
            max_rows: Messages of one batch, at most, those of other classes included.
            start: Where a handler without a checkpoint begins: earliest, latest or an offset.
        """
        from msgbus.pipeline.runs import started

        folder = checkpoint or f"{self.path}.checkpoints"
        return started(
            self, handlers, folder, once=once, every=every, max_rows=max_rows, start=start
        )
