"""The data source `msgbus`, with its batch and stream readers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from pyspark.errors import AnalysisException
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from msgbus.errors import PipelineError, PipelineOptionError, TrimmedError
from msgbus.pipeline.arrow import Batch
from msgbus.pipeline.source.journal_file import (
    Bounds,
    JournalQuery,
    Range,
    batches,
    bounds_of,
    check_same,
    split,
)
from msgbus.pipeline.source.options import ReadOptions, read_options, write_options
from msgbus.pipeline.source.selection import UNKNOWN, compared, conditions
from msgbus.pipeline.source.tables import NAME, Table
from msgbus.pipeline.source.writer import JournalStreamWriter, JournalWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class JournalSource(DataSource):
    """Journals as tables: `spark.read.format("msgbus").option("url", url).load()`."""

    @classmethod
    def name(cls) -> str:
        """The name for `format`."""
        return NAME

    def schema(self) -> StructType:
        """All columns of the table; name fewer with `.schema("offset long, name string")`."""
        return read_options(self.options).table.schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """Read a batch."""
        return JournalReader(read_options(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Read a stream."""
        return JournalStreamReader(read_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Write a batch."""
        _refuse(overwrite)
        return JournalWriter(write_options(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Write a stream."""
        _refuse(overwrite)
        return JournalStreamWriter(write_options(self.options), schema)


def _refuse(overwrite: bool) -> None:
    if overwrite:
        message = "A journal can only be appended to: write with .mode('append')."
        raise PipelineOptionError(message, option="mode")


def register(spark: SparkSession) -> None:
    """Register `format("msgbus")` with a session; nothing else of it changes."""
    try:
        spark.dataSource.register(JournalSource)
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
        # Spark has looked at the active session, not at this one, which becomes active by use.
        cast("Any", spark).createDataFrame([], "one int")
        spark.dataSource.register(JournalSource)


def columns_of(table: Table, schema: StructType) -> tuple[str, ...]:
    """The columns of a requested schema.

    Raises:
        PipelineOptionError: The table has no such column, or not of this type.
    """
    names = tuple(schema.fieldNames())
    expected = table.select(names)
    for wanted, own in zip(schema.fields, expected.fields, strict=True):
        if wanted.dataType != own.dataType:
            message = (
                f"The column {own.name!r} of {table.name!r} is {own.dataType.simpleString()}, "
                f"not {wanted.dataType.simpleString()}. Read it as it is, and cast afterwards."
            )
            raise PipelineOptionError(message, option="schema")
    return names


class JournalReader(DataSourceReader):
    """Reads a table as it is when the first query of a frame is planned."""

    def __init__(
        self, options: ReadOptions, schema: StructType, *, check_payloads: bool = True
    ) -> None:
        self._options = options
        self._check_payloads = check_payloads
        self._columns = columns_of(options.table, schema)

    def partitions(self) -> list[Range]:
        """Ranges of offsets up to the current last one."""
        options = self._options
        found = bounds_of(options.path, options.table, options.codec)
        if options.sealed is not None:
            check_sealed(options.path, options.sealed)
        low = found.first if options.start is None else max(found.first, options.start)
        high = found.last if options.end is None else min(found.last, options.end - 1)
        return split(low, high, options.partitions, found.journal)

    def read(self, partition: InputPartition) -> Iterator[Batch]:
        """Read the rows of one range; runs on a worker."""
        if not isinstance(partition, Range):
            return iter(())  # there was nothing to split
        query = query_of(self._options, self._columns, partition)
        return batches(query._replace(is_checked=self._check_payloads), self._options.engine)


def check_sealed(path: str, sealed: int) -> None:
    """Raise if messages were trimmed that a lake does not hold."""
    trimmed = bounds_of(path).trimmed
    if trimmed > sealed:
        raise TrimmedError(path=path, wanted=sealed + 1, first=trimmed + 1)


def query_of(options: ReadOptions, columns: tuple[str, ...], partition: Range) -> JournalQuery:
    """The query of one task."""
    wanted = compared(options.table, options.where)
    asked = set(options.where or {})
    return JournalQuery(
        options.path,
        options.table,
        columns,
        partition.low,
        partition.high,
        conditions(options.table, since=options.since, until=options.until, where=options.where),
        options.batch_rows,
        codec=options.codec,
        among=tuple((name, tuple(wanted[name])) for name in asked.intersection(UNKNOWN)),
        finds_missing=asked.issubset(UNKNOWN),
        journal=partition.journal,
    )


class JournalStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what came since the last micro-batch.

    `{"offset": n, "journal": id}` means that n was read, in this journal.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = columns_of(options.table, schema)
        self._target: int | None = None
        """Where a query with `availableNow` ends."""

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where a query without a checkpoint begins."""
        found = self._bounds()
        start = self._options.starting_offsets
        if start == "latest":
            return _position(found, found.last)
        if isinstance(start, int):
            return _position(found, min(max(start, found.first), found.last + 1) - 1)
        return _position(found, found.first - 1)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next micro-batch: the head, or the limit."""
        begin = int(start["offset"])
        found = self._bounds()
        check_same(self._options.path, start["journal"], found.journal)
        last = found.last
        if begin > last:
            message = (
                f"The stream has read up to offset {begin}, but the journal {self._options.path} "
                f"ends at {last}: it is an older copy. Use the journal that the "
                f"checkpoint belongs to, or begin with a new checkpoint."
            )
            raise PipelineError(message)
        if self._target is not None:
            last = max(begin, min(last, self._target))
        if isinstance(limit, ReadMaxRows):
            last = min(last, begin + limit.max_rows)
        return _position(found, last)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The option `maxRowsPerBatch`, or no limit."""
        most = self._options.max_rows
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Remember the current end of the journal."""
        self._target = self._bounds().last

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """The head of the journal, for the lag in the query's progress."""
        found = self._bounds()
        return _position(found, found.last)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The ranges of one micro-batch."""
        low, high = int(start["offset"]) + 1, int(end["offset"])
        trimmed = self._bounds().trimmed
        journal = end["journal"]
        if trimmed >= low:
            if self._options.fail_on_data_loss:
                raise TrimmedError(path=self._options.path, wanted=low, first=trimmed + 1)
            low = trimmed + 1
        return split(low, high, self._options.partitions, journal)

    def read(self, partition: InputPartition) -> Iterator[Batch]:
        """Read the rows of one range; runs on a worker."""
        if not isinstance(partition, Range):
            return iter(())
        options = self._options
        query = query_of(options, self._columns, partition)
        return batches(query._replace(may_lack=not options.fail_on_data_loss), options.engine)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: the offset is in Spark's checkpoint."""

    def stop(self) -> None:
        """Nothing to close: a connection lives for one query."""

    def _bounds(self) -> Bounds:
        options = self._options
        return bounds_of(options.path, options.table, options.codec)


def _position(found: Bounds, offset: int) -> dict[str, Any]:
    """An offset of a stream, with the journal that it belongs to."""
    return {"offset": offset, "journal": found.journal}
