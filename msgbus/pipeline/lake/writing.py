"""Writing Parquet where the rows are: on Spark's workers, through Arrow.

Not with Spark's own writer: that takes the form of timestamps from the session's settings, which
are the user's, and says too late what files it made.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, final

from pyspark.sql import DataFrame, Row, SparkSession

from msgbus.pipeline.arrow import Batch, Schema, arrow_schema, pa
from msgbus.pipeline.lake.folder import Staged
from msgbus.pipeline.source.ranges import Range
from msgbus.pipeline.source.tables import Table
from msgbus.pipeline.source.tasks import Batches, Read, Work, in_tasks, mapped

ROW_GROUP: Final = 100_000
"""Rows that a reader may skip together."""

_RESULT: Final = "path string, date string, rows long, first long"

pc: Any = import_module("pyarrow.compute")
pq: Any = import_module("pyarrow.parquet")

Rows: TypeAlias = Any
"""A `pyarrow.Table`."""


class Place(NamedTuple):
    """Where files are made."""

    lake: Path
    staging: Path


def stage(frame: DataFrame, table: Table, place: Place) -> list[Staged]:
    """Write the rows of a frame as files into a staging folder, one per task and day.

    A task that is repeated writes other files. Those of its first try are not among the result.
    """
    return _staged(mapped(frame.select(*table.columns), _writer(table, place), _RESULT))


def stage_ranges(
    spark: SparkSession, read: Read, ranges: Sequence[Range], table: Table, place: Place
) -> list[Staged]:
    """The same for ranges, a task for each, that `read` can read where the task runs."""
    return _staged(in_tasks(spark, read, ranges, _writer(table, place), _RESULT))


def _staged(frame: DataFrame) -> list[Staged]:
    rows: list[Row] = frame.collect()
    return [Staged(row["path"], row["date"], row["rows"], row["first"]) for row in rows]


def _writer(table: Table, place: Place) -> Work:
    schema, position = arrow_schema(table.schema), table.position
    lake, staging = str(place.lake), str(place.staging)

    def write(batches: Batches) -> Batches:
        days: dict[date, DayFile] = {}
        try:
            for batch in batches:
                for day, rows in _by_day(pa.Table.from_batches([batch]).cast(schema)):
                    if day not in days:
                        days[day] = DayFile(schema, position, Path(staging), day)
                    days[day].add(rows)
        finally:
            for one in days.values():
                one.close()
        yield _result(list(days.values()), Path(lake))

    return write


@final
class DayFile:
    """The rows of one day that one task has seen."""

    def __init__(self, schema: Schema, position: str, staging: Path, day: date) -> None:
        self.date = day.isoformat()
        self.rows = 0
        self.first = 0
        self.path = staging / f"{uuid.uuid4().hex}.parquet"
        self._position = position
        self._waiting: list[Rows] = []
        self._writer = pq.ParquetWriter(self.path, schema, compression="zstd")

    def add(self, rows: Rows) -> None:
        """Write these rows, sooner or later."""
        lowest = int(pc.min(rows[self._position]).as_py())
        self.first = lowest if not self.rows else min(self.first, lowest)
        self.rows += rows.num_rows
        self._waiting.append(rows)
        if sum(one.num_rows for one in self._waiting) >= ROW_GROUP:
            self._flush()

    def close(self) -> None:
        """Have everything on the disk."""
        self._flush()
        self._writer.close()
        with self.path.open("rb") as file:
            os.fsync(file.fileno())

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.concat_tables(self._waiting), ROW_GROUP)
            self._waiting = []


def _by_day(rows: Rows) -> Iterator[tuple[date, Rows]]:
    """The rows of each day by itself, in UTC."""
    days = pc.cast(rows["time"], pa.date32())
    found: list[date] = pc.unique(days).to_pylist()
    for day in found:
        yield day, rows if len(found) == 1 else rows.filter(pc.equal(days, pa.scalar(day)))


def _result(files: list[DayFile], lake: Path) -> Batch:
    return pa.RecordBatch.from_pydict(
        {
            "path": pa.array([one.path.relative_to(lake).as_posix() for one in files], pa.string()),
            "date": pa.array([one.date for one in files], pa.string()),
            "rows": pa.array([one.rows for one in files], pa.int64()),
            "first": pa.array([one.first for one in files], pa.int64()),
        }
    )
