"""Export new rows of a journal to a lake, in ranges that are sealed one by one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, final

from pyspark.sql import DataFrame, Row, SparkSession, functions as sql

from msgbus.errors import WrongLakeError
from msgbus.journal.records import Kind
from msgbus.journal.sqlite.schema import check_codec
from msgbus.pipeline.arrow import (
    Batch,
    Batches,
    BatchFunction,
    Schema,
    arrow_schema,
    in_tasks,
    mapped,
    pa,
)
from msgbus.pipeline.lake.folder import Lake, SealedSegment, StagedFile
from msgbus.pipeline.source.journal_file import Bounds, Range, batches, bounds_of, reading, split
from msgbus.pipeline.source.options import ReadOptions, payload_codec
from msgbus.pipeline.source.source import check_sealed, query_of
from msgbus.pipeline.source.tables import DELIVERIES, MESSAGES, Table
from msgbus.runtime.private_files import PRIVATE, open_private, permissions_of
from msgbus.telemetry.logging import log

if TYPE_CHECKING:
    from msgbus.pipeline.pipeline import Pipeline


SEGMENT: Final = 2_000_000
"""Offsets per sealed range: an interrupted export repeats at most one."""


class Frames(NamedTuple):
    """Tables to export, instead of a journal on this machine."""

    messages: DataFrame
    deliveries: DataFrame


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export has added to the lake: rows and Parquet files."""

    messages: int
    deliveries: int
    files: int
    sealed: int
    """The last offset that the lake holds."""
    missing: tuple[tuple[int, int], ...] = ()
    """Offsets, from and to, that were trimmed from the journal before they could be exported."""
    damaged: tuple[int, ...] = ()
    """Offsets of messages that are damaged or missing: they are left out, and are in no file."""
    damaged_deliveries: tuple[int, ...] = ()
    """Ids of deliveries that are damaged, likewise."""


def export(
    source: Pipeline | Frames,
    lake: str | os.PathLike[str],
    *,
    segment: int = SEGMENT,
    on_sealed: Callable[[SealedSegment], object] | None = None,
) -> ExportReport:
    """Add to the lake what it does not have yet, and return when all of it is sealed.

    Rows that come meanwhile are left to the next export. After an interruption at any moment, the
    next export goes on from the last sealed range; no row is ever in the lake twice. Only one
    export to a lake runs at a time.

    No row is sealed whose checksum does not fit: it stays in the journal, the report and the
    manifest name it, and readers of the lake see it as they see it in the journal.

    Args:
        source: A pipeline, or frames with its columns.
        lake: Its folder, created if missing. Workers must see it too.
        segment: Offsets per sealed range.
        on_sealed: Called after each range.

    Raises:
        LakeBusyError: Another export is running.
        WrongLakeError: It holds the messages of another journal.
        LakeDamagedError: Its manifest cannot be read.
        TrimmedError: The journal was trimmed while it was read; export again.
    """
    origin = _FramesOrigin(source) if isinstance(source, Frames) else _JournalOrigin(source)
    folder = Lake(lake, origin.permissions)
    made: list[SealedSegment] = []
    missing: list[tuple[int, int]] = []
    with folder.exporting() as staging:
        _check_identity(folder, origin)
        for table in (MESSAGES, DELIVERIES):
            bounds = origin.bounds(table)
            start = folder.sealed(table.name) + 1
            if 1 < start <= bounds.trimmed:
                missing.append((start, bounds.trimmed))
            for first, last in _ranges(max(start, bounds.first), bounds.last, segment):
                sealed = _seal(folder, origin, table, (first, last), staging)
                made.append(sealed)
                if on_sealed is not None:
                    on_sealed(sealed)
    return _report(folder, made, missing)


def trimmable(pipe: Pipeline, lake: str | os.PathLike[str]) -> int:
    """The offset before which the journal may be trimmed: the lake has everything below it.

    For `await journal.trim(before=...)`. Messages with deliveries that are not sealed stay, as
    trimming would remove those too.
    """
    folder = Lake(lake)
    end = folder.sealed(MESSAGES.name) + 1
    with reading(pipe.path) as connection:
        (open_,) = connection.execute(
            "SELECT min(m.offset) FROM msgbus_deliveries d "
            "JOIN msgbus_messages m ON m.message_id = d.message_id WHERE d.id > ?",
            (folder.sealed(DELIVERIES.name),),
        ).fetchone()
    return end if open_ is None else min(end, int(open_))


def _ranges(first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
    while first <= last:
        end = min(first + size - 1, last)
        yield first, end
        first = end + 1


def _seal(
    folder: Lake,
    origin: _JournalOrigin | _FramesOrigin,
    table: Table,
    span: tuple[int, int],
    staging: Path,
) -> SealedSegment:
    first, last = span
    sealed = first - 1 if table is MESSAGES else folder.sealed(MESSAGES.name)
    staged, damaged = origin.stage(
        table, span, sealed, LakePaths(folder.path, staging, folder.permissions)
    )
    if damaged:
        log.warning("lake_left_out", lake=str(folder.path), table=table.name, damaged=damaged[:10])
    anchor = origin.message_id(last) if table is MESSAGES else None
    segment = SealedSegment(table.name, first, last, 0, (), anchor, tuple(damaged))
    return folder.seal(segment, staged)


def _check_identity(folder: Lake, origin: _JournalOrigin | _FramesOrigin) -> None:
    """Raise if the lake was filled from another journal, by the last sealed message."""
    segments = folder.segments(MESSAGES.name)
    if not segments:
        return
    last = segments[-1]
    found = origin.message_id(last.last)
    is_shorter = origin.bounds(MESSAGES).last < last.last
    is_other = last.anchor is not None and found is not None and found != last.anchor
    if is_shorter or is_other:
        raise WrongLakeError(path=str(folder.path), offset=last.last)


def _report(
    folder: Lake, made: list[SealedSegment], missing: list[tuple[int, int]]
) -> ExportReport:
    rows = {table.name: 0 for table in (MESSAGES, DELIVERIES)}
    for one in made:
        rows[one.table] += one.rows
    return ExportReport(
        messages=rows[MESSAGES.name],
        deliveries=rows[DELIVERIES.name],
        files=sum(len(one.files) for one in made),
        sealed=folder.sealed(MESSAGES.name),
        missing=tuple(missing),
        damaged=_damaged(made, MESSAGES),
        damaged_deliveries=_damaged(made, DELIVERIES),
    )


def _damaged(made: list[SealedSegment], table: Table) -> tuple[int, ...]:
    return tuple(one for segment in made if segment.table == table.name for one in segment.damaged)


@final
class _JournalOrigin:
    """Rows of a journal."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self.permissions = permissions_of(pipe.path)
        self._journal = ""

    def bounds(self, table: Table) -> Bounds:
        # Without the codec of the journal, what it has encoded would be sealed as corrupt.
        with reading(self._pipe.path) as connection:
            check_codec(connection, self._pipe.path, payload_codec(self._pipe.codec))
        found = bounds_of(self._pipe.path, table)
        self._journal = found.journal
        return found

    def stage(self, table: Table, span: tuple[int, int], sealed: int, paths: LakePaths) -> Staged:
        check_sealed(self._pipe.path, sealed)
        # All kinds: what is sealed may be trimmed, control records too.
        where = {"kind": list(map(str, Kind))} if table is MESSAGES else None
        options = ReadOptions(
            path=self._pipe.path, table=table, codec=self._pipe.codec, where=where
        )
        columns = tuple(table.columns)

        def read(part: Range) -> Iterator[Batch]:
            return batches(query_of(options, columns, part), options.engine)

        return stage_ranges(
            self._pipe.spark, read, split(*span, journal=self._journal), table, paths
        )

    def message_id(self, offset: int) -> str | None:
        with reading(self._pipe.path) as connection:
            row = connection.execute(
                "SELECT message_id FROM msgbus_messages WHERE offset = ?", (offset,)
            ).fetchone()
        return None if row is None else str(row[0])


@final
class _FramesOrigin:
    """Rows of frames."""

    permissions = PRIVATE

    def __init__(self, frames: Frames) -> None:
        self._frames = {MESSAGES.name: frames.messages, DELIVERIES.name: frames.deliveries}

    def bounds(self, table: Table) -> Bounds:
        position = sql.col(table.position)
        row = self._frames[table.name].agg(sql.min(position), sql.max(position)).collect()[0]
        return Bounds(1, 0, 0) if row[0] is None else Bounds(int(row[0]), int(row[1]), 0)

    def stage(
        self,
        table: Table,
        span: tuple[int, int],
        sealed: int,  # noqa: ARG002
        paths: LakePaths,
    ) -> Staged:
        rows = self._frames[table.name].where(sql.col(table.position).between(*span))
        return stage(rows, table, paths)

    def message_id(self, offset: int) -> str | None:
        frame = self._frames[MESSAGES.name].where(sql.col("offset") == offset)
        rows = frame.select("message_id").collect()
        return str(rows[0][0]) if rows else None


ROW_GROUP: Final = 100_000
"""Rows per row group."""

_RESULT: Final = "path string, date string, rows long, first long"

pc: Any = import_module("pyarrow.compute")
pq: Any = import_module("pyarrow.parquet")

Rows: TypeAlias = Any
"""A `pyarrow.Table`."""


class LakePaths(NamedTuple):
    """Where files are staged."""

    lake: Path
    staging: Path
    permissions: int = PRIVATE


class Staged(NamedTuple):
    """What the tasks have written, and what they have left out."""

    files: list[StagedFile]
    damaged: list[int]
    """Offsets or ids of rows that are damaged or missing, in order."""


def stage(frame: DataFrame, table: Table, paths: LakePaths) -> Staged:
    """Write the sound rows of a frame to files in the staging folder, one per task and day.

    A repeated task writes new files; those of its first attempt are not in the result.
    """
    return _staged(mapped(frame.select(*table.columns), _writer(table, paths), _RESULT))


def stage_ranges(
    spark: SparkSession,
    read: Callable[[Range], Batches],
    ranges: Sequence[Range],
    table: Table,
    paths: LakePaths,
) -> Staged:
    """The same for ranges that tasks read themselves."""
    return _staged(in_tasks(spark, read, ranges, _writer(table, paths), _RESULT))


def _staged(frame: DataFrame) -> Staged:
    rows: list[Row] = frame.collect()
    files = [row for row in rows if row["path"] is not None]
    return Staged(
        [StagedFile(row["path"], row["date"], row["rows"], row["first"]) for row in files],
        sorted(row["first"] for row in rows if row["path"] is None),
    )


def _writer(table: Table, paths: LakePaths) -> BatchFunction:
    # Not Spark's own writer: it takes the form of timestamps from the session's settings, which
    # are the user's, and reports too late which files it wrote.
    schema, position = arrow_schema(table.schema), table.position
    lake, staging, permissions = str(paths.lake), str(paths.staging), paths.permissions

    def write(batches: Batches) -> Batches:
        days: dict[date, DayFile] = {}
        damaged: list[int] = []
        try:
            for batch in batches:
                is_sound = pc.is_valid(batch.column("message_id"))
                damaged += batch.column(position).filter(pc.invert(is_sound)).to_pylist()
                sound = pa.Table.from_batches([batch]).filter(is_sound)
                for day, rows in _by_day(sound.cast(schema)):
                    if day not in days:
                        days[day] = DayFile(schema, position, Path(staging), day, permissions)
                    days[day].add(rows)
        finally:
            for one in days.values():
                one.close()
        yield _result(list(days.values()), damaged, Path(lake))

    return write


@final
class DayFile:
    """Writes the rows of one task and one day."""

    def __init__(
        self,
        schema: Schema,
        position: str,
        staging: Path,
        day: date,
        permissions: int = PRIVATE,
    ) -> None:
        self.date = day.isoformat()
        self.rows = 0
        self.first = 0
        self.path = staging / f"{uuid.uuid4().hex}.parquet"
        self._position = position
        self._waiting: list[Rows] = []
        self._file = open_private(self.path, "xb", permissions)
        self._writer = pq.ParquetWriter(
            self._file, schema, compression="zstd", write_page_checksum=True
        )

    def add(self, rows: Rows) -> None:
        """Write these rows, now or on `close`."""
        lowest = int(pc.min(rows[self._position]).as_py())
        self.first = lowest if not self.rows else min(self.first, lowest)
        self.rows += rows.num_rows
        self._waiting.append(rows)
        if sum(one.num_rows for one in self._waiting) >= ROW_GROUP:
            self._flush()

    def close(self) -> None:
        """Write the rest, and flush to disk."""
        self._flush()
        self._writer.close()
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.concat_tables(self._waiting), ROW_GROUP)
            self._waiting = []


def _by_day(rows: Rows) -> Iterator[tuple[date, Rows]]:
    """Rows by day in UTC."""
    days = pc.cast(rows["time"], pa.date32())
    found: list[date] = pc.unique(days).to_pylist()
    for day in found:
        yield day, rows if len(found) == 1 else rows.filter(pc.equal(days, pa.scalar(day)))


def _result(files: list[DayFile], damaged: list[int], lake: Path) -> Batch:
    """One row for each file, and one without a path for each row that was left out."""
    rows: list[tuple[str | None, str | None, int, int]] = [
        (one.path.relative_to(lake).as_posix(), one.date, one.rows, one.first) for one in files
    ]
    rows += [(None, None, 0, position) for position in damaged]
    paths, dates, counts, first = zip(*rows, strict=True) if rows else ((), (), (), ())
    return pa.RecordBatch.from_pydict(
        {
            "path": pa.array(paths, pa.string()),
            "date": pa.array(dates, pa.string()),
            "rows": pa.array(counts, pa.int64()),
            "first": pa.array(first, pa.int64()),
        }
    )
