"""The lake as frames: sealed files, and with them the journal's own rows behind the last one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql

from msgbus.pipeline.asked import Asked, Bound
from msgbus.pipeline.lake.folder import Lake, Segment
from msgbus.pipeline.source import NAME
from msgbus.pipeline.source.selection import where_values
from msgbus.pipeline.source.tables import MESSAGES, Table

if TYPE_CHECKING:
    from msgbus.pipeline.pipeline import Pipeline

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
    """The sealed rows of a table, from `since` on and before `until`; files outside are not read.

    Shows what was sealed when the frame was made.
    """
    folder = Lake(lake)
    asked = Asked(table, since, until, columns)
    return _sealed(spark, folder, folder.segments(table.name), asked)


class Parts(NamedTuple):
    """Where the rows are that were asked for."""

    sealed: DataFrame | None
    """Those of a lake."""
    rows: int
    """How many these are, at most."""
    tail: Mapping[str, str] | None
    """Options of the data source, for those of the journal."""


def read_all(pipe: Pipeline, asked: Asked) -> DataFrame:
    """Rows from the pipeline's lake up to its last sealed one, and from the journal behind it."""
    sealed, _, tail = parts_of(pipe, asked)
    if tail is None:
        return cast("DataFrame", sealed)
    reader = pipe.spark.read.format(NAME).options(**tail)
    if asked.columns is not None:
        reader = reader.schema(asked.table.select(asked.columns))
    live = reader.load()
    return live if sealed is None else sealed.unionByName(live)


def parts_of(pipe: Pipeline, asked: Asked) -> Parts:
    """What comes from the pipeline's lake, and what from the journal behind it."""
    folder = Lake(pipe.lake or "")
    # Looked up once: what is sealed from now on is still read from the journal.
    segments = folder.segments(asked.table.name) if pipe.lake else []
    tail = {**pipe.source, **asked.options()}
    if not segments:
        return Parts(None, 0, tail)
    start = segments[-1].last + 1
    old = _sealed(pipe.spark, folder, segments, asked)
    rows = sum(segment.rows for segment in segments if _overlaps(segment, asked))
    if isinstance(asked.until, int) and asked.until <= start:
        return Parts(old, rows, None)
    tail["start"] = str(max(start, int(tail.get("start", 0))))
    # Looked at when the query runs: another export may have let the journal be trimmed by then.
    tail["sealed"] = str(folder.sealed(MESSAGES.name))
    return Parts(old, rows, tail)


def _overlaps(segment: Segment, asked: Asked) -> bool:
    return any(_may_hold(segment, file, asked.since, asked.until) for file in segment.files)


def _sealed(
    spark: SparkSession, folder: Lake, segments: Sequence[Segment], asked: Asked
) -> DataFrame:
    schema = asked.table.select(asked.needed)
    paths = [
        str(folder.path / file)
        for segment in segments
        for file in segment.files
        if _may_hold(segment, file, asked.since, asked.until)
    ]
    if not paths:
        empty = [sql.lit(None).cast(one.dataType).alias(one.name) for one in schema.fields]
        return spark.range(0).select(*empty).select(*asked.names)
    return _filtered(spark.read.schema(schema).parquet(*paths), asked)


def _filtered(frame: DataFrame, asked: Asked) -> DataFrame:
    for condition in _conditions(asked):
        frame = frame.where(condition)
    return frame.select(*asked.names)


def _may_hold(segment: Segment, file: str, since: Bound | None, until: Bound | None) -> bool:
    day = datetime.fromisoformat(file.split("/")[1].removeprefix("date=")).replace(tzinfo=UTC)
    if isinstance(since, datetime):
        if day + timedelta(days=1) <= _in_utc(since):
            return False
    elif since is not None and segment.last < since:
        return False
    if isinstance(until, datetime):
        return day < _in_utc(until)
    return until is None or segment.first < until


def _conditions(asked: Asked) -> list[Column]:
    table, since, until = asked.table, asked.since, asked.until
    found = [_one_of(*one) for one in where_values(asked.where or {}).items()]
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
    """A constant, whatever the session's time zone."""
    return sql.timestamp_micros(sql.lit((_in_utc(time) - _EPOCH) // timedelta(microseconds=1)))


def _in_utc(time: datetime) -> datetime:
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time
