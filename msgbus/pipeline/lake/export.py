"""Exporting a journal to a lake: what is new, in ranges, each sealed at a stroke."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, final

from pyspark.sql import DataFrame
from pyspark.sql import functions as sql

from msgbus.errors import WrongLakeError
from msgbus.pipeline.arrow import Batch
from msgbus.pipeline.lake.folder import Lake, Segment, Staged
from msgbus.pipeline.lake.writing import Place, stage, stage_ranges
from msgbus.pipeline.source.journal_file import batches
from msgbus.pipeline.source.options import ReadOptions
from msgbus.pipeline.source.ranges import Bounds, Range, bounds_of, reading, split
from msgbus.pipeline.source.reader import check_sealed, query_of
from msgbus.pipeline.source.tables import DELIVERIES, MESSAGES, Table

if TYPE_CHECKING:
    from msgbus.pipeline.pipeline import Pipeline

SEGMENT: Final = 2_000_000
"""Offsets of one sealed range: what an export that is broken off has to do again, at most."""


class Frames(NamedTuple):
    """Tables to export that come from somewhere else than a journal of this machine."""

    messages: DataFrame
    deliveries: DataFrame


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export has added to the lake."""

    messages: int
    """Rows."""

    deliveries: int
    """Rows."""

    files: int
    """Parquet files."""

    sealed: int
    """The last offset that the lake holds, from this or an earlier export."""

    missing: tuple[tuple[int, int], ...] = ()
    """Offsets, from and to, that were trimmed from the journal before they could be exported."""


class Origin(Protocol):
    """Where rows come from."""

    def bounds(self, table: Table) -> Bounds:
        """What there is now."""
        ...

    def stage(self, table: Table, span: tuple[int, int], sealed: int, place: Place) -> list[Staged]:
        """Files of all rows from one position to another; messages up to `sealed` may be gone."""
        ...

    def message_id(self, offset: int) -> str | None:
        """The id of the message at an offset, if it is there."""
        ...


def export(
    source: Pipeline | Frames,
    lake: str | os.PathLike[str],
    *,
    segment: int = SEGMENT,
    on_sealed: Callable[[Segment], object] | None = None,
) -> ExportReport:
    """Add to the lake what it does not have yet, and return when all of it is sealed.

    Rows that come in meanwhile are left to the next export. If this one is broken off, at
    whatever moment, the next one goes on from the last range that was sealed; no row is ever in
    the lake twice. Only one export of a lake runs at a time.

    Args:
        source: A pipeline, or frames with the columns of one.
        lake: Its folder, which is made if it is not there. Workers must see it as well.
        segment: Offsets of one sealed range.
        on_sealed: Called after each range.

    Raises:
        LakeBusyError: Another export is running.
        WrongLakeError: It holds the messages of another journal.
        LakeDamagedError: Its manifest cannot be read.
        TrimmedError: The journal was trimmed while it was read; export again.
    """
    folder = Lake(lake)
    origin: Origin = _Given(source) if isinstance(source, Frames) else _Live(source)
    made: list[Segment] = []
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
    """The offset before which the journal may be trimmed, as the lake has everything of it.

    For `await journal.trim(before=...)`. Messages whose deliveries are not all sealed stay: they
    would go with them. What a cursor has not passed stays in any case.
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
    folder: Lake, origin: Origin, table: Table, span: tuple[int, int], staging: Path
) -> Segment:
    first, last = span
    sealed = first - 1 if table is MESSAGES else folder.sealed(MESSAGES.name)
    staged = origin.stage(table, span, sealed, Place(folder.path, staging))
    anchor = origin.message_id(last) if table is MESSAGES else None
    return folder.seal(Segment(table.name, first, last, 0, (), anchor), staged)


def _check_identity(folder: Lake, origin: Origin) -> None:
    """Raise if the lake was filled from another journal; by the last message that both have."""
    segments = folder.segments(MESSAGES.name)
    if not segments:
        return
    last = segments[-1]
    found = origin.message_id(last.last)
    is_shorter = origin.bounds(MESSAGES).last < last.last
    is_other = last.anchor is not None and found is not None and found != last.anchor
    if is_shorter or is_other:
        raise WrongLakeError(path=str(folder.path), offset=last.last)


def _report(folder: Lake, made: list[Segment], missing: list[tuple[int, int]]) -> ExportReport:
    rows = {table.name: 0 for table in (MESSAGES, DELIVERIES)}
    for one in made:
        rows[one.table] += one.rows
    return ExportReport(
        messages=rows[MESSAGES.name],
        deliveries=rows[DELIVERIES.name],
        files=sum(len(one.files) for one in made),
        sealed=folder.sealed(MESSAGES.name),
        missing=tuple(missing),
    )


@final
class _Live:
    """A journal's file."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe

    def bounds(self, table: Table) -> Bounds:
        return bounds_of(self._pipe.path, table)

    def stage(self, table: Table, span: tuple[int, int], sealed: int, place: Place) -> list[Staged]:
        check_sealed(self._pipe.path, sealed)
        options = ReadOptions(path=self._pipe.path, table=table, codec=self._pipe.codec)
        columns = tuple(table.columns)

        def read(part: Range) -> Iterator[Batch]:
            return batches(query_of(options, columns, part), options.engine)

        return stage_ranges(self._pipe.spark, read, split(*span), table, place)

    def message_id(self, offset: int) -> str | None:
        with reading(self._pipe.path) as connection:
            row = connection.execute(
                "SELECT message_id FROM msgbus_messages WHERE offset = ?", (offset,)
            ).fetchone()
        return None if row is None else str(row[0])


@final
class _Given:
    """Frames of any origin; what they hold is found by looking through them."""

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
        place: Place,
    ) -> list[Staged]:
        rows = self._frames[table.name].where(sql.col(table.position).between(*span))
        return stage(rows, table, place)

    def message_id(self, offset: int) -> str | None:
        frame = self._frames[MESSAGES.name].where(sql.col("offset") == offset)
        rows = frame.select("message_id").collect()
        return str(rows[0][0]) if rows else None
