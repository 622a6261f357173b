"""Questions about dead letters read indexes, in a file of their own and in a journal's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from msgbus.journal import SqliteJournal
from msgbus.resilience import JournalDeadLetterStore, LetterFilter, LetterStatus
from msgbus.testing.conformance.dead_letters import letter
from tests.unit.journal.sqlite.plans import plan_of, recorded, whole_table_scans

MORNING = datetime(2026, 1, 1, tzinfo=UTC)

PLANS: list[tuple[str, dict[str, Any], str]] = [
    ("status", {}, "letters_by_status (status=? AND rowid>?"),
    ("type", {"message_types": frozenset({"a"})}, "letters_by_name (name=? AND status=?"),
    ("handler", {"handler": "a"}, "letters_by_handler (handler=? AND status=?"),
    ("error", {"error_type": "a"}, "letters_by_error (error_type=? AND status=?"),
    ("session", {"session_id": "a"}, "letters_by_session (session_id=? AND status=?"),
    ("since", {"since": MORNING}, "letters_by_time (status=? AND last_attempt>?"),
    ("until", {"until": MORNING}, "letters_by_time (status=? AND last_attempt<?"),
    ("answered", {"answered": True}, "letters_by_status (status=?"),
    ("any status", {"status": None, "handler": "a"}, "letters_by_handler (handler=?"),
]
FILTERS = pytest.mark.parametrize(
    ("filters", "index"), [one[1:] for one in PLANS], ids=[one[0] for one in PLANS]
)

Question = Callable[[JournalDeadLetterStore], Awaitable[object]]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"  # the plans are the same


@asynccontextmanager
async def filled(path: Path, statements: list[Any]) -> AsyncGenerator[JournalDeadLetterStore]:
    """A store with letters of every kind in it."""
    async with SqliteJournal(path, reserve=0, _connect=recorded(statements)) as journal:
        store = JournalDeadLetterStore(journal)
        await store.put(
            [
                letter(handler=f"h{number % 7}", minute=number, session_id=f"s{number % 50}")
                for number in range(300)
            ]
        )
        yield store
        await store.close()


async def plan(folder: Path, question: Question) -> list[str]:
    statements: list[Any] = []
    async with filled(folder / "journal.db", statements) as store:
        statements.clear()
        await question(store)
        return plan_of(folder / "journal.db", statements)


@FILTERS
async def test_a_filtered_page_reads_an_index_and_never_the_whole_table(
    filters: dict[str, Any], index: str, tmp_path: Path
) -> None:
    steps = await plan(tmp_path, lambda store: store.page(LetterFilter(**filters), after="5"))

    assert any(index in step for step in steps), steps
    assert whole_table_scans(steps) == []


@FILTERS
async def test_a_count_reads_an_index(filters: dict[str, Any], index: str, tmp_path: Path) -> None:
    steps = await plan(tmp_path, lambda store: store.count(LetterFilter(**filters)))

    assert whole_table_scans(steps) == [], index


async def test_groups_read_an_index(tmp_path: Path) -> None:
    steps = await plan(tmp_path, lambda store: store.groups(LetterFilter()))

    assert whole_table_scans(steps) == []


async def test_a_page_of_one_status_needs_no_sorting(tmp_path: Path) -> None:
    steps = await plan(tmp_path, lambda store: store.page(LetterFilter(handler="h1")))

    assert not [step for step in steps if "TEMP B-TREE" in step and "ORDER BY" in step], steps


async def test_letters_that_are_being_replayed_are_found_by_index(tmp_path: Path) -> None:
    steps = await plan(tmp_path, lambda store: store.release())

    assert whole_table_scans(steps) == []
    assert [step for step in steps if "letters_by_status (status=? AND rowid>?" in step], steps
    assert LetterStatus.REPLAYING.value == "replaying"
