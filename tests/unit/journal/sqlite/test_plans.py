"""How SQLite finds pending rows: by an index of its own order, however many others there are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from msgbus.journal.letters import LetterSelection
from msgbus.journal.operations import Append, Drop, Pass, Put, Reply
from msgbus.journal.records import DELAYED, Member, Selection, State
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.testing.conformance.journal.kit import (
    KEYED,
    LETTER,
    SHARED,
    TIME,
    cursor_of,
    fill_keys,
    join,
    make_command,
    make_record,
    make_row,
    row_of,
)
from tests.unit.journal.sqlite.plans import plan_of, recorded, whole_table_scans

Step = Callable[[SqliteJournal, Member], Awaitable[Any]]

DUE = "INDEX msgbus_pending_due (subscription=? AND alone=? AND due<?)"
ANY_LETTER = "SELECT EXISTS (SELECT 1 FROM msgbus_letters)"
"""Reads one row at most."""

QUEUE = "commands:shop.Pack"


async def release(journal: SqliteJournal, member: Member) -> None:
    cursor = await cursor_of(journal, "keyed")
    await journal.commit([Pass(cursor, 2, 6, release=True)], member)
    await journal.acquire(member, "keyed", 0, KEYED)


async def drop(journal: SqliteJournal, member: Member) -> None:
    await journal.commit([Drop(await row_of(journal, "keyed", 1))], member)


async def end(journal: SqliteJournal, member: Member) -> None:
    await journal.claim(member, QUEUE, 9, TIME)
    await journal.end(member)


STEPS: dict[str, tuple[Step, str]] = {
    "claim": (lambda journal, member: journal.claim(member, QUEUE, 9, TIME), DUE),
    "claim alone": (
        lambda journal, member: journal.claim(member, QUEUE, 1, TIME, alone=True),
        DUE,
    ),
    "claim of partitions": (
        lambda journal, member: journal.claim(member, "keyed", 9, TIME, partitions=[0]),
        DUE,
    ),
    "claim of new messages": (
        lambda journal, member: journal.claim(member, "shared", 9, TIME, selection=SHARED),
        "INTEGER PRIMARY KEY (rowid>? AND rowid<?)",
    ),
    "due": (lambda journal, _: journal.due(DELAYED, TIME), DUE),
    "next_due": (lambda journal, _: journal.next_due(QUEUE), "INDEX msgbus_pending_due"),
    "dead": (
        lambda journal, _: journal.find("keyed", [State.DEAD]),
        "INDEX msgbus_pending_dead (subscription=?)",
    ),
    "waiting": (
        lambda journal, _: journal.find("keyed", [State.WAITING]),
        "PRIMARY KEY (subscription=?)",
    ),
    "count": (lambda journal, _: journal.count("keyed"), "PRIMARY KEY (subscription=?)"),
    "blocked keys": (
        lambda journal, _: journal.blocked_keys("keyed", 0),
        "INDEX msgbus_pending_key (subscription=? AND partition=? AND key>?)",
    ),
    "drop and promote": (
        drop,
        "INDEX msgbus_pending_key (subscription=? AND partition=? AND key=?",
    ),
    "hand over": (release, "PRIMARY KEY (subscription=? AND offset>? AND offset<?)"),
    "end of a member": (end, "INDEX msgbus_pending_owner (owner=?)"),
    "result": (lambda journal, _: journal.result("x"), "PRIMARY KEY (message_id=?)"),
    "results": (lambda journal, _: journal.results(["x", "y"]), "PRIMARY KEY (message_id=?)"),
    "unique": (
        lambda journal, _: journal.commit([Append(make_command(), queue=QUEUE, unique="u")]),
        "INDEX msgbus_pending_unique (subscription=? AND unique_key=?)",
    ),
}


@pytest.mark.parametrize("step", STEPS)
async def test_no_step_reads_or_sorts_all_rows(tmp_path: Path, step: str) -> None:
    statements: list[tuple[str, Any]] = []
    file = tmp_path / "journal.db"
    take, index = STEPS[step]
    async with SqliteJournal(file, reserve=0, _connect=recorded(statements)) as journal:
        member = await join(journal)
        await fill_keys(journal, "aabbab")
        for name, selection in (("keyed", KEYED), ("shared", SHARED)):
            await journal.open(name, selection, 0)
        cursor = await journal.acquire(member, "keyed", 0, KEYED)
        assert cursor is not None
        await journal.commit(
            [
                Put(make_row("keyed", 1, State.DEAD, key="a"), LETTER),
                Put(make_row("keyed", 2, State.PARKED, key="a")),
                Pass(cursor, 2, 2),
                Append(make_command(), queue=QUEUE, unique="u"),
                Append(make_record(), queue=DELAYED, due=TIME),
                Reply("x", TIME),
            ],
            member,
        )
        statements.clear()

        await take(journal, member)

    plan = plan_of(file, [one for one in statements if one[0] != ANY_LETTER])
    assert any(index in line for line in plan), plan
    assert whole_table_scans(plan) == []
    assert not any("TEMP B-TREE" in line for line in plan if step != "count"), plan


async def test_the_selection_of_a_subscription_needs_no_scan(tmp_path: Path) -> None:
    statements: list[tuple[str, Any]] = []
    file = tmp_path / "journal.db"
    async with SqliteJournal(file, reserve=0, _connect=recorded(statements)) as journal:
        await fill_keys(journal, "ab")
        statements.clear()
        await journal.read(0, 9, Selection(names=["shop.Paid"], partitions=3), [0, 2])
        await journal.read(0, 9, Selection(names=["shop.Paid"], partitions=3), [0, 2])

    plan = plan_of(file, statements)
    assert "SEARCH msgbus_messages USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)" in plan
    assert whole_table_scans(plan) == []


async def test_many_letters_are_written_in_few_statements(tmp_path: Path) -> None:
    statements: list[tuple[str, Any]] = []
    file = tmp_path / "journal.db"
    async with SqliteJournal(file, reserve=0, _connect=recorded(statements)) as journal:
        rows = [make_row("letters", offset, State.DEAD) for offset in range(1, 101)]
        bodies = [row._replace(body=make_record()) for row in rows]
        statements.clear()

        await journal.commit([Put(row, LETTER) for row in bodies])

        assert len(await journal.find_letters(LetterSelection())) == 100
    written = [one for one, _ in statements if one.startswith("INSERT")]
    assert len(written) == 6  # 64, 32 and 4 rows, and as many letters
    assert not any("FROM msgbus_letters WHERE subscription" in one for one, _ in statements)
