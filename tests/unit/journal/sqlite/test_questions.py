from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from msgbus.errors import JournalCorruptError
from msgbus.journal.operations import Drop
from msgbus.journal.ports import Questions
from msgbus.journal.records import Kind, Record, State
from msgbus.journal.reports import Retention
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.journal.sqlite.messages import BLOCK
from msgbus.testing.conformance.journal.kit import TIME, append, fill, make_record, numbers
from msgbus.testing.conformance.journal.questions import make_note, numbered, put_dead
from tests.unit.journal.sqlite.files import change, sql
from tests.unit.journal.sqlite.plans import plan_of, recorded, whole_table_scans

Ask = Callable[[SqliteJournal], Awaitable[Any]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


# -- plans -----------------------------------------------------------------------------------


async def planned(path: Path, ask: Ask) -> list[str]:
    statements: list[tuple[str, Any]] = []
    async with SqliteJournal(path, _connect=recorded(statements)) as journal:
        await fill(journal, 3)
        await put_dead(journal, 2)
        statements.clear()
        await ask(journal)
    return plan_of(path, statements)


QUESTIONS: dict[str, Ask] = {
    "first": lambda journal: journal.first(),
    "offset_at": lambda journal: journal.offset_at(TIME),
    "message": lambda journal: journal.message("x"),
    "flow": lambda journal: journal.flow("x"),
    "deliveries": lambda journal: journal.deliveries("x"),
    "delivery_counts": lambda journal: journal.delivery_counts(0, TIME),
    "letter_groups": lambda journal: journal.letter_groups(),
    "find_messages": lambda journal: journal.find_messages(),
    "trim": lambda journal: journal.trim(Retention(max_age=1, max_count=1, max_bytes=1)),
}


@pytest.mark.parametrize("question", QUESTIONS)
async def test_no_question_scans_a_table(path: Path, question: str) -> None:
    plan = await planned(path, QUESTIONS[question])

    assert plan
    assert whole_table_scans(plan) == []


@pytest.mark.parametrize(
    ("terms", "index"),
    [
        ({"topic": "x"}, "msgbus_blocks USING PRIMARY KEY (value=? AND block>? AND block<?)"),
        ({"name": "x"}, "msgbus_blocks USING PRIMARY KEY (value=? AND block>? AND block<?)"),
        ({"name": "x", "kind": Kind.COMMAND}, "INTEGER PRIMARY KEY (rowid>? AND rowid<?)"),
        ({"key": "x"}, "msgbus_messages_by_key (key=? AND rowid>? AND rowid<?)"),
        ({"session_id": "x"}, "msgbus_messages_by_session (session_id=?"),
        ({"correlation_id": "x"}, "msgbus_messages_by_flow (correlation_id=?"),
        ({"kind": Kind.COMMAND}, "msgbus_messages_by_kind (kind=? AND rowid>? AND rowid<?)"),
        ({"since": TIME}, "msgbus_blocks USING PRIMARY KEY (value>? AND value<?)"),
        ({"until": TIME + 9}, "msgbus_blocks USING PRIMARY KEY (value>? AND value<?)"),
        ({"since": TIME}, "msgbus_messages USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)"),
        ({"name": "x", "topic": "y", "since": TIME}, "other USING PRIMARY KEY (value=?"),
    ],
)
@pytest.mark.parametrize("newest_first", [False, True])
async def test_messages_are_found_by_an_index_in_its_own_order(
    path: Path, terms: dict[str, Any], index: str, newest_first: bool
) -> None:
    def ask(journal: SqliteJournal) -> Awaitable[Any]:
        return journal.find_messages(**terms, newest_first=newest_first)

    plan = await planned(path, ask)

    assert any(index in step for step in plan), plan
    assert whole_table_scans(plan) == []
    assert not any("TEMP B-TREE" in step for step in plan), plan


async def test_the_helper_sees_a_scan(path: Path) -> None:
    async with SqliteJournal(path):
        plan = plan_of(path, [("SELECT payload FROM msgbus_messages WHERE depth = 3", ())])

    assert whole_table_scans(plan) == ["SCAN msgbus_messages"]


# -- the log ---------------------------------------------------------------------------------


async def test_a_sqlite_journal_answers_questions(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        questions: Questions = journal

        assert await questions.letter_groups() == []


async def test_a_journal_in_memory_answers_questions_too() -> None:
    async with SqliteJournal(":memory:") as journal:
        await fill(journal, 2)

        assert await journal.first() == 1
        assert numbers((await journal.find_messages()).records) == [0, 1]


async def test_a_damaged_message_is_said_to_be_damaged(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        records = [make_record(n) for n in range(3)]
        await append(journal, *records)
        change(path, "UPDATE msgbus_messages SET payload = x'00' WHERE offset = 2")

        with pytest.raises(JournalCorruptError, match="Message 2"):
            await journal.message(records[1].message_id)
        page = await journal.find_messages()
        assert [one if isinstance(one, int) else one.offset for one in page.records] == [1, 2, 3]
        assert page.records[1] == 2


# -- blocks of the log -----------------------------------------------------------------------


NAMES = ("shop.Placed", "shop.Paid", "shop.Sent")


def made(number: int) -> Record:
    """Make a record: a name in seven, a topic in eleven, and one name that is rare."""
    name = "shop.Rare" if number in (7, BLOCK - 2, 3 * BLOCK + 5) else NAMES[number % 7 % 3]
    topic = name if number % 2 else f"orders.{number % 11}"
    return make_record(number, name=name, topic=topic, time=TIME + number / 20)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a journal of more than three blocks."""
    file = tmp_path_factory.mktemp("blocks") / "journal.db"

    async def write() -> None:
        async with SqliteJournal(file, reserve=0) as journal:
            await append(journal, *(made(number) for number in range(3 * BLOCK + 99)))
            await append(journal, made(3 * BLOCK + 99))

    anyio.run(write)
    return file


@pytest.mark.parametrize(
    "terms",
    [
        {"name": "shop.Paid"},
        {"name": "shop.Rare"},
        {"name": "shop.Absent"},
        {"topic": "orders.4"},
        {"topic": "shop.Sent"},
        {"name": "shop.Paid", "topic": "orders.4"},
        {"name": "shop.Paid", "topic": "shop.Sent"},
        {"since": TIME + 20, "until": TIME + 80},
        {"since": TIME + 3 * BLOCK / 20},
        {"until": TIME + 7.25},
        {"name": "shop.Sent", "since": TIME + 40.05, "until": TIME + 110},
    ],
)
@pytest.mark.parametrize("newest_first", [False, True])
async def test_messages_of_many_blocks_are_found_page_by_page(
    filled: Path, terms: dict[str, Any], newest_first: bool
) -> None:
    since, until = terms.get("since", 0.0), terms.get("until", 2 * TIME)
    fields = {name: terms[name] for name in ("name", "topic") if name in terms}
    records = [made(number) for number in range(3 * BLOCK + 100)]
    expected = [
        number
        for number, one in enumerate(records)
        if since <= one.time < until
        and all(getattr(one, field) == value for field, value in fields.items())
    ]
    found: list[int] = []
    start: int | None = None

    async with SqliteJournal(filled, reserve=0) as journal:
        while True:
            page = await journal.find_messages(
                **terms, newest_first=newest_first, start=start, limit=400
            )
            found += numbers(page.records)
            start = page.next
            if start is None:
                break

    assert found == (expected[::-1] if newest_first else expected)


async def test_the_offset_of_a_time_is_found_in_any_block(filled: Path) -> None:
    async with SqliteJournal(filled, reserve=0) as journal:
        for number in (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 3, 3 * BLOCK + 99):
            assert await journal.offset_at(TIME + number / 20) == number + 1
            assert await journal.offset_at(TIME + number / 20 - 0.01) == number + 1
        assert await journal.offset_at(TIME + 3 * BLOCK) == 3 * BLOCK + 101
        assert await journal.offset_at(float("-inf")) == 1
        assert await journal.offset_at(float("inf")) == 3 * BLOCK + 101


async def test_a_clock_that_jumped_back_hides_no_block(path: Path) -> None:
    async with SqliteJournal(path, reserve=0) as journal:
        times = [TIME + 500, *[TIME] * BLOCK, TIME + 400, TIME + 500]
        await append(journal, *(make_record(n, time=time) for n, time in enumerate(times)))

        assert await journal.offset_at(TIME + 450) == 1
        assert await journal.offset_at(TIME + 505) == BLOCK + 4
        page = await journal.find_messages(since=TIME + 300)
        assert numbers(page.records) == [0, BLOCK + 1, BLOCK + 2]


async def test_a_trim_forgets_the_blocks_that_are_empty(path: Path) -> None:
    async with SqliteJournal(path, reserve=0) as journal:
        await append(journal, *(made(number) for number in range(2 * BLOCK + 50)))
        await put_dead(journal, 5)
        await journal.trim(before=BLOCK + 10)

        assert {block for (block,) in sql(path, "SELECT block FROM msgbus_blocks")} == {0, 1, 2}
        assert numbers((await journal.find_messages(limit=2)).records) == [4, BLOCK + 9]

        (row,) = await journal.find(None, [State.DEAD])
        await journal.commit([Drop(row)])
        await journal.trim(before=BLOCK + 10)

        assert {block for (block,) in sql(path, "SELECT block FROM msgbus_blocks")} == {1, 2}
        await journal.trim(Retention(max_count=0))
        assert sql(path, "SELECT * FROM msgbus_blocks") == []
        await append(journal, made(3 * BLOCK))
        assert (await journal.verify()).is_sound


async def test_a_row_of_a_block_that_is_gone_is_found_by_verify(path: Path) -> None:
    async with SqliteJournal(path, reserve=0) as journal:
        await append(journal, *(made(number) for number in range(4)))
        assert (await journal.verify()).is_sound
        change(path, "DELETE FROM msgbus_blocks WHERE value = 'shop.Sent'")
        change(path, "DELETE FROM msgbus_blocks WHERE typeof(value) = 'integer'")

        report = await journal.verify()

        assert report.messages == 4
        assert len(report.problems) == 2
        assert "'shop.Sent' between the offsets 0 and 1023" in "".join(report.problems)


# -- flows -----------------------------------------------------------------------------------


async def test_a_damaged_message_is_left_out_of_its_flow(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await append(
            journal,
            make_record(0, message_id="m0"),
            make_record(1, causation_id="m0", correlation_id="m0", depth=1),
        )
        change(path, "UPDATE msgbus_messages SET payload = x'00' WHERE offset = 1")

        assert numbered(await journal.flow("m0")) == [(1, [])]


# -- deliveries ------------------------------------------------------------------------------


async def test_a_delivery_with_an_unknown_outcome_is_left_out(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await journal.commit([make_note("a", TIME), make_note("b", TIME)])
        change(path, "UPDATE msgbus_deliveries SET outcome = 'ak' WHERE message_id = 'a'")

        assert await journal.deliveries("a") == []
        assert [one.count for one in await journal.delivery_counts(0, TIME + 1)] == [1]


# -- letters ---------------------------------------------------------------------------------


async def test_a_letter_that_holds_its_message_is_grouped_by_its_name(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 1)
        await put_dead(journal, 1, body=make_record(1, name="shop.Packed", payload=b"{\n}"))
        await put_dead(journal, 2, body=make_record(1, name="shop.Packed"))
        await put_dead(journal, 3, body=make_record(2))
        change(path, "UPDATE msgbus_pending SET body = x'00' WHERE offset = 3")

        groups = await journal.letter_groups()

        assert [(one.name, one.count) for one in groups] == [(None, 1), ("shop.Packed", 2)]
