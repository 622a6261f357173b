"""Questions about dead letters read indexes, in a file of their own and in a journal's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest

from msgbus.journal.sqlite.files import open_writer
from msgbus.journal.sqlite.letters import JournalRows
from msgbus.resilience import LetterFilter, LetterStatus, sqlite_schema as schema
from msgbus.resilience.letter_rows import COLUMNS, LetterRows
from msgbus.resilience.stores import Record
from msgbus.testing.conformance.dead_letters import letter

MORNING = datetime(2026, 1, 1, tzinfo=UTC)

PLANS: list[tuple[str, dict[str, Any], str]] = [
    ("status", {}, "letters_by_status (status=? AND rowid>?)"),
    ("type", {"message_types": frozenset({"a"})}, "letters_by_type (message_type=? AND status=?"),
    ("handler", {"handler": "a"}, "letters_by_handler (handler=? AND status=?"),
    ("error", {"error_type": "a"}, "letters_by_error (error_type=? AND status=?"),
    ("session", {"session_id": "a"}, "letters_by_session (session_id=? AND status=?"),
    ("since", {"since": MORNING}, "letters_by_time (status=? AND last_attempt>?"),
    ("until", {"until": MORNING}, "letters_by_time (status=? AND last_attempt<?"),
    ("answered", {"answered": True}, "letters_by_status (status=?"),
    ("any status", {"status": None, "handler": "a"}, "letters_by_handler (handler=?"),
]


@pytest.fixture(scope="module", params=["file", "journal"])
def analysed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LetterRows]:
    """A file with letters of every kind in it."""
    path = tmp_path_factory.mktemp("plans") / "letters.db"
    if request.param == "file":
        connection = schema.open_writer(path, timeout=5)
        rows = schema.rows_of(connection)
    else:
        connection = open_writer(str(path), 5.0)
        rows = JournalRows(connection, str(path), None)
    with closing(connection):
        for number in range(300):
            one = letter(handler=f"h{number % 7}", minute=number, session_id=f"s{number % 50}")
            rows.insert(Record(one))
        yield rows


def plan(rows: LetterRows, sql: str, values: list[Any]) -> list[str]:
    return [row[3] for row in rows.connection.execute(f"EXPLAIN QUERY PLAN {sql}", values)]


def test_the_table_has_the_columns_of_a_letter(analysed: LetterRows) -> None:
    found = analysed.connection.execute(f"PRAGMA table_info({analysed.table.name})")

    assert {row[1] for row in found} >= {"seq", *COLUMNS}
    assert analysed.size() == 300


@pytest.mark.parametrize(
    ("filters", "index"), [one[1:] for one in PLANS], ids=[o[0] for o in PLANS]
)
def test_a_filtered_page_reads_an_index_and_never_the_whole_table(
    filters: dict[str, Any], index: str, analysed: LetterRows
) -> None:
    steps = plan(analysed, *analysed.table.page(LetterFilter(**filters), "5", 100))

    assert any(index in step for step in steps), steps
    assert not [step for step in steps if step.startswith("SCAN")], steps


@pytest.mark.parametrize(
    ("filters", "index"), [one[1:] for one in PLANS], ids=[o[0] for o in PLANS]
)
def test_a_count_reads_an_index(filters: dict[str, Any], index: str, analysed: LetterRows) -> None:
    steps = plan(analysed, *analysed.table.count(LetterFilter(**filters)))

    assert not [step for step in steps if step.startswith("SCAN")], (index, steps)


def test_groups_read_one_index_alone_and_sort_no_letters(analysed: LetterRows) -> None:
    steps = plan(analysed, *analysed.table.groups(LetterFilter()))

    assert [one for one in steps if "COVERING INDEX" in one and "by_group (status=?)" in one]
    assert "USE TEMP B-TREE FOR GROUP BY" not in steps


def test_a_page_of_one_status_needs_no_sorting(analysed: LetterRows) -> None:
    steps = plan(analysed, *analysed.table.page(LetterFilter(handler="h1"), None, 100))

    assert not [step for step in steps if "TEMP B-TREE" in step and "ORDER BY" in step], steps


def test_letters_by_claim_are_found_by_index(analysed: LetterRows) -> None:
    (step,) = plan(analysed, analysed.table.claimed, [])

    assert step.startswith("SEARCH")
    assert "letters_by_" in step
    assert LetterStatus.REPLAYING.value in analysed.table.claimed
