"""Conformance tests: parked rows go on in order, and dead letters are replayed or discarded."""

from __future__ import annotations

from msgbus.errors import StaleError
from msgbus.journal.operations import Drop, Put
from msgbus.journal.ports import Journal
from msgbus.journal.records import Pending, State
from msgbus.testing.conformance.journal.kit import (
    LETTER,
    STATES,
    TIME,
    JournalSuite,
    claimed_offsets,
    end,
    expected,
    fill,
    join,
    make_row,
    row_of,
    states_of,
)

WAITING, CLAIMED, PARKED = State.WAITING, State.CLAIMED, State.PARKED
DEAD, DONE, KEPT, DAMAGED = State.DEAD, State.DONE, State.KEPT, State.DAMAGED


async def _write(journal: Journal, *rows: Pending) -> None:
    """Append a message for each row, and write the rows."""
    await fill(journal, max(row.offset for row in rows))
    await journal.commit([Put(row, LETTER if row.state is DEAD else None) for row in rows])


def _rows(*states: State, key: str | None = "a") -> list[Pending]:
    """Make rows of one key, from message 1 on."""
    return [make_row("orders", offset, state, key=key) for offset, state in enumerate(states, 1)]


class LetterTests(JournalSuite):
    """Rows of one key go on one after another, in order."""

    # -- promotion -------------------------------------------------------------------------------

    async def test_dropping_a_row_lets_the_next_of_its_key_go(self) -> None:
        async with self.both() as (journal, other):
            rows = _rows(WAITING, PARKED, PARKED)
            await _write(journal, *rows)

            await journal.commit([Drop(rows[0])])

            promoted = await row_of(other, "orders", 2)
            assert promoted.state is WAITING
            assert promoted.due is not None
            assert promoted.due <= TIME
            assert (promoted.version, promoted.attempt, promoted.alone) == (2, 0, False)
            assert await states_of(other, "orders") == [WAITING, PARKED]
            with expected(StaleError):
                await journal.commit([Drop(rows[1])])

    async def test_a_row_that_runs_alone_does_so_when_it_goes(self) -> None:
        async with self.opened() as journal:
            first, second = _rows(WAITING, PARKED)
            await _write(journal, first, second._replace(alone=True))

            await journal.commit([Drop(first)])

            member = await join(journal)
            assert await journal.claim(member, "orders", 1, TIME) == []
            assert len(await journal.claim(member, "orders", 1, TIME, alone=True)) == 1

    async def test_a_row_that_is_written_lets_the_next_go_if_told_so(self) -> None:
        for state in (DEAD, DONE, KEPT):
            async with self.opened() as journal:
                rows = _rows(WAITING, PARKED, PARKED)
                await _write(journal, *rows)
                still = rows[0].moved(DEAD, time=TIME)
                await journal.commit([Put(still, LETTER)])
                assert await states_of(journal, "orders") == [DEAD, PARKED, PARKED]

                moved = still.moved(state, time=TIME, key=None)
                await journal.commit([Put(moved, promote=True)])

                assert await states_of(journal, "orders") == [state, WAITING, PARKED]
                assert await journal.row("orders", 1) == moved

    async def test_only_a_parked_row_is_let_go(self) -> None:
        async with self.opened() as journal:
            rows = _rows(WAITING, PARKED)
            await _write(journal, *rows)

            await journal.commit([Put(rows[0].moved(DONE, time=TIME), promote=True)])

            assert await states_of(journal, "orders") == [DONE, WAITING]

    async def test_the_next_goes_by_the_key_that_the_stored_row_had(self) -> None:
        async with self.opened() as journal:
            rows = _rows(WAITING, PARKED)
            others = [
                make_row("orders", 3, DEAD, key="b"),
                make_row("orders", 4, PARKED, key="b"),
            ]
            await _write(journal, *rows, *others)

            await journal.commit([Drop(rows[0]._replace(key="b"))])

            assert await states_of(journal, "orders") == [WAITING, DEAD, PARKED]

    async def test_no_row_goes_while_another_of_its_key_holds_it_back(self) -> None:
        for state in (WAITING, CLAIMED, DEAD, DAMAGED):
            async with self.opened() as journal:
                member = await join(journal)
                rows = _rows(WAITING, state, PARKED, PARKED)
                if state is CLAIMED:
                    rows[1] = rows[1]._replace(owner=member.id)
                await _write(journal, *rows)

                retry = rows[0].moved(WAITING, time=TIME, due=0.0)
                await journal.commit([Put(retry, promote=True)])
                assert await states_of(journal, "orders") == [WAITING, state, PARKED, PARKED]
                await journal.commit([Drop(retry)])
                assert await states_of(journal, "orders") == [state, PARKED, PARKED]
                await journal.commit([Drop(rows[2])])
                assert await states_of(journal, "orders") == [state, PARKED]
                await journal.commit([Drop(rows[1])], member)

                assert await states_of(journal, "orders") == [WAITING]

    async def test_a_discarded_later_letter_lets_no_row_past_the_first(self) -> None:
        # The last one was dead-lettered as there were too many behind the first.
        async with self.opened() as journal:
            rows = _rows(DEAD, PARKED, DEAD)
            await _write(journal, *rows)

            await journal.commit([Drop(rows[2])])

            assert await states_of(journal, "orders") == [DEAD, PARKED]

    async def test_a_dead_row_without_a_key_holds_nothing_back(self) -> None:
        async with self.opened() as journal:
            first, dead, parked = _rows(WAITING, DEAD, PARKED)
            await _write(journal, first, dead._replace(key=None), parked)

            await journal.commit([Drop(first)])

            assert await states_of(journal, "orders") == [DEAD, WAITING]

    async def test_keys_partitions_and_subscriptions_are_apart(self) -> None:
        async with self.opened() as journal:
            await _write(journal, *_rows(WAITING, PARKED))
            others = [
                make_row("orders", 3, key="b"),
                make_row("orders", 4, PARKED, key="b"),
                make_row("orders", 5, key="a", partition=1),
                make_row("orders", 6, PARKED, key="a", partition=1),
                make_row("bills", 7, key="a"),
                make_row("bills", 8, PARKED, key="a"),
                make_row("orders", 9),
            ]
            await _write(journal, *others)

            await journal.commit([Drop(others[-1])])
            assert (await row_of(journal, "orders", 2)).state is PARKED
            await journal.commit([Drop(make_row("orders", 1, key="a"))])

            assert (await row_of(journal, "orders", 2)).state is WAITING
            found = await journal.find(None, STATES)
            assert found[1:] == others[:-1]

    # -- parking ---------------------------------------------------------------------------------

    async def test_a_row_is_parked_behind_any_earlier_row_of_its_key(self) -> None:
        for state in (WAITING, CLAIMED, DEAD, DAMAGED):
            async with self.opened() as journal:
                rows = _rows(state, PARKED, PARKED)
                if state is CLAIMED:
                    rows[0] = rows[0]._replace(owner=(await join(journal)).id)
                await _write(journal, *rows)

                assert await journal.find("orders", STATES) == rows

    async def test_a_row_with_nothing_to_wait_for_is_not_parked(self) -> None:
        async with self.both() as (journal, other):
            rows = [
                make_row("orders", 1, DEAD),
                make_row("orders", 2, DONE),
                make_row("orders", 3, key="b"),
                make_row("orders", 4, key="a", partition=1),
                make_row("bills", 5, key="a"),
                make_row("orders", 9, key="a"),
            ]
            await _write(journal, *rows)
            parked = make_row("orders", 6, PARKED, key="a", alone=True, attempt=2)
            behind = make_row("orders", 7, PARKED, key="a")

            await journal.commit([Put(parked), Put(behind)])

            free = parked._replace(state=WAITING, due=0.0)
            assert await other.find("orders", STATES, key="a", after=rows[3]) == [
                free,
                behind,
                rows[-1],
            ]
            keyless = make_row("orders", 8, PARKED)
            await journal.commit([Put(keyless)])
            assert (await row_of(other, "orders", 8)).state is WAITING
            again = free.moved(PARKED, time=TIME)
            await journal.commit([Put(again)])
            stored = await other.row("orders", 6)
            assert stored == again._replace(state=WAITING, due=0.0)

    # -- letters ---------------------------------------------------------------------------------

    async def test_a_dead_row_has_its_letter(self) -> None:
        async with self.both() as (journal, other):
            (row,) = _rows(WAITING)
            await _write(journal, row)
            dead = row.moved(DEAD, time=TIME, attempt=3, error="no stock")
            letter = LETTER._replace(
                handler="shop.pack", target="größe", scope="session", answered=True, note="seen"
            )

            await journal.commit([Put(dead, letter)])

            for one in (journal, other):
                assert await one.find("orders", [DEAD]) == [dead]
                assert await one.letter(dead) == letter
            assert await journal.letter(make_row("orders", 2, DEAD)) is None
            assert await journal.letter(make_row("bills", 1, DEAD)) is None

    async def test_a_letter_stays_while_its_row_is_replayed(self) -> None:
        async with self.both() as (journal, other):
            row = make_row("orders", 1, DEAD, attempt=5, error="no stock")
            await _write(journal, row)
            replayed = row.moved(WAITING, time=TIME, due=0.0, attempt=0)

            await journal.commit([Put(replayed)])
            assert await other.letter(replayed) == LETTER
            with expected(StaleError):
                await journal.commit([Put(replayed)])
            for alone in (False, True):
                member = await join(other)
                (claim,) = await other.claim(member, "orders", 1, TIME, alone=alone)
                assert (claim.row.attempt, claim.record.offset) == (int(alone), 1)
                assert await journal.letter(claim.row) == LETTER
                await end(journal, member)
                assert await journal.letter(claim.row) == LETTER

    async def test_a_letter_is_replaced_in_any_state(self) -> None:
        async with self.opened() as journal:
            (row,) = _rows(DEAD)
            await _write(journal, row)
            member = await join(journal)
            for number, state in enumerate((DEAD, WAITING, CLAIMED, DAMAGED, DEAD)):
                due = 0.0 if state is WAITING else None
                owner = member.id if state is CLAIMED else None
                row = row.moved(state, time=TIME, due=due, owner=owner)
                letter = LETTER._replace(note=f"note {number}")

                await journal.commit([Put(row, letter)], member)
                with expected(StaleError):
                    await journal.commit([Put(row, LETTER._replace(note="late"))], member)

                assert await journal.letter(row) == letter
            row = row.moved(DEAD, time=TIME)
            await journal.commit([Put(row)])
            assert await journal.letter(row) == LETTER._replace(note="note 4")

    async def test_a_letter_goes_when_its_row_is_dropped_done_or_kept(self) -> None:
        for state in (None, DONE, KEPT):
            async with self.opened() as journal:
                (row,) = _rows(DEAD)
                await _write(journal, row)
                settled = row if state is None else row.moved(state, time=TIME, key=None)

                await journal.commit([Drop(row) if state is None else Put(settled)])

                assert await journal.letter(row) is None
                version = 1 if state is None else settled.version + 1
                await journal.commit([Put(row._replace(version=version))])
                assert await journal.letter(row) is None

    async def test_what_is_parked_behind_a_letter_goes_on_in_order(self) -> None:
        for is_replayed in (True, False):
            async with self.opened() as journal:
                rows = _rows(DEAD, PARKED, PARKED, PARKED)
                await _write(journal, *rows)
                member = await join(journal)
                replay = Put(rows[0].moved(WAITING, time=TIME, due=0.0, attempt=0))
                await journal.commit([replay if is_replayed else Drop(rows[0])])
                handled: list[int] = []

                while claims := await journal.claim(member, "orders", 10, TIME):
                    handled += claimed_offsets(claims)
                    assert len(claims) == 1
                    await journal.commit([Drop(claims[0].row)], member)

                assert handled == ([1, 2, 3, 4] if is_replayed else [2, 3, 4])
                assert await journal.count() == {}
