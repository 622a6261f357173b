"""What a codec has made, as the data source reads it; no JVM is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from msgbus.errors import JournalOpenError, PipelineError
from msgbus.journal import DeliveryRecord, Outcome, SqliteJournal
from msgbus.journal.operations import Append, Note
from msgbus.pipeline.runs import move_cursor
from msgbus.pipeline.source.journal_file import DAMAGED, REFUSED, Range, batches
from msgbus.pipeline.source.options import ReadOptions, WriteOptions
from msgbus.pipeline.source.source import JournalReader, JournalStreamReader, query_of
from msgbus.pipeline.source.tables import DELIVERIES, MESSAGES, Table
from msgbus.pipeline.source.writer import StagedRows, load, stage
from msgbus.testing.conformance.journal.kit import TIME, make_record
from tests.spark.kit import append, with_journal
from tests.unit.journal.sqlite.files import change
from tests.unit.journal.sqlite.sealing import CODEC, rewrite, sealing
from tests.unit.pipeline.test_checksums import ENGINES, without

OTHER: Final = CODEC.replace(":sealing", ":other")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Four messages, every other one with headers, and four deliveries with errors."""
    path = tmp_path / "shop.db"
    records = [
        make_record(n, message_id=f"m{n}", headers={"token": f"t{n}"} if n % 2 else {})
        for n in range(4)
    ]
    deliveries = [
        DeliveryRecord(f"m{n}", "ship", 1, Outcome.FAILED, 0.5, 0.1, TIME + n, f"E: {n}", n + 1)
        for n in range(4)
    ]
    operations: list[Any] = [*map(Append, records), *map(Note, deliveries)]
    with_journal(path, lambda journal: journal.commit(operations), codec=sealing)
    return path


def rows(
    path: Path,
    engine: str,
    table: Table = MESSAGES,
    *columns: str,
    codec: str | None = CODEC,
    **options: Any,
) -> list[dict[str, Any]]:
    read = ReadOptions(path=str(path), table=table, codec=codec, **options)
    query = query_of(read, columns or tuple(table.columns), Range(1, 99))
    found = [row for one in batches(query, engine) for row in one.to_pylist()]
    return sorted(found, key=lambda row: row[table.position])


def swap(path: Path, table: str, column: str) -> None:
    """Give the second row what the fourth has, with a checksum that fits."""
    key = "offset" if table == "messages" else "id"
    value = f"(SELECT {column} FROM msgbus_{table} WHERE {key} = 4)"
    rewrite(path, table, f"{column} = {value}", f"{key} = 2")


@pytest.mark.parametrize("engine", ENGINES)
def test_payloads_headers_and_errors_are_read_with_the_codec(path: Path, engine: str) -> None:
    found = rows(path, engine)

    assert [row["payload"] for row in found] == [f'{{"number":{n}}}' for n in range(4)]
    assert [dict(row["headers"]) for row in found] == [{}, {"token": "t1"}, {}, {"token": "t3"}]
    assert [row["error"] for row in rows(path, engine, DELIVERIES)] == [f"E: {n}" for n in range(4)]
    assert [dict(row["headers"]) for row in rows(path, engine, MESSAGES, "offset", "headers")][
        3
    ] == {"token": "t3"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("column", ["payload", "headers"])
def test_what_was_moved_has_its_offset_only(path: Path, engine: str, column: str) -> None:
    before = rows(path, engine)
    swap(path, "messages", column)

    assert rows(path, engine) == [before[0], without(MESSAGES, 2, REFUSED), *before[2:]]
    assert rows(path, engine, where={"name": ["shop.Other"]}) == []
    # Who does not ask for what is encoded need not have the codec.
    assert [row["name"] for row in rows(path, engine, MESSAGES, "offset", "name")] == [
        "shop.OrderPlaced"
    ] * 4


@pytest.mark.parametrize("engine", ENGINES)
def test_the_error_of_another_delivery_is_refused(path: Path, engine: str) -> None:
    before = rows(path, engine, DELIVERIES)
    swap(path, "deliveries", "error")

    assert rows(path, engine, DELIVERIES) == [
        before[0],
        without(DELIVERIES, 2, REFUSED),
        *before[2:],
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_damage_and_what_the_codec_refuses_are_told_apart(path: Path, engine: str) -> None:
    swap(path, "messages", "payload")
    change(path, "UPDATE msgbus_messages SET name = 'x' WHERE offset = 3")

    assert [row["_corrupt"] for row in rows(path, engine)] == [None, REFUSED, DAMAGED, None]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_payload_that_is_no_json_is_shown_as_it_was(tmp_path: Path, engine: str) -> None:
    record = make_record(payload=b"no \xff JSON")
    with_journal(tmp_path / "a.db", lambda journal: journal.commit([Append(record)]), codec=sealing)

    (row,) = rows(tmp_path / "a.db", engine)

    assert (row["payload"], row["_corrupt"]) == (None, r"no \xff JSON")


def test_another_codec_is_refused_before_anything_is_read(path: Path) -> None:
    options = ReadOptions(path=str(path), codec=OTHER)

    with pytest.raises(JournalOpenError, match="another key"):
        JournalReader(options, MESSAGES.schema).partitions()
    with pytest.raises(JournalOpenError, match="another key"):
        JournalStreamReader(options, MESSAGES.schema).initialOffset()


def test_what_is_written_goes_through_it_headers_included(path: Path) -> None:
    options = WriteOptions(path=str(path), name="shop.OrderPaid", codec=CODEC)
    staged = staged_headers(path.parent)

    assert load(options, [staged], None)

    assert b"s3cret" not in path.read_bytes()
    assert dict(rows(path, "sqlite3")[-1]["headers"]) == {"token": "s3cret"}
    with pytest.raises(JournalOpenError, match="made with a codec"):
        load(WriteOptions(path=str(path), name="x"), [staged_headers(path.parent)], None)


def staged_headers(folder: Path) -> StagedRows:
    arrow: Any = pytest.importorskip("pyarrow")
    headers = arrow.array([[("token", "s3cret")]], arrow.map_(arrow.string(), arrow.string()))
    batch = arrow.RecordBatch.from_arrays([headers], names=["headers"])
    return stage(str(folder / "staging"), iter([batch]))


def test_a_cursor_of_spark_is_moved_with_the_codec(path: Path) -> None:
    move_cursor(str(path), "pipeline.totals", 2, codec=CODEC)

    found = with_journal(path, SqliteJournal.cursors, codec=sealing)
    assert [(one.name, one.acked) for one in found] == [("pipeline.totals", 2)]


# -- another journal in its place ------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_journal_that_was_replaced_is_not_read_as_one_with_the_first(
    tmp_path: Path, engine: str
) -> None:
    path = tmp_path / "shop.db"
    append(path, [make_record(n) for n in range(9)])
    options = ReadOptions(path=str(path), engine=engine, partitions=2)
    reader = JournalReader(options, MESSAGES.schema)
    one, two = reader.partitions()
    assert sum(batch.num_rows for batch in reader.read(one)) == 5
    path.unlink()
    append(path, [make_record(n) for n in range(9)])

    with pytest.raises(PipelineError, match="was replaced by another one while it was read"):
        list(reader.read(two))

    assert [one.low for one in reader.partitions()] == [1, 6]  # a new read is one of the new file


def test_a_stream_does_not_go_on_in_another_journal(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    append(path, [make_record(n) for n in range(3)])
    stream = JournalStreamReader(ReadOptions(path=str(path)), MESSAGES.schema)
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadAllAvailable())
    assert stream.partitions(start, end)
    path.unlink()
    append(path, [make_record(n) for n in range(9)])

    with pytest.raises(PipelineError, match="a stream needs a new checkpoint"):
        stream.latestOffset(end, ReadAllAvailable())
    (planned,) = stream.partitions(start, end)
    with pytest.raises(PipelineError, match="was replaced"):
        list(stream.read(planned))
