"""Read the lake: its sealed files, and the journal's rows after them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from pyspark.sql import Column, DataFrame, SparkSession, functions as sql

from msgbus.pipeline.lake.folder import Lake, SealedSegment
from msgbus.pipeline.source.selection import UNKNOWN, Bound, RowSelection
from msgbus.pipeline.source.tables import MESSAGES, Table

if TYPE_CHECKING:
    from msgbus.pipeline.pipeline import Pipeline

_VERIFY: Final = ("parquet.page.verify-checksum.enabled", "true")
"""Without it, Spark takes a damaged page for data, if that can be unpacked."""

LEFT_OUT: Final = "The record was damaged or missing when it was to be sealed."

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def read_lake(
    spark: SparkSession,
    lake: str | os.PathLike[str],
    table: Table = MESSAGES,
    *,
    since: Bound | None = None,
    until: Bound | None = None,
    columns: Sequence[str] | None = None,
) -> DataFrame:
    """The sealed rows of a table, from `since` on and before `until`; other files are not read.

    The frame shows what was sealed when it was made.
    """
    folder = Lake(lake)
    selection = RowSelection(table, since, until, columns)
    return _sealed(spark, folder, folder.segments(table.name), selection)


class Parts(NamedTuple):
    """Where the selected rows are."""

    sealed: DataFrame | None
    """Rows of the lake."""
    rows: int
    """How many sealed rows there are, at most."""
    tail: Mapping[str, str] | None
    """Options of the data source, for the rows of the journal."""


def read_all(pipe: Pipeline, selection: RowSelection) -> DataFrame:
    """Rows of the lake, and of the journal after the last sealed one."""
    sealed, _, tail = parts_of(pipe, selection)
    if tail is None:
        return cast("DataFrame", sealed)
    live = selection.load(pipe.spark.read, tail)
    return live if sealed is None else sealed.unionByName(live)


def parts_of(pipe: Pipeline, selection: RowSelection) -> Parts:
    """Split a selection into rows of the lake and rows of the journal after it."""
    folder = Lake(pipe.lake or "")
    # Looked up once: rows sealed from now on are still read from the journal.
    segments = folder.segments(selection.table.name) if pipe.lake else []
    tail = {**pipe.source, **selection.options()}
    if not segments:
        return Parts(None, 0, tail)
    start = segments[-1].last + 1
    old = _sealed(pipe.spark, folder, segments, selection)
    rows = sum(segment.rows for segment in segments if _overlaps(segment, selection))
    if isinstance(selection.until, int) and selection.until <= start:
        return Parts(old, rows, None)
    tail["start"] = str(max(start, int(tail.get("start", 0))))
    # Checked when the query runs: the journal may have been trimmed after another export.
    tail["sealed"] = str(folder.sealed(MESSAGES.name))
    return Parts(old, rows, tail)


def _overlaps(segment: SealedSegment, selection: RowSelection) -> bool:
    return any(_may_hold(segment, file, selection.since, selection.until) for file in segment.files)


def _sealed(
    spark: SparkSession, folder: Lake, segments: Sequence[SealedSegment], selection: RowSelection
) -> DataFrame:
    schema = selection.table.select(selection.needed)
    paths = [
        str(folder.path / file)
        for segment in segments
        for file in segment.files
        if _may_hold(segment, file, selection.since, selection.until)
    ]
    left_out = _left_out(spark, segments, selection)
    if not paths:
        return left_out
    sealed = _filtered(spark.read.schema(schema).option(*_VERIFY).parquet(*paths), selection)
    has_left_out = any(segment.damaged for segment in segments)
    return sealed.unionAll(left_out) if has_left_out else sealed


def _left_out(
    spark: SparkSession, segments: Sequence[SealedSegment], selection: RowSelection
) -> DataFrame:
    """Rows that an export has left out, as the journal shows them."""
    table, positions = selection.table, list[int]()
    if UNKNOWN.keys() >= (selection.where or {}).keys():
        damaged = (position for segment in segments for position in segment.damaged)
        positions = [position for position in damaged if _is_between(position, selection)]
    known = sql.split(sql.lit(",".join(map(str, positions or [0]))), ",").cast("array<bigint>")
    position = sql.explode(known).alias(table.position)
    columns = {one.name: sql.lit(None).cast(one.dataType) for one in table.schema.fields}
    columns |= {table.position: sql.col(table.position), "_corrupt": sql.lit(LEFT_OUT)}
    rows = spark.range(1 if positions else 0).select(position)
    return rows.select(*(columns[name].alias(name) for name in selection.names))


def _is_between(position: int, selection: RowSelection) -> bool:
    """Tell whether a row of which only its position is known may be among those selected."""
    since, until = selection.since, selection.until
    if isinstance(since, int) and position < since:
        return False
    return not isinstance(until, int) or position < until


def _filtered(frame: DataFrame, selection: RowSelection) -> DataFrame:
    for condition in _conditions(selection):
        frame = frame.where(condition)
    return frame.select(*selection.names)


def _may_hold(segment: SealedSegment, file: str, since: Bound | None, until: Bound | None) -> bool:
    day = datetime.fromisoformat(file.split("/")[1].removeprefix("date=")).replace(tzinfo=UTC)
    if isinstance(since, datetime):
        if day + timedelta(days=1) <= _in_utc(since):
            return False
    elif since is not None and segment.last < since:
        return False
    if isinstance(until, datetime):
        return day < _in_utc(until)
    return until is None or segment.first < until


def _conditions(selection: RowSelection) -> list[Column]:
    table, since, until = selection.table, selection.since, selection.until
    found = [_one_of(*one) for one in selection.conditions.items()]
    if isinstance(since, datetime):
        found.append(sql.col("time") >= _moment(since))
    elif since is not None:
        found.append(sql.col(table.position) >= since)
    if isinstance(until, datetime):
        found.append(sql.col("time") < _moment(until))
    elif until is not None:
        found.append(sql.col(table.position) < until)
    return found


def _one_of(name: str, values: list[Any]) -> Column:
    column = sql.col(name)
    known = column.isin([value for value in values if value is not None])
    return known | column.isNull() if None in values else known


def _moment(time: datetime) -> Column:
    """A literal that does not depend on the session's time zone."""
    return sql.timestamp_micros(sql.lit((_in_utc(time) - _EPOCH) // timedelta(microseconds=1)))


def _in_utc(time: datetime) -> datetime:
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time
