"""The lake as frames: sealed files, and the journal's own rows behind them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql

from msgbus.pipeline.columns import MESSAGES, Table
from msgbus.pipeline.lake.folder import Lake, Segment

Bound: TypeAlias = int | datetime

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
    names = list(table.columns) if columns is None else list(columns)
    needed = table.select([*names, *_also(table, names, since, until)])
    paths = [
        str(folder.path / file)
        for segment in folder.segments(table.name)
        for file in segment.files
        if _may_hold(segment, file, since, until)
    ]
    if not paths:
        empty = [sql.lit(None).cast(needed[name].dataType).alias(name) for name in names]
        return spark.range(0).select(*empty)
    frame = spark.read.schema(needed).parquet(*paths)
    for condition in _conditions(table, since, until):
        frame = frame.where(condition)
    return frame.select(*names)


def _also(
    table: Table, names: Sequence[str], since: Bound | None, until: Bound | None
) -> list[str]:
    """Columns that only the bounds need."""
    bounds = [one for one in (since, until) if one is not None]
    used = {"time" if isinstance(one, datetime) else table.position for one in bounds}
    return sorted(used - set(names))


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


def _conditions(table: Table, since: Bound | None, until: Bound | None) -> list[Column]:
    found: list[Column] = []
    if isinstance(since, datetime):
        found.append(sql.col("time") >= _moment(since))
    elif since is not None:
        found.append(sql.col(table.position) >= since)
    if isinstance(until, datetime):
        found.append(sql.col("time") < _moment(until))
    elif until is not None:
        found.append(sql.col(table.position) < until)
    return found


def _moment(time: datetime) -> Column:
    """A constant, whatever the session's time zone."""
    return sql.timestamp_micros(sql.lit((_in_utc(time) - _EPOCH) // timedelta(microseconds=1)))


def _in_utc(time: datetime) -> datetime:
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time
