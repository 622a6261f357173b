from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from msgbus._next.conformance.kit import LETTER, TIME, append, fill, make_record, make_row, numbers
from msgbus._next.journal.operations import Append, Note, Put
from msgbus._next.journal.ports import Questions
from msgbus._next.journal.records import DeliveryRecord, Kind, Outcome, Record, State
from msgbus._next.journal.reports import DeliveryCount, FlowNode, LetterGroup, Retention
from msgbus._next.journal.sqlite.journal import SqliteJournal
from msgbus.errors import JournalCorruptError
from tests.unit.next.sqlite.files import change
from tests.unit.next.sqlite.plans import plan_of, recorded, whole_table_scans

Ask = Callable[[SqliteJournal], Awaitable[Any]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def delivery(message_id: str, time: float, **changes: Any) -> Note:
    record = DeliveryRecord(message_id, "mail", 1, Outcome.OK, 0.1, 0.2, time)
    return Note(record._replace(**changes))


async def put_dead(journal: SqliteJournal, offset: int, **changes: Any) -> None:
    error_type = changes.pop("error_type", "ValueError")
    row = make_row("orders", offset, State.DEAD, **changes)
    await journal.commit([Put(row, LETTER._replace(error_type=error_type))])


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
        ({"topic": "x"}, "msgbus_messages_by_topic (topic=? AND rowid>? AND rowid<?)"),
        ({"name": "x"}, "msgbus_messages_by_name (name=? AND rowid>? AND rowid<?)"),
        ({"key": "x"}, "msgbus_messages_by_key (key=? AND rowid>? AND rowid<?)"),
        ({"session_id": "x"}, "msgbus_messages_by_session (session_id=?"),
        ({"correlation_id": "x"}, "msgbus_messages_by_flow (correlation_id=?"),
        ({"kind": Kind.COMMAND}, "msgbus_messages_by_kind (kind=? AND rowid>? AND rowid<?)"),
        ({"since": TIME}, "COVERING INDEX msgbus_messages_by_time (time>? AND time<?)"),
        ({"until": TIME + 9}, "COVERING INDEX msgbus_messages_by_time (time>? AND time<?)"),
        ({"name": "x", "topic": "y", "since": TIME}, "msgbus_messages_by_name (name=?"),
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

        assert await questions.first() == 1


async def test_a_journal_in_memory_answers_questions_too() -> None:
    async with SqliteJournal(":memory:") as journal:
        await fill(journal, 2)

        assert await journal.first() == 1
        assert numbers((await journal.find_messages()).records) == [0, 1]


async def test_the_offset_of_a_time_is_the_first_at_or_behind_it(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        assert await journal.offset_at(TIME) == 1
        await fill(journal, 3)

        assert await journal.offset_at(0) == 1
        assert await journal.offset_at(TIME + 1) == 2
        assert await journal.offset_at(TIME + 1.5) == 3
        assert await journal.offset_at(TIME + 2.5) == 4


async def test_a_clock_that_jumped_back_hides_no_message(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await append(journal, *(make_record(n) for n in (1, 9, 0, 2)))

        assert await journal.offset_at(TIME + 2) == 2
        page = await journal.find_messages(since=TIME + 1, until=TIME + 3)
        assert numbers(page.records) == [1, 2]


async def test_a_message_is_found_by_its_id(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        record = make_record(7, headers={"a": "b"}, key="k")
        await append(journal, record)

        assert await journal.message(record.message_id) == record._replace(offset=1)
        assert await journal.message("unknown") is None


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


@pytest.mark.parametrize(
    ("terms", "found"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"topic": "b"}, [1, 4]),
        ({"name": "Paid"}, [2, 4]),
        ({"key": "k"}, [1, 2]),
        ({"kind": Kind.COMMAND}, [3]),
        ({"kind": Kind.EVENT}, [0, 1, 2, 4]),
        ({"session_id": "s"}, [2, 3]),
        ({"correlation_id": "zero"}, [0, 3, 4]),
        ({"correlation_id": "zero", "kind": Kind.EVENT}, [0, 4]),
        ({"name": "Paid", "key": "k"}, [2]),
        ({"name": "Paid", "topic": "b"}, [4]),
        ({"key": "k", "session_id": "s", "kind": Kind.EVENT}, [2]),
        ({"since": TIME + 1}, [1, 2, 3, 4]),
        ({"until": TIME + 3}, [0, 1, 2]),
        ({"since": TIME + 1, "until": TIME + 3, "key": "k"}, [1, 2]),
        ({"since": TIME + 1, "until": TIME + 2, "name": "Paid"}, []),
        ({"since": TIME + 99}, []),
        ({"name": "unknown"}, []),
    ],
)
async def test_messages_have_everything_asked_for(
    path: Path, terms: dict[str, Any], found: list[int]
) -> None:
    async with SqliteJournal(path) as journal:
        await append(
            journal,
            make_record(0, message_id="zero", topic="a"),
            make_record(1, key="k", topic="b"),
            make_record(2, key="k", name="Paid", session_id="s"),
            make_record(3, kind=Kind.COMMAND, session_id="s", correlation_id="zero"),
            make_record(4, name="Paid", topic="b", correlation_id="zero"),
        )

        oldest = await journal.find_messages(**terms)
        newest = await journal.find_messages(**terms, newest_first=True)

        assert numbers(oldest.records) == found
        assert numbers(newest.records) == found[::-1]
        assert oldest.next is newest.next is None


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("terms", [{}, {"topic": "shop.orders"}, {"since": TIME}])
async def test_pages_follow_one_another_without_a_gap(
    path: Path, terms: dict[str, Any], newest_first: bool
) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 7)
        found: list[int] = []
        sizes: list[int] = []
        start: int | None = None
        while start is not None or not found:
            page = await journal.find_messages(
                **terms, start=start, limit=3, newest_first=newest_first
            )
            found += numbers(page.records)
            sizes.append(len(page.records))
            start = page.next

        assert found == (list(range(6, -1, -1)) if newest_first else list(range(7)))
        assert sizes == [3, 3, 1]


# -- flows -----------------------------------------------------------------------------------


def numbered(nodes: Sequence[FlowNode]) -> list[Any]:
    return [(*numbers([node.record]), numbered(node.children)) for node in nodes]


async def test_a_flow_is_a_tree_of_causes(path: Path) -> None:
    def caused(number: int, by: str, depth: int) -> Record:
        return make_record(
            number, message_id=f"m{number}", causation_id=by, correlation_id="m0", depth=depth
        )

    async with SqliteJournal(path) as journal:
        await append(
            journal,
            make_record(0, message_id="m0"),
            caused(1, "m0", 1),
            make_record(8),
            caused(2, "m1", 2),
            caused(3, "m0", 1),
            caused(4, "lost", 5),
        )

        tree: list[Any] = [(0, [(1, [(2, [])]), (3, [])]), (4, [])]
        assert numbered(await journal.flow("m0")) == tree
        assert await journal.flow("unknown") == ()


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


async def test_the_deliveries_of_a_message_come_by_time(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        record = make_record(0)
        failed = delivery(
            record.message_id, TIME + 1, outcome=Outcome.FAILED, error="no stock", offset=1
        )
        ok = delivery(record.message_id, TIME + 2, attempt=2, offset=1)
        other = delivery(record.message_id, TIME + 1.5, handler="audit")
        await journal.commit([Append(record), ok, failed, other, delivery("unlogged", TIME)])

        found = await journal.deliveries(record.message_id)

        assert found == [failed.delivery, other.delivery, ok.delivery]
        assert await journal.deliveries("unlogged") == [delivery("unlogged", TIME).delivery]
        assert await journal.deliveries("unknown") == []


async def test_deliveries_are_counted_by_minute_handler_and_outcome(path: Path) -> None:
    minute = TIME - TIME % 60
    async with SqliteJournal(path) as journal:
        await journal.commit(
            [
                delivery("a", minute - 0.5),
                delivery("b", minute),
                delivery("c", minute + 59.9),
                delivery("d", minute + 30, outcome=Outcome.FAILED),
                delivery("e", minute + 30, handler="audit"),
                delivery("f", minute + 60),
                delivery("g", minute + 120),
            ]
        )

        assert await journal.delivery_counts(minute, minute + 120) == [
            DeliveryCount("audit", Outcome.OK, minute, 1),
            DeliveryCount("mail", Outcome.FAILED, minute, 1),
            DeliveryCount("mail", Outcome.OK, minute, 2),
            DeliveryCount("mail", Outcome.OK, minute + 60, 1),
        ]


async def test_a_delivery_with_an_unknown_outcome_is_left_out(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await journal.commit([delivery("a", TIME), delivery("b", TIME)])
        change(path, "UPDATE msgbus_deliveries SET outcome = 'ak' WHERE message_id = 'a'")

        assert await journal.deliveries("a") == []
        assert [one.count for one in await journal.delivery_counts(0, TIME + 1)] == [1]


# -- letters ---------------------------------------------------------------------------------


async def test_letters_are_grouped_by_subscription_error_and_name(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 3)
        await append(journal, make_record(3, name="shop.Paid"))
        await put_dead(journal, 1, time=TIME + 3, error="first")
        await put_dead(journal, 2, time=TIME + 1, error="second")
        await put_dead(journal, 3, error_type="KeyError")
        await put_dead(journal, 4)
        await journal.commit([Put(make_row("audit", 1, State.DEAD))])
        await journal.commit([Put(make_row("audit", 2), LETTER)])  # waits for its replay

        name = "shop.OrderPlaced"
        assert await journal.letter_groups() == [
            LetterGroup("audit", "", name, 1, TIME, TIME, None),
            LetterGroup("orders", "KeyError", name, 1, TIME, TIME, None),
            LetterGroup("orders", "ValueError", name, 2, TIME + 1, TIME + 3, "second"),
            LetterGroup("orders", "ValueError", "shop.Paid", 1, TIME, TIME, None),
        ]


async def test_a_letter_that_holds_its_message_is_grouped_by_its_name(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 1)
        await put_dead(journal, 1, body=make_record(1, name="shop.Packed", payload=b"{\n}"))
        await put_dead(journal, 2, body=make_record(1, name="shop.Packed"))
        await put_dead(journal, 3, body=make_record(2))
        change(path, "UPDATE msgbus_pending SET body = x'00' WHERE offset = 3")

        groups = await journal.letter_groups()

        assert [(one.name, one.count) for one in groups] == [(None, 1), ("shop.Packed", 2)]
