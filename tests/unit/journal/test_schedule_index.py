"""How SQLite looks up the schedule: by its index, never by reading or sorting all of it."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from msgbus.journal.sqlite.files import MEMORY, open_writer
from msgbus.journal.sqlite.schedules import Whose, due_statement, next_due_statement

WHOSE = [
    Whose(None, None),
    Whose("ship", None),
    Whose(None, ("shop.Paid", "shop.Placed")),
    Whose("ship", ("shop.Paid",)),
]


def plan(connection: sqlite3.Connection, statement: str, values: tuple[object, ...]) -> list[str]:
    return [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", values)]


@pytest.mark.parametrize("whose", WHOSE, ids=str)
def test_the_index_finds_and_orders_what_is_due(whose: Whose) -> None:
    with closing(open_writer(MEMORY, 0.0)) as connection:
        due = plan(connection, due_statement(whose), (*whose.values(), 5.0, 10))
        next_due = plan(connection, next_due_statement(whose), whose.values())

    index = "SEARCH msgbus_schedule USING INDEX msgbus_schedule_by_due"
    assert due == [f"{index} (subscription=? AND due<?)"]
    assert len(next_due) == 1
    assert "msgbus_schedule_by_due (subscription=?)" in next_due[0]
