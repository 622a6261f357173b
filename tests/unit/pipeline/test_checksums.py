"""What the data source does with rows that are damaged or missing; no JVM is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from msgbus.journal import DeliveryRecord, Outcome
from msgbus.journal.operations import Note
from msgbus.journal.sqlite.columns import DELIVERY
from msgbus.journal.sqlite.messages import MESSAGE
from msgbus.pipeline.source import journal_file
from msgbus.pipeline.source.journal_file import DAMAGED, MISSING, Range, batches
from msgbus.pipeline.source.options import ReadOptions
from msgbus.pipeline.source.source import query_of
from msgbus.pipeline.source.tables import DELIVERIES, MESSAGES, Table
from msgbus.testing.conformance.journal.kit import TIME
from tests.spark.kit import append, mixed_records, records_in, row_of, with_journal
from tests.unit.journal.sqlite.files import change

ENGINES: Final = ["adbc", "sqlite3"]
COUNT: Final = 12


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shop.db"


def fill(path: Path) -> list[dict[str, Any]]:
    """Write messages of all kinds; return the rows that they are to be."""
    append(path, mixed_records(COUNT))
    return [row_of(record) for record in records_in(path)]


def rows(
    path: Path,
    engine: str,
    table: Table = MESSAGES,
    *,
    low: int = 1,
    **options: Any,
) -> list[dict[str, Any]]:
    """The rows of a table, by position."""
    read = ReadOptions(path=str(path), table=table, **options)
    query = query_of(read, tuple(table.columns), Range(low, 99))
    found = [row for one in batches(query, engine) for row in one.to_pylist()]
    for row in found:
        if row.get("headers") is not None:
            row["headers"] = dict(row["headers"])
    return sorted(found, key=lambda row: row[table.position])


def without(table: Table, position: int, reason: str) -> dict[str, Any]:
    """The row of a record of which nothing is known."""
    return {**dict.fromkeys(table.columns), table.position: position, "_corrupt": reason}


OTHERS: Final = {
    "offset": "50",
    "kind": "'evint'",
    "payload": "x'00'",
    "headers": """'{"a":1}'""",
    **dict.fromkeys(("version", "depth", "from_system", "slot", "crc", "time"), "77"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("column", MESSAGE.split(", "))
def test_a_message_with_a_damaged_column_has_its_offset_only(
    path: Path, engine: str, column: str
) -> None:
    expected = fill(path)
    value = OTHERS.get(column, "'x'")
    change(path, f"UPDATE msgbus_messages SET {column} = {value} WHERE offset = 9")

    found = rows(path, engine)

    if column == "offset":  # where it was, and all before where it seems to be, are missing
        assert found[8] == without(MESSAGES, 9, MISSING)
        assert found[-1] == without(MESSAGES, 50, DAMAGED)
        assert {row["_corrupt"] for row in found[12:-1]} == {MISSING}
        found = found[:12]
    else:
        assert found[8] == without(MESSAGES, 9, DAMAGED)
    assert [row for row in found if row["offset"] != 9] == [
        row for row in expected if row["offset"] != 9
    ]


VALUES: Final = ("CAST(x'ff' AS TEXT)", "x'ff'", "NULL", "5", "'other'", "9e999")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("value", VALUES)
def test_values_of_any_type_fail_no_read(path: Path, engine: str, value: str) -> None:
    fill(path)
    columns = ["causation_id"]
    if value != "NULL":  # which SQLite lets be nowhere else
        columns += ["topic", "version", "time", "payload"]
    for offset, column in enumerate(columns, 8):
        change(path, f"UPDATE msgbus_messages SET {column} = {value} WHERE offset = {offset}")

    found = rows(path, engine)

    assert len(found) == COUNT
    assert found[7 : 7 + len(columns)] == [
        without(MESSAGES, offset, DAMAGED) for offset in range(8, 8 + len(columns))
    ]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("column", DELIVERY.split(", "))
def test_a_damaged_delivery_has_its_id_only(path: Path, engine: str, column: str) -> None:
    deliveries = [
        DeliveryRecord(f"m{n}", "ship", n, Outcome.OK, n / 3, n / 7, TIME + n, "E" * n or None, n)
        for n in range(4)
    ]
    with_journal(path, lambda journal: journal.commit(list(map(Note, deliveries))))
    before = rows(path, engine, DELIVERIES)
    change(path, f"UPDATE msgbus_deliveries SET {column} = {column} || '1' WHERE id = 2")

    found = rows(path, engine, DELIVERIES)

    assert [row["offset"] for row in before] == [None, 1, 2, 3]
    assert {row["_corrupt"] for row in before} == {None}
    assert found == [before[0], without(DELIVERIES, 2, DAMAGED), *before[2:]]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_missing_message_has_a_row_and_a_trimmed_one_has_none(path: Path, engine: str) -> None:
    expected = fill(path)
    with_journal(path, lambda journal: journal.trim(before=3))
    change(path, "DELETE FROM msgbus_messages WHERE offset = 9")

    found = rows(path, engine, low=3)

    assert found == [*expected[2:8], without(MESSAGES, 9, MISSING), *expected[9:]]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("columns", [(), ("offset",), ("name",), ("_corrupt",), ("payload",)])
def test_there_are_as_many_rows_whatever_columns_are_read(
    path: Path, engine: str, columns: tuple[str, ...]
) -> None:
    fill(path)
    change(path, "UPDATE msgbus_messages SET name = 'x' WHERE offset = 5")
    change(path, "UPDATE msgbus_messages SET kind = 'x' WHERE offset = 6")
    change(path, "DELETE FROM msgbus_messages WHERE offset = 9")
    query = query_of(ReadOptions(path=str(path)), columns, Range(1, 99))

    assert sum(one.num_rows for one in batches(query, engine)) == COUNT


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_damaged_belongs_to_every_name_and_topic(path: Path, engine: str) -> None:
    fill(path)
    change(path, "UPDATE msgbus_messages SET name = 'x' WHERE offset = 1")
    change(path, "UPDATE msgbus_messages SET topic = 'x' WHERE offset = 2")
    change(path, "DELETE FROM msgbus_messages WHERE offset = 11")

    named = rows(path, engine, where={"name": ["shop.OrderPlaced"]})
    by_topic = rows(path, engine, where={"topic": ["shop.orders"]})
    by_key = rows(path, engine, where={"key": ["k9"]})

    assert [row["offset"] for row in named] == [1, 2, 3, 4, 5, 6, 11]
    assert [row["_corrupt"] for row in named] == [DAMAGED, DAMAGED, *[None] * 4, MISSING]
    assert [row["offset"] for row in by_topic] == [1, 2, 3, 4, 5, 6, 11]
    assert [row["offset"] for row in by_key] == [10]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("columns", [(), ("offset",), ("name",)])
def test_a_name_that_the_table_of_blocks_has_lost_adds_no_row(
    path: Path, engine: str, columns: tuple[str, ...]
) -> None:
    fill(path)
    change(path, "DELETE FROM msgbus_blocks WHERE value = 'shop.OrderPlaced'")
    options = ReadOptions(path=str(path), where={"name": ["shop.Event1"]})
    query = query_of(options, columns, Range(1, 99))

    assert sum(one.num_rows for one in batches(query, engine)) == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_without_the_check_damage_is_read_as_data(
    path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path)
    change(path, "UPDATE msgbus_messages SET topic = 'other' WHERE offset = 9")

    def nothing(*_: object) -> None: ...

    monkeypatch.setattr(journal_file, "damaged", nothing)

    assert rows(path, engine)[8]["topic"] == "other"


@pytest.mark.parametrize("batch_rows", [1, 7, 500])
def test_the_checksums_of_sound_rows_fit(path: Path, batch_rows: int) -> None:
    append(path, mixed_records(500))

    found = rows(path, "adbc", batch_rows=batch_rows)

    assert len(found) == 99
    assert {row["_corrupt"] for row in found} == {None}
