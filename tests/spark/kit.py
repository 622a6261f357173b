"""What the tests of the pipeline share: journals to read, and rows to compare them with."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from pyspark.sql import DataFrame

from msgbus.journal import Kind, PayloadCodec, Record, SqliteJournal
from msgbus.journal.operations import Append
from msgbus.testing.conformance.journal.kit import TIME, make_record

T = TypeVar("T")

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def with_journal(
    path: Path,
    work: Callable[[SqliteJournal], Awaitable[T]],
    *,
    codec: PayloadCodec | None = None,
) -> T:
    """What `work` gives, done with an open journal."""

    async def main() -> T:
        async with SqliteJournal(path, reserve=0, codec=codec) as journal:
            return await work(journal)

    return asyncio.run(main())


def append(path: Path, records: Sequence[Record]) -> None:
    """Write records to a journal, which is made if it is not there."""
    with_journal(path, lambda journal: journal.commit([Append(record) for record in records]))


def records_in(path: Path) -> list[Record]:
    """Everything in a journal, as the journal itself reads it."""

    async def read(journal: SqliteJournal) -> list[Record]:
        page = await journal.find_messages(limit=1_000_000)
        return [record for record in page.records if isinstance(record, Record)]

    return with_journal(path, read)


def mixed_records(count: int) -> list[Record]:
    """Messages of all kinds; those without cause, key, session and headers come first."""
    plain = [make_record(number) for number in range(count // 2)]
    return plain + [
        _rich(number, plain[number - count // 2]) for number in range(count // 2, count)
    ]


def _rich(number: int, cause: Record) -> Record:
    return make_record(
        number,
        name=f"shop.Event{number % 5}",
        version=1 + number % 3,
        topic=f"shop.orders.{number % 7}",
        key=f"k{number % 11}" if number % 2 else None,
        kind=Kind.COMMAND if number % 3 == 0 else Kind.EVENT,
        time=TIME + number / 7,
        correlation_id=cause.message_id,
        causation_id=cause.message_id,
        root_id=cause.message_id,
        depth=1 + number % 4,
        session_id=None if number % 4 else f"s{number % 13}",
        headers={} if number % 5 else {"tenant": f"t{number % 3}", "naïve": "x'\"ü☃"},
        payload=b'{"number":%d,"text":"%s"}' % (number, "ü☃'".encode()),
    )


def timestamp(seconds: float) -> datetime:
    """A time of the journal as Spark has it: to the microsecond, halves upwards."""
    return EPOCH + timedelta(microseconds=math.floor(seconds * 1_000_000 + 0.5))


def row_of(record: Record) -> dict[str, Any]:
    """The row that a record should be."""
    return {
        "offset": record.offset,
        "message_id": record.message_id,
        "name": record.name,
        "version": record.version,
        "topic": record.topic,
        "key": record.key,
        "kind": record.kind.value,
        "time": timestamp(record.time),
        "correlation_id": record.correlation_id,
        "causation_id": record.causation_id,
        "root_id": record.root_id,
        "depth": record.depth,
        "session_id": record.session_id,
        "headers": dict(record.headers),
        "payload": record.payload.decode(),
        "_corrupt": None,
    }


def rows_of(frame: DataFrame, by: str = "offset") -> list[dict[str, Any]]:
    """The rows of a frame in order; times have the zone that Spark leaves out."""
    rows = [row.asDict(recursive=True) for row in frame.collect()]
    for row in rows:
        for name, value in row.items():
            if isinstance(value, datetime) and value.tzinfo is None:
                row[name] = value.astimezone(UTC)
    return sorted(rows, key=lambda row: row[by]) if by else rows


def offsets_of(frame: DataFrame) -> list[int]:
    """The offsets of a frame's rows, sorted; doubled ones stay doubled."""
    return sorted(row["offset"] for row in frame.select("offset").collect())


def numbers(low: int, high: int) -> list[int]:
    """From `low` to `high`, both included."""
    return list(range(low, high + 1))


def faults(expected: Iterable[Hashable], found: Iterable[Hashable]) -> dict[str, int]:
    """How many are missing, and how many are there too often."""
    wanted, given = Counter(expected), Counter(found)
    return {"lost": (wanted - given).total(), "doubled": (given - wanted).total()}


def forget_last_batch(checkpoint: Path) -> int:
    """Leave a checkpoint as if the driver had died after the work, before it was noted."""
    last = max(int(file.name) for file in checkpoint.glob("commits/[0-9]*"))
    for file in (checkpoint / "commits" / str(last), checkpoint / "commits" / f".{last}.crc"):
        file.unlink()
    return last
