"""The lake as frames: sealed files, and with them the journal's own rows behind the last one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql

from msgbus.pipeline.columns import MESSAGES, Table
from msgbus.pipeline.lake.folder import Lake, Segment
from msgbus.pipeline.source.filters import Where, conditions, where_values

if TYPE_CHECKING:
    from msgbus.pipeline.pipeline import Pipeline

Bound: TypeAlias = int | datetime
"""An offset (of a delivery: its id), or a time; one without a zone counts as UTC."""

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


def read_all(pipe: Pipeline, asked: Asked) -> DataFrame:
    """Rows from the pipeline's lake up to its last sealed one, and from the journal behind it."""
    folder = Lake(pipe.lake or "")
    # Looked up once: what is sealed from now on is still read from the journal.
    segments = folder.segments(asked.table.name) if pipe.lake else []
    sealed = segments[-1].last if segments else 0
    if not sealed:
        return pipe.journal(
            asked.table,
            since=asked.since,
            until=asked.until,
            columns=asked.columns,
            where=asked.where,
        )
    old = _sealed(pipe.spark, folder, segments, asked)
    start = sealed + 1 if isinstance(asked.since, datetime) else max(asked.since or 0, sealed + 1)
    until = None if isinstance(asked.until, datetime) else asked.until
    if until is not None and until <= start:
        return old
    new = pipe.journal(
        asked.table,
        since=start,
        until=until,
        columns=asked.needed,
        where=asked.where,
        # Looked at when the query runs: another export may have let the journal be trimmed by then.
        sealed=folder.sealed(MESSAGES.name),
    )
    return old.unionByName(_filtered(new, asked))


class Asked(NamedTuple):
    """Which rows and columns of a table are wanted."""

    table: Table
    since: Bound | None = None
    until: Bound | None = None
    columns: Sequence[str] | None = None
    where: Where | None = None

    @property
    def names(self) -> list[str]:
        """The columns to give."""
        return list(self.table.columns if self.columns is None else self.columns)

    @property
    def needed(self) -> list[str]:
        """The columns to read: those that only the conditions need come last."""
        bounds = [one for one in (self.since, self.until) if one is not None]
        used = {"time" if isinstance(one, datetime) else self.table.position for one in bounds}
        used.update(self.where or ())
        return [*self.names, *sorted(used - set(self.names))]


def _sealed(
    spark: SparkSession, folder: Lake, segments: Sequence[Segment], asked: Asked
) -> DataFrame:
    conditions(asked.table, where=asked.where)  # says what is wrong with it
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
