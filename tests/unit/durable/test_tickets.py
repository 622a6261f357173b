"""Tickets: the result of an enqueued command, as a value of the right type, from anywhere."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from datetime import UTC, date, datetime
from decimal import Decimal
from math import inf
from pathlib import Path
from typing import Any, Generic
from uuid import UUID

import anyio
import anyio.lowlevel
import pytest
from pydantic import BaseModel
from typing_extensions import TypeVar

from msgbus import BusClosedError, Command, TicketFailedError
from msgbus.bus.durable import Ticket
from msgbus.bus.durable.replies import Replies, reply_type
from msgbus.bus.durable.tickets import TicketState
from msgbus.errors import (
    JournalFullError,
    JournalOpenError,
    StoredMessageError,
    TicketNotFoundError,
    TicketTimeoutError,
)
from msgbus.journal.operations import Reply
from msgbus.journal.records import Result
from tests.durable_shop import journal_of
from tests.fakes import let_others_run, logged
from tests.unit.durable.conftest import Site
from tests.unit.durable.packing import Pack, Slow, Worker, packing

T = TypeVar("T")


class Parcel(BaseModel):
    number: int
    sent: date


class Many(Command[list[T]], Generic[T]):
    pass


class Numbers(Many[int]):
    pass


class Nothing(Command):
    pass


REPLIES: list[tuple[Any, Any]] = [
    (int, 42),
    (UUID, UUID(int=7)),
    (Decimal, Decimal("1.10")),
    (datetime, datetime(2030, 1, 1, 12, tzinfo=UTC)),
    (float, inf),
    (bytes, b"\xff\x00"),
    (Parcel, Parcel(number=1, sent=date(2030, 1, 1))),
    (list[Parcel] | None, [Parcel(number=1, sent=date(2030, 1, 1))]),
    (dict[str, tuple[int, ...]], {"a": (1, 2)}),
    (None, None),
]


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "value"), REPLIES, ids=[str(kind) for kind, _ in REPLIES])
def test_a_reply_comes_back_as_what_the_command_promises(kind: Any, value: Any) -> None:
    class Ask(Command[kind]):
        pass

    replies = Replies()

    assert replies.load(Ask, replies.dump(Ask, value)) == value


def test_the_type_of_a_reply_is_found_wherever_it_is_said() -> None:
    class Heir(Numbers):
        pass

    assert reply_type(Numbers) == list[int]
    assert reply_type(Heir) == list[int]
    assert reply_type(Many) == list[Any]
    assert reply_type(Nothing) is Any


def test_without_the_class_a_reply_is_plain_data() -> None:
    assert Replies().load(None, b'{"number":1}') == {"number": 1}
    assert Replies().load(None, None) is None


def test_a_reply_that_does_not_fit_the_class_any_more_is_told() -> None:
    with pytest.raises(StoredMessageError, match="reply of Numbers is not what"):
        Replies().load(Numbers, b'"none"')


# -- waiting -----------------------------------------------------------------------------------


async def test_a_ticket_can_be_looked_up_and_asked_as_often_as_one_likes(site: Site) -> None:
    async with packing(site, Worker()) as bus:
        ticket = await bus.enqueue(Pack(number=2))
        outcome = await ticket.wait(timeout=30)
        again = await bus.ticket(ticket.message_id)

        assert (outcome.success, outcome.value, outcome.error) == (True, 20, None)
        assert outcome.message_id == ticket.message_id
        assert outcome.time == site.clock.time()
        assert await again.result() == await ticket.result() == 20
        assert repr(again) == f"<Ticket of Pack {ticket.message_id}>"


async def test_many_may_wait_and_each_gets_its_own(site: Site) -> None:
    slow, got = Slow(), dict[int, list[int]]()

    async def wait(ticket: Ticket[int], number: int) -> None:
        got.setdefault(number, []).append(await ticket.result())

    async with packing(site, slow) as bus:
        tickets = [await bus.enqueue(Pack(number=number)) for number in range(5)]
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for number, ticket in enumerate(tickets):
                    tasks.start_soon(wait, ticket, number)
                    tasks.start_soon(wait, ticket, number)
                await slow.started.wait()
                slow.release.set()

    assert got == {number: [number, number] for number in range(5)}


async def test_a_result_of_another_bus_is_heard_of(site: Site) -> None:
    slow = Slow()

    async with site.bus() as shop, packing(site, slow):
        ticket = await shop.enqueue(Pack(number=3))
        got: list[int] = []

        async def wait() -> None:
            got.append(await ticket.result())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            with anyio.fail_after(30):
                while not slow.begun:
                    await site.clock.advance(0.5)
                slow.release.set()
                while not got:
                    await site.clock.advance(0.5)

    assert got == [3]


async def test_a_wait_that_takes_too_long_ends_and_may_be_repeated(memory: Site) -> None:
    slow = Slow()

    async with packing(memory, slow) as bus:
        ticket = await bus.enqueue(Pack(number=1))
        await slow.started.wait()
        late: list[TimeoutError] = []

        async def wait() -> None:
            try:
                await ticket.result(timeout=5)
            except TicketTimeoutError as error:
                late.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await let_others_run()
            await memory.clock.advance(5)
        slow.release.set()
        (error,) = late
        assert str(error).startswith(f"Command {ticket.message_id} has no result after 5 s.")

        assert await ticket.result(timeout=30) == 1


async def test_a_command_that_was_never_enqueued_has_no_ticket(memory: Site) -> None:
    async with memory.bus() as bus:
        with pytest.raises(TicketNotFoundError, match="'unknown' was enqueued"):
            await bus.ticket("unknown")


async def test_a_ticket_without_its_class_gives_plain_data(memory: Site) -> None:
    async with memory.bus() as bus:
        await journal_of(bus).commit([Reply("x", 2.0, b"[1]"), Reply("y", 2.0, error="no")])
        ticket = await bus.ticket("x")

        assert await ticket.result() == [1]
        assert repr(ticket) == "<Ticket of command x>"
        with pytest.raises(TicketFailedError, match="The command y failed: no"):
            await (await bus.ticket("y")).result()


async def test_who_waits_when_the_bus_stops_is_told_so(site: Site) -> None:
    bus = site.bus() if site.has_tables else site.bus(journal="memory:")
    ended: list[str] = []

    async def wait(ticket: Ticket[int]) -> None:
        try:
            await ticket.result()
        except BusClosedError as error:
            ended.append(str(error))

    await bus.start()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, await bus.enqueue(Pack()))
        await let_others_run()
        with anyio.fail_after(10):
            while (await bus.stop()).persisted:
                pass

    assert len(ended) == 1
    assert "stopped before command" in ended[0]


async def test_who_asks_the_journal_while_the_bus_stops_is_told_so(memory: Site) -> None:
    async with memory.bus() as bus:
        ticket = await bus.enqueue(Pack())
        await journal_of(bus).close()
        with pytest.raises(BusClosedError, match="stopped before command"):
            await ticket.result()


async def test_a_journal_that_cannot_be_read_for_a_while_loses_no_result(
    memory: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[int] = []
    async with memory.bus() as shop:
        inner = journal_of(shop).results

        async def fail_once(message_ids: Collection[str]) -> list[Result]:
            if not failures:
                failures.append(1)
                raise JournalFullError("Try again.")
            return await inner(message_ids)

        monkeypatch.setattr(journal_of(shop), "results", fail_once)
        ticket = await shop.enqueue(Pack())
        got: list[int] = []

        async def wait() -> None:
            got.append(await ticket.result())

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                while not failures:
                    await anyio.lowlevel.checkpoint()
                await journal_of(shop).commit([Reply(ticket.message_id, 2.0, b"7")])

    assert got == [7]
    assert logged(caplog, "journal_task_failed")[0]["task"] == "tickets"


def test_the_errors_of_tickets_pickle() -> None:
    for error in (
        TicketFailedError("id", "no", message_type="Pack"),
        TicketTimeoutError("id", seconds=1.0),
        TicketNotFoundError("id"),
    ):
        copy = pickle.loads(pickle.dumps(error))

        assert (type(copy), str(copy)) == (type(error), str(error))
        assert copy.message_id == "id"


async def test_a_ticket_stays_pending_until_somebody_is_there(memory: Site) -> None:
    async with memory.bus() as bus:
        ticket = await bus.enqueue(Pack())
        await bus.settled()

        assert await ticket.state() is TicketState.PENDING


async def test_a_journal_that_cannot_be_opened_says_so_and_nothing_else(tmp_path: Path) -> None:
    bus = packing(Site(tmp_path / "missing"), Worker())

    with pytest.raises(JournalOpenError, match="missing"):
        await bus.start()
