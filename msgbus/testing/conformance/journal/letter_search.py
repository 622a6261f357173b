"""Conformance tests: search among the letters of dead rows (`Letters`)."""

from __future__ import annotations

from abc import ABC
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol, cast

from msgbus.journal.letters import Letters, LetterSelection, LetterTotal
from msgbus.journal.operations import Drop, Put
from msgbus.journal.ports import Journal
from msgbus.journal.records import LETTERS, Letter, State
from msgbus.testing.conformance.journal.kit import (
    TIME,
    JournalSuite,
    append,
    make_record,
    make_row,
    row_of,
)


class SearchableJournal(Journal, Letters, Protocol):
    """A journal that searches letters."""


PLACED: Final = "shop.OrderPlaced"

CHOICES: Final[list[tuple[LetterSelection, list[int]]]] = [
    (LetterSelection(), [1, 2, 3, 4, 5]),
    (LetterSelection(message_ids=["m1", "m4", "unknown"]), [1, 4]),
    (LetterSelection(message_ids=[]), []),
    (LetterSelection(names=["shop.Paid"]), [2, 4]),
    (LetterSelection(names=["shop.Paid", PLACED]), [1, 2, 3, 4, 5]),
    (LetterSelection(handler="orders"), [1, 3]),
    (LetterSelection(handler="mail"), [2, 4]),
    (LetterSelection(error_type="KeyError"), [3, 4]),
    (LetterSelection(session_id="s"), [2]),
    (LetterSelection(since=TIME + 3), [3, 4, 5]),
    (LetterSelection(until=TIME + 3), [1, 2]),
    (LetterSelection(since=TIME + 2, until=TIME + 4, statuses=["dead"]), [2, 3]),
    (LetterSelection(statuses=["dead"]), [1, 2, 3, 5]),
    (LetterSelection(statuses=["replayed"]), [4]),
    (LetterSelection(statuses=["dead", "replayed"]), [1, 2, 3, 4, 5]),
    (LetterSelection(answered=True), [5]),
    (LetterSelection(answered=False, upto=3), [1, 2, 3]),
    (LetterSelection(handler="mail", error_type="KeyError", names=["shop.Paid"]), [4]),
]
"""What to look for, and the numbers of the letters that have it."""


def _letter(number: int, error_type: str = "ValueError", **changes: Any) -> Letter:
    letter = Letter(error_type, "no stock", TIME, TIME + number)
    return letter._replace(**changes)


async def _put(journal: Journal, name: str, offset: int, letter: Letter, **changes: Any) -> None:
    row = make_row(name, offset, State.DEAD, error=f"error {offset}", **changes)
    await journal.commit([Put(row, letter)])


class LetterConformance(JournalSuite, ABC):
    """Tests of a journal that searches letters."""

    @asynccontextmanager
    async def with_letters(self) -> AsyncGenerator[SearchableJournal]:
        """Open a journal with five letters, of two subscriptions and of none."""
        async with self.opened() as opened:
            journal = cast("SearchableJournal", opened)
            records = [
                make_record(number, message_id=f"m{number}", name=name, session_id=session)
                for number, (name, session) in enumerate(
                    [
                        (PLACED, None),
                        ("shop.Paid", "s"),
                        (PLACED, None),
                        ("shop.Paid", None),
                    ],
                    1,
                )
            ]
            await append(journal, *records)
            await _put(journal, "orders", 1, _letter(1))
            await _put(journal, "bills", 2, _letter(2, handler="mail"))
            await _put(journal, "orders", 3, _letter(3, "KeyError"))
            await _put(
                journal, "bills", 4, _letter(4, "KeyError", handler="mail", status="replayed")
            )
            held = make_record(5, message_id="m5")
            await _put(journal, LETTERS, 1, _letter(5, handler="x", answered=True), body=held)
            yield journal

    async def test_letters_are_found_by_everything_given(self) -> None:
        async with self.with_letters() as journal:
            for which, expected in CHOICES:
                found = await journal.find_letters(which)

                assert [one.number for one in found] == expected, which
                assert await journal.count_letters(which) == len(expected), which

    async def test_a_letter_comes_with_its_row_and_its_message(self) -> None:
        async with self.with_letters() as journal:
            first, *_, last = await journal.find_letters(LetterSelection())

            assert first.row == await row_of(journal, "orders", 1)
            assert first.letter == await journal.letter(first.row)
            assert first.record == await journal.message("m1")
            assert last.record is not None
            assert last.record.message_id == "m5"

    async def test_pages_of_letters_follow_one_another(self) -> None:
        async with self.with_letters() as journal:
            after, found = 0, list[int]()
            while page := await journal.find_letters(LetterSelection(), after=after, limit=2):
                found += [one.number for one in page]
                after = page[-1].number

            assert found == [1, 2, 3, 4, 5]

    async def test_letters_are_counted_by_error_handler_and_name(self) -> None:
        async with self.with_letters() as journal:
            await _put(journal, "orders", 2, _letter(9, "KeyError", first_attempt=TIME - 9))
            totals = await journal.total_letters(LetterSelection(statuses=["dead"]))

            assert totals == [
                LetterTotal("KeyError", "orders", PLACED, 1, TIME, TIME + 3, "error 3"),
                LetterTotal("KeyError", "orders", "shop.Paid", 1, TIME - 9, TIME + 9, "error 2"),
                LetterTotal("ValueError", "mail", "shop.Paid", 1, TIME, TIME + 2, "error 2"),
                LetterTotal("ValueError", "orders", PLACED, 1, TIME, TIME + 1, "error 1"),
                LetterTotal("ValueError", "x", PLACED, 1, TIME, TIME + 5, "error 1"),
            ]
            both = await journal.total_letters(LetterSelection(names=[PLACED]))
            assert [(one.error_type, one.handler, one.size) for one in both] == [
                ("KeyError", "orders", 1),
                ("ValueError", "orders", 1),
                ("ValueError", "x", 1),
            ]

    async def test_a_letter_that_is_being_replayed_is_not_dead(self) -> None:
        async with self.with_letters() as journal:
            row = await row_of(journal, "orders", 1)
            waiting = row.moved(State.WAITING, time=TIME, due=TIME)
            await journal.commit([Put(waiting, _letter(1, status="replaying"))])

            dead = await journal.find_letters(LetterSelection(statuses=["dead"]))
            assert [one.number for one in dead] == [2, 3, 5]
            assert await journal.count_letters(LetterSelection(statuses=["dead"])) == 3

    async def test_numbers_of_letters_are_never_used_again(self) -> None:
        async with self.with_letters() as journal:
            assert await journal.last_letter() == 5
            await journal.commit([Drop(await row_of(journal, LETTERS, 1))])

            assert await journal.last_letter() == 5
            assert await journal.count_letters(LetterSelection()) == 4
            await _put(journal, "orders", 4, _letter(6))
            assert await journal.last_letter() == 6
