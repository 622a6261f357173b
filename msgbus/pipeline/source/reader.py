"""Reading a journal as a batch: ranges side by side, and nothing that is not wanted."""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from msgbus.errors import PipelineOptionError, TrimmedError
from msgbus.pipeline.arrow import Batch
from msgbus.pipeline.source.journal_file import Query, batches
from msgbus.pipeline.source.options import ReadOptions
from msgbus.pipeline.source.ranges import Range, bounds_of, split
from msgbus.pipeline.source.selection import conditions
from msgbus.pipeline.source.tables import Table


def columns_of(table: Table, schema: StructType) -> tuple[str, ...]:
    """The columns that a schema asks for.

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
    """Reads a table of a journal, as it is when the first query of a frame is planned.

    Payloads need not be checked for whoever decodes them anyway.
    """

    def __init__(
        self, options: ReadOptions, schema: StructType, *, check_payloads: bool = True
    ) -> None:
        self._options = options
        self._check_payloads = check_payloads
        self._columns = columns_of(options.table, schema)

    def partitions(self) -> list[Range]:
        """Ranges of offsets, up to the last one that is there now."""
        options = self._options
        found = bounds_of(options.path, options.table)
        if options.sealed is not None:
            check_sealed(options.path, options.sealed)
        last = None if options.end is None else options.end - 1
        low = max([found.first, *_given(options.start)])
        high = min([found.last, *_given(last)])
        return split(low, high, options.partitions)

    def read(self, partition: InputPartition) -> Iterator[Batch]:
        """The rows of one range; runs on a worker."""
        if not isinstance(partition, Range):
            return iter(())  # there was nothing to split
        query = query_of(self._options, self._columns, partition)
        return batches(query._replace(is_checked=self._check_payloads), self._options.engine)


def check_sealed(path: str, sealed: int) -> None:
    """Raise if messages have gone that a lake does not hold, and their deliveries with them."""
    trimmed = bounds_of(path).trimmed
    if trimmed > sealed:
        raise TrimmedError(path=path, wanted=sealed + 1, first=trimmed + 1)


def query_of(options: ReadOptions, columns: tuple[str, ...], partition: Range) -> Query:
    """What one task asks of the file."""
    return Query(
        options.path,
        options.table,
        columns,
        partition.low,
        partition.high,
        conditions(options.table, since=options.since, until=options.until, where=options.where),
        options.batch_rows,
        codec=options.codec,
    )


def _given(*values: int | None) -> list[int]:
    return [value for value in values if value is not None]
