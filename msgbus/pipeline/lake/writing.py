"""Writing Parquet where the rows are: on Spark's workers, through Arrow.

Not with Spark's own writer: that takes the form of timestamps from the session's settings, which
are the user's, and says too late what files it made.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from pyspark.sql import DataFrame, Row

from msgbus.pipeline.arrow import Batch, Schema, arrow_schema, pa
from msgbus.pipeline.columns import Table
from msgbus.pipeline.lake.folder import Staged

ROW_GROUP: Final = 100_000
"""Rows that a reader may skip together."""

_RESULT: Final = "path string, date string, rows long, first long"

pc: Any = import_module("pyarrow.compute")
pq: Any = import_module("pyarrow.parquet")

Rows: TypeAlias = Any
"""A `pyarrow.Table`."""

Write: TypeAlias = Callable[[Iterator[Batch]], Iterator[Batch]]


def stage(frame: DataFrame, table: Table, lake: Path, staging: Path) -> list[Staged]:
    """Write the rows of a frame as files into `staging`, one per task and day; gives them.

    A task that is repeated writes other files. Those of its first try are not among the result.
    """
    write = _writer(arrow_schema(table.schema), table.position, str(lake), str(staging))
    chosen: Any = frame.select(*table.columns)  # Spark's own type of mapInArrow is half known
    rows: list[Row] = chosen.mapInArrow(write, _RESULT).collect()
    return [Staged(row["path"], row["date"], row["rows"], row["first"]) for row in rows]


def _writer(schema: Schema, position: str, lake: str, staging: str) -> Write:
    def write(batches: Iterator[Batch]) -> Iterator[Batch]:
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
