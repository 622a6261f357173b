from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from msgbus.journal.operations import Append, Note, Pass, Put, Reply, Save
from msgbus.journal.records import (
    DELAYED,
    Cursor,
    DeliveryRecord,
    Instance,
    Member,
    Outcome,
    State,
)
from msgbus.journal.reports import VerifyReport
from msgbus.journal.sqlite.columns import (
    CURSOR,
    DELIVERY,
    INSTANCE,
    LETTER as LETTER_COLUMNS,
    PENDING,
    RESULT,
    cursor_row,
    letter_row,
    pending_row,
)
from msgbus.journal.sqlite.files import PAGE_SIZE
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.journal.sqlite.messages import MESSAGE
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    LETTER,
    SHARED,
    TIME,
    fill,
    join,
    make_command,
    make_record,
    make_row,
    take,
)
from tests.unit.journal.sqlite.files import change, sql


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


async def fill_all(journal: SqliteJournal) -> Member:
    """Fill every table with rows that are as they should be."""
    await fill(journal, 6, key="k", session_id="s", headers={"a": "b"})
    member = await join(journal)
    cursor = await take(journal, member, "orders", EVENTS)
    await journal.open("shared", SHARED, 0)
    await journal.commit(
        [
            Pass(cursor, 2, 5),
            Put(make_row("orders", 1, State.DEAD, key="k", error="no stock"), LETTER),
            Put(make_row("orders", 2, State.PARKED, key="k")),
            Append(make_command(6, message_id="command"), queue="commands:shop.Pack", unique="u"),
            Append(make_record(7), queue=DELAYED, due=TIME),
            Reply("command", TIME, b"1", "error"),
            Save(Instance("manager", "k", b"{}", TIME, 1)),
            Note(DeliveryRecord("command", "pack", 1, Outcome.OK, 0.5, 0.25, TIME, "E", 7)),
        ],
        member,
    )
    await journal.claim(member, "shared", 2, TIME, selection=SHARED)
    return member


async def test_a_sound_journal_has_no_problems(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill_all(journal)

        report = await journal.verify()

        assert report == VerifyReport(messages=7)
        assert report.is_sound


NUMBERS = frozenset(
    [
        "version",
        "depth",
        "from_system",
        "crc",
        "partition",
        "attempt",
        "alone",
        "epoch",
        "acked",
        "fetched",
        "answered",
        "replays",
        "first_attempt",
        "last_attempt",
        "time",
        "offset",
        "slot",
        "wake",
        "owner",
        "due",
        "wait",
        "run",
    ]
)


async def spoil(path: Path, table: str, column: str, where: str) -> VerifyReport:
    async with SqliteJournal(path) as journal:
        await fill_all(journal)
        value = f"coalesce({column}, 0) + 40" if column in NUMBERS else "'other'"
        change(path, f"UPDATE msgbus_{table} SET {column} = {value} WHERE {where}")
        return await journal.verify()


@pytest.mark.parametrize("column", MESSAGE.split(", "))
async def test_verify_finds_a_changed_message(path: Path, column: str) -> None:
    report = await spoil(path, "messages", column, "offset = 6")

    assert report.damaged == ((6, *range(8, 46), 46) if column == "offset" else (6,))
    assert report.messages == 6


@pytest.mark.parametrize(
    ("table", "column", "where"),
    [
        *(("pending", column, "offset = 2 AND key = 'k'") for column in PENDING.split(", ")),
        ("pending", "body", f"subscription = '{DELAYED}'"),
        *(("subscriptions", column, "name = 'orders'") for column in CURSOR.split(", ")),
        *(("letters", column, "1") for column in LETTER_COLUMNS.split(", ")),
        *(("results", column, "1") for column in RESULT.split(", ")),
        *(("instances", column, "1") for column in INSTANCE.split(", ")),
        *(("deliveries", column, "1") for column in DELIVERY.split(", ")),
        *(("members", column, "1") for column in ("process", "serves", "crc")),
    ],
)
async def test_verify_finds_a_changed_column(
    path: Path, table: str, column: str, where: str
) -> None:
    report = await spoil(path, table, column, where)

    what = "Partition" if table == "subscriptions" else f"msgbus_{table}"
    found = [one for one in report.problems if what in one and "checksum does not fit" in one]
    assert len(found) == 1
    assert report.damaged == ()


async def test_verify_finds_a_missing_message(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 5)
        await journal.trim(before=2)
        change(path, "DELETE FROM msgbus_messages WHERE offset = 3")

        assert await journal.verify() == VerifyReport(messages=3, damaged=(3,))


async def test_verify_reads_on_behind_text_that_is_none(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill_all(journal)
        change(path, "UPDATE msgbus_messages SET topic = CAST(x'ff' AS TEXT) WHERE offset = 2")
        change(path, "UPDATE msgbus_letters SET note = CAST(x'ff' AS TEXT)")

        report = await journal.verify()

        assert report.damaged == (2,)
        assert len(report.problems) == 1


async def test_a_row_that_was_set_aside_is_sound_until_it_is_changed(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 1)
        await journal.commit([Put(make_row("orders", 1))])
        change(path, "UPDATE msgbus_pending SET attempt = 4")
        await journal.due("orders", TIME)

        assert (await journal.verify()).is_sound
        change(path, "UPDATE msgbus_pending SET attempt = 5")
        assert len((await journal.verify()).problems) == 1


def put(path: Path, name: str, offset: int, state: State, **changes: Any) -> None:
    """Write a row with a checksum that fits, past all guards."""
    row = make_row(name, offset, state, **changes)
    insert(path, "pending", PENDING, pending_row(row, None))
    if state is State.DEAD:
        insert(path, "letters", LETTER_COLUMNS, letter_row(row, LETTER, None, None))


def put_cursor(path: Path, cursor: Cursor) -> None:
    insert(path, "subscriptions", CURSOR, cursor_row(cursor))


def insert(path: Path, table: str, columns: str, values: Sequence[object]) -> None:
    places = ", ".join("?" * len(values))
    change(path, f"INSERT OR REPLACE INTO msgbus_{table} ({columns}) VALUES ({places})", values)


async def problems_of(journal: SqliteJournal) -> str:
    report = await journal.verify()
    assert len(report.problems) == 1, report.problems
    assert not report.is_sound
    return report.problems[0]


@pytest.mark.parametrize("before", [None, State.DONE, State.PARKED])
async def test_verify_finds_a_row_that_is_parked_behind_nothing(
    path: Path, before: State | None
) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 4)
        put(path, "orders", 2, State.WAITING, key="other")
        put(path, "orders", 3, State.PARKED, key="k")
        put(path, "orders", 4, State.WAITING, key="k")
        if before is State.DONE:
            put(path, "orders", 1, before, key="k")
        if before is State.PARKED:
            put(path, "orders", 1, before, key="k", partition=1)
            put(path, "audit", 1, State.DEAD, key="k", partition=1)

        problems = (await journal.verify()).problems

        assert "Message 3 of 'orders' is parked behind no other row of its key." in problems


@pytest.mark.parametrize("before", [State.WAITING, State.DEAD, State.DAMAGED])
async def test_a_row_may_be_parked_behind_one_that_holds_its_key(path: Path, before: State) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 3)
        put(path, "orders", 1, before, key="k")
        put(path, "orders", 2, State.PARKED, key="k")
        put(path, "orders", 3, State.PARKED, key="k")

        assert (await journal.verify()).is_sound


async def test_verify_finds_a_claim_of_no_member(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 2)
        put(path, "orders", 1, State.CLAIMED, owner=99)

        assert "Message 1 of 'orders' is claimed by no member" in await problems_of(journal)


async def test_verify_finds_a_claim_without_an_owner(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 2)
        put(path, "orders", 1, State.CLAIMED)

        assert "Message 1 of 'orders' is claimed by no member" in await problems_of(journal)


async def test_verify_finds_an_owner_of_a_row_that_is_not_claimed(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 2)
        member = await join(journal)
        put(path, "orders", 1, State.WAITING, owner=member.id)

        assert "has an owner without being claimed" in await problems_of(journal)


@pytest.mark.parametrize("state", [state for state in State if state is not State.KEPT])
async def test_verify_finds_a_row_beyond_its_cursor(path: Path, state: State) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 4)
        member = await join(journal)
        owner = member.id if state is State.CLAIMED else None
        await journal.open("orders", EVENTS, 2)
        put(path, "orders", 1, State.WAITING, key="k")
        put(path, "orders", 3, state, key="k", owner=owner)
        put(path, "commands:shop.Pack", 3, State.WAITING)

        assert "Message 3 of 'orders' is beyond" in await problems_of(journal)


async def test_verify_finds_a_row_of_a_partition_that_does_not_exist(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 4)
        await journal.open("orders", EVENTS, 2)
        put(path, "orders", 1, State.WAITING, partition=3)

        assert "Message 1 of 'orders' is beyond" in await problems_of(journal)


async def test_a_kept_row_may_be_beyond_the_cursor(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 4)
        await journal.open("orders", EVENTS, 2)
        put(path, "orders", 3, State.KEPT)

        assert (await journal.verify()).is_sound


@pytest.mark.parametrize(("acked", "fetched"), [(3, 2), (2, 5), (5, 5), (-1, 2)])
async def test_verify_finds_a_cursor_out_of_order(path: Path, acked: int, fetched: int) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 4)
        put_cursor(path, Cursor("orders", 0, acked, fetched, None, 0))

        problem = await problems_of(journal)

        assert f"acknowledged up to {acked} and fetched up to {fetched}" in problem


async def test_verify_finds_a_partition_of_no_member(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 4)
        put_cursor(path, Cursor("orders", 0, 1, 1, 99, 1))

        assert "owned by member 99" in await problems_of(journal)


@pytest.mark.parametrize("name", ["orders", DELAYED])
async def test_verify_finds_a_row_without_a_message(path: Path, name: str) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 2)
        await journal.commit(
            [Append(make_record(7), queue=DELAYED, due=TIME) for _ in range(3)],
        )
        put(path, name, 3 if name == "orders" else 1, State.WAITING)

        assert "has no message" in await problems_of(journal)


async def test_verify_finds_a_number_of_a_delayed_event_that_was_not_given(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        put(path, DELAYED, 3, State.WAITING, body=make_record())

        assert "Delayed event 3" in await problems_of(journal)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE msgbus_meta SET value = '1' WHERE key = 'delayed'",
        "UPDATE msgbus_meta SET crc = 1 WHERE key = 'delayed'",
        "DELETE FROM msgbus_meta WHERE key = 'delayed'",
    ],
)
async def test_verify_finds_a_damaged_value_of_the_file(path: Path, damage: str) -> None:
    async with SqliteJournal(path) as journal:
        change(path, damage)

        assert "'delayed' of msgbus_meta" in await problems_of(journal)


@pytest.mark.parametrize(("state", "due"), [(State.WAITING, None), (State.PARKED, TIME)])
async def test_verify_finds_a_row_with_a_wrong_time(
    path: Path, state: State, due: float | None
) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 2)
        put(path, "orders", 1, State.DEAD, key="k")
        put(path, "orders", 2, state, due=due, key="k")

        assert "Message 2 of 'orders' waits for no time, or" in await problems_of(journal)


async def test_verify_finds_a_dead_row_without_a_letter(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 2)
        put(path, "orders", 1, State.DEAD)
        change(path, "DELETE FROM msgbus_letters")

        assert "Message 1 of 'orders' is dead and has no letter" in await problems_of(journal)


@pytest.mark.parametrize("left", [None, State.DONE])
async def test_verify_finds_a_letter_without_its_row(path: Path, left: State | None) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 2)
        put(path, "orders", 1, State.DEAD)
        change(path, "DELETE FROM msgbus_pending")
        if left is not None:
            put(path, "orders", 1, left)

        assert "Message 1 of 'orders' has a letter, but is" in await problems_of(journal)


@pytest.mark.parametrize("table", ["members", "letters", "deliveries"])
async def test_verify_finds_a_number_that_would_be_given_again(path: Path, table: str) -> None:
    async with SqliteJournal(path) as journal:
        await fill_all(journal)
        change(path, "UPDATE sqlite_sequence SET seq = 0 WHERE name = ?", (f"msgbus_{table}",))

        assert f"(1) of msgbus_{table} has a number" in await problems_of(journal)


def rewrite(path: Path, name: str, old: str, new: str) -> None:
    """Change what the file says of a table or an index, and nothing of its content."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA writable_schema = ON")
        statement = "UPDATE sqlite_master SET sql = replace(sql, ?, ?) WHERE name = ?"
        assert connection.execute(statement, (old, new, name)).rowcount == 1


@pytest.mark.parametrize(
    "statement",
    [
        "DROP INDEX msgbus_messages_by_kind",
        "DROP VIEW msgbus_log",
        "ALTER TABLE msgbus_deliveries ADD COLUMN note TEXT",
    ],
)
async def test_verify_finds_tables_and_indexes_that_are_not_as_they_were_made(
    path: Path, statement: str
) -> None:
    async with SqliteJournal(path) as journal:
        await fill_all(journal)
        sql(path, statement)

        assert "as this version of msgbus makes it" in await problems_of(journal)


async def test_verify_finds_a_column_that_has_another_name(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill_all(journal)
    rewrite(path, "msgbus_messages", "payload BLOB", "peyload BLOB")

    async with SqliteJournal(path) as journal:
        problems = (await journal.verify()).problems

    assert any("msgbus_messages is missing, or not as" in one for one in problems)
    assert any("The log cannot be read to its end" in one for one in problems)


async def test_verify_finds_an_index_that_does_not_agree_with_its_table(path: Path) -> None:
    name = "msgbus_messages_by_key"
    async with SqliteJournal(path) as journal:
        await fill_all(journal)
    sql(path, f"DROP INDEX {name}")
    sql(path, f"CREATE INDEX {name} ON msgbus_messages (key) WHERE key IS NULL")
    rewrite(path, name, "IS NULL", "IS NOT NULL")

    async with SqliteJournal(path) as journal:
        problems = (await journal.verify()).problems

    assert len([one for one in problems if "missing from index" in one and name in one]) == 6


async def test_verify_finds_two_rows_of_one_unique_key(path: Path) -> None:
    name = "msgbus_pending_unique"
    async with SqliteJournal(path) as journal:
        await fill(journal, 2)
    ((made,),) = sql(path, "SELECT sql FROM sqlite_master WHERE name = ?", (name,))
    sql(path, f"DROP INDEX {name}")
    for offset in (1, 2):
        put(path, "orders", offset, State.WAITING, unique="u")
    sql(path, made.replace("UNIQUE ", ""))
    rewrite(path, name, "CREATE INDEX", "CREATE UNIQUE INDEX")

    async with SqliteJournal(path) as journal:
        problems = (await journal.verify()).problems

    assert f"non-unique entry in index {name}" in problems


async def test_verify_goes_on_behind_a_table_that_cannot_be_read(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill_all(journal)
        ((root,),) = sql(path, "SELECT rootpage FROM sqlite_master WHERE name = 'msgbus_results'")
        change(path, "UPDATE msgbus_letters SET note = 'other'")
    with path.open("r+b") as file:
        file.seek((root - 1) * PAGE_SIZE)
        file.write(b"\xff" * 8)

    async with SqliteJournal(path) as journal:
        report = await journal.verify()

    assert report.messages == 7
    found = [one for one in report.problems if "table msgbus_results cannot be read" in one]
    assert len(found) == 1
    assert any("of msgbus_letters is damaged" in one for one in report.problems)


async def test_no_more_than_a_thousand_problems_are_listed(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await journal.commit([Put(make_row("orders", offset)) for offset in range(1, 1101)])

        assert len((await journal.verify()).problems) == 1000
