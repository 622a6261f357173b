"""Conformance tests: what a journal has when it is opened again."""

from __future__ import annotations

from abc import ABC
from collections.abc import Awaitable, Callable

from msgbus.journal.operations import Append, Pass, Put, Reply, Save
from msgbus.journal.ports import Journal
from msgbus.journal.records import DELAYED, Instance, State
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    LETTER,
    TIME,
    JournalSuite,
    append,
    fill,
    make_command,
    make_record,
    make_row,
    snapshot,
    take,
)


class DurableConformance(JournalSuite, ABC):
    """Tests of a journal that outlives the process: `beside` opens a closed one again."""

    async def closed(self, fill: Callable[[Journal], Awaitable[object]]) -> Journal:
        """Make a journal, fill it and close it."""
        journal = self.make()
        async with journal:
            await fill(journal)
        return journal

    async def test_everything_is_there_when_it_is_opened_again(self) -> None:
        before: list[object] = []

        async def write(journal: Journal) -> None:
            member = await journal.join("process", {"orders": "v1"})
            await fill(journal, 3, key="größe", headers={"a": "b"}, causation_id="c", depth=2)
            cursor = await take(journal, member, "orders", EVENTS)
            await journal.commit(
                [
                    Append(make_command(3), queue="commands:shop.Pack", due=TIME, unique="u"),
                    Append(make_record(4, session_id="s"), queue=DELAYED, due=TIME),
                    Put(make_row("orders", 1, State.DEAD, key="k"), LETTER),
                    Reply("id", TIME, b"{}"),
                    Save(Instance("timer", "a", b"state", TIME, 1)),
                    Pass(cursor, 1, 2),
                ],
                member,
            )
            before.append(await snapshot(journal))

        journal = await self.closed(write)

        async with self.beside(journal) as again:
            assert await snapshot(again) == before[0]
            assert await again.result("id") is not None
            assert await fill(again, 1) == [5]

    async def test_a_message_is_known_when_it_is_opened_again(self) -> None:
        record = make_record(0)
        journal = await self.closed(lambda journal: append(journal, record))

        async with self.beside(journal) as again:
            (appended,) = await again.commit([Append(record)])

            assert (appended.offset, appended.is_duplicate) == (1, True)

    async def test_it_promises_to_survive_the_process(self) -> None:
        async with self.opened() as journal:
            assert journal.promises.survives_kill
