"""Conformance tests: look-ups for people (`Questions`); for engines that have them."""

from __future__ import annotations

from abc import ABC
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol, cast

from msgbus.journal.operations import Append, Note, Put
from msgbus.journal.ports import Journal, Questions
from msgbus.journal.records import DeliveryRecord, Kind, Outcome, Record, State
from msgbus.journal.reports import DeliveryCount, FlowNode, LetterCount
from msgbus.testing.conformance.journal.kit import (
    LETTER,
    TIME,
    JournalSuite,
    append,
    fill,
    make_record,
    make_row,
    numbers,
)


class AnsweringJournal(Journal, Questions, Protocol):
    """A journal that answers questions."""


def make_note(message_id: str, time: float, **changes: Any) -> Note:
    """Make the note of a delivery; `changes` are fields of `DeliveryRecord`."""
    record = DeliveryRecord(message_id, "mail", 1, Outcome.OK, 0.1, 0.2, time)
    return Note(record._replace(**changes))


async def put_dead(journal: Journal, offset: int, **changes: Any) -> None:
    """Dead-letter a message; `changes` are fields of `Pending`, and `error_type`."""
    error_type = changes.pop("error_type", "ValueError")
    row = make_row("orders", offset, State.DEAD, **changes)
    await journal.commit([Put(row, LETTER._replace(error_type=error_type))])


TERMS: Final[list[tuple[dict[str, Any], list[int]]]] = [
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
    ({"topic": "unknown"}, []),
]
"""What to look for, and the numbers of the messages that have it."""


class QuestionConformance(JournalSuite, ABC):
    """Tests of a journal that answers questions: messages, deliveries and letters are found."""

    @asynccontextmanager
    async def asked(self) -> AsyncGenerator[AnsweringJournal]:
        """Open a new journal that answers questions."""
        async with self.opened() as journal:
            yield cast("AnsweringJournal", journal)

    # -- messages --------------------------------------------------------------------------------

    async def test_messages_have_everything_asked_for(self) -> None:
        async with self.asked() as journal:
            await append(
                journal,
                make_record(0, message_id="zero", topic="a"),
                make_record(1, key="k", topic="b"),
                make_record(2, key="k", name="Paid", session_id="s"),
                make_record(3, kind=Kind.COMMAND, session_id="s", correlation_id="zero"),
                make_record(4, name="Paid", topic="b", correlation_id="zero"),
            )
            for terms, found in TERMS:
                oldest = await journal.find_messages(**terms)
                newest = await journal.find_messages(**terms, newest_first=True)

                assert numbers(oldest.records) == found, terms
                assert numbers(newest.records) == found[::-1], terms
                assert oldest.next is newest.next is None

    async def test_pages_follow_one_another_without_a_gap(self) -> None:
        async with self.asked() as journal:
            await fill(journal, 7)
            for terms in ({}, {"topic": "shop.orders"}, {"since": TIME}):
                for newest_first in (False, True):
                    found: list[int] = []
                    sizes: list[int] = []
                    start: int | None = None
                    while start is not None or not found:
                        page = await journal.find_messages(
                            **cast("dict[str, Any]", terms),
                            start=start,
                            limit=3,
                            newest_first=newest_first,
                        )
                        found += numbers(page.records)
                        sizes.append(len(page.records))
                        start = page.next

                    assert found == sorted(range(7), reverse=newest_first)
                    assert sizes == [3, 3, 1]

    async def test_a_clock_that_jumped_back_hides_no_message(self) -> None:
        async with self.asked() as journal:
            await append(journal, *(make_record(n) for n in (1, 9, 0, 2)))

            assert await journal.offset_at(TIME + 2) == 2
            page = await journal.find_messages(since=TIME + 1, until=TIME + 3)
            assert numbers(page.records) == [1, 2]

    async def test_a_flow_is_a_tree_of_causes(self) -> None:
        def caused(number: int, by: str, depth: int) -> Record:
            return make_record(
                number, message_id=f"m{number}", causation_id=by, correlation_id="m0", depth=depth
            )

        async with self.asked() as journal:
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

    # -- deliveries ------------------------------------------------------------------------------

    async def test_the_deliveries_of_a_message_come_by_time(self) -> None:
        async with self.asked() as journal:
            record = make_record(0)
            failed = make_note(
                record.message_id, TIME + 1, outcome=Outcome.FAILED, error="no stock", offset=1
            )
            ok = make_note(record.message_id, TIME + 2, attempt=2, offset=1)
            other = make_note(record.message_id, TIME + 1.5, handler="audit")
            await journal.commit([Append(record), ok, failed, other, make_note("unlogged", TIME)])

            found = await journal.deliveries(record.message_id)

            assert found == [failed.delivery, other.delivery, ok.delivery]
            assert await journal.deliveries("unlogged") == [make_note("unlogged", TIME).delivery]
            assert await journal.deliveries("unknown") == []

    async def test_deliveries_are_counted_by_minute_handler_and_outcome(self) -> None:
        minute = TIME - TIME % 60
        async with self.asked() as journal:
            await journal.commit(
                [
                    make_note("a", minute - 0.5),
                    make_note("b", minute),
                    make_note("c", minute + 59.9),
                    make_note("d", minute + 30, outcome=Outcome.FAILED),
                    make_note("e", minute + 30, handler="audit"),
                    make_note("f", minute + 60),
                    make_note("g", minute + 120),
                ]
            )

            assert await journal.delivery_counts(minute, minute + 120) == [
                DeliveryCount("audit", Outcome.OK, minute, 1),
                DeliveryCount("mail", Outcome.FAILED, minute, 1),
                DeliveryCount("mail", Outcome.OK, minute, 2),
                DeliveryCount("mail", Outcome.OK, minute + 60, 1),
            ]

    # -- letters ---------------------------------------------------------------------------------

    async def test_letters_are_grouped_by_subscription_error_and_name(self) -> None:
        async with self.asked() as journal:
            await fill(journal, 3)
            await append(journal, make_record(3, name="shop.Paid"))
            await put_dead(journal, 1, time=TIME + 3, error="first")
            await put_dead(journal, 2, time=TIME + 1, error="second")
            await put_dead(journal, 3, error_type="KeyError")
            await put_dead(journal, 4)
            await put_dead(journal, 9, body=make_record(9, name="shop.Packed", payload=b"{\n}"))
            await journal.commit([Put(make_row("audit", 1, State.DEAD))])
            await journal.commit([Put(make_row("audit", 2), LETTER)])  # waits for its replay

            name = "shop.OrderPlaced"
            assert await journal.letter_groups() == [
                LetterCount("audit", "", name, 1, TIME, TIME, None),
                LetterCount("orders", "KeyError", name, 1, TIME, TIME, None),
                LetterCount("orders", "ValueError", name, 2, TIME + 1, TIME + 3, "second"),
                LetterCount("orders", "ValueError", "shop.Packed", 1, TIME, TIME, None),
                LetterCount("orders", "ValueError", "shop.Paid", 1, TIME, TIME, None),
            ]


def numbered(nodes: Sequence[FlowNode]) -> list[Any]:
    """Return trees of the numbers that records were made with."""
    return [(*numbers([node.record]), numbered(node.children)) for node in nodes]
