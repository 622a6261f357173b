"""Enqueued commands: kept in the journal, handled by whoever can, tried again, given up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from msgbus import (
    BusClosedError,
    BusConfig,
    Command,
    CommandResultEvent,
    ConfigurationError,
    Context,
    MessageBus,
    Refusal,
    TicketFailedError,
    Unhandleable,
)
from msgbus.bus.durable.tickets import TicketState
from msgbus.errors import StoredMessageError, WrongMessageTypeError
from msgbus.journal.codec import MessageCodec
from msgbus.journal.operations import Append
from tests.durable_shop import (
    CountOrders,
    DownError,
    Place,
    Placed,
    journal_of,
    outcomes,
    recorded,
)
from tests.fakes import let_others_run, logged
from tests.unit.durable.conftest import Site
from tests.unit.durable.packing import QUEUE, Pack, PackGift, Slow, Worker, letters, packing

# -- the way of a command ----------------------------------------------------------------------


async def test_an_enqueued_command_is_handled_and_recorded_once(site: Site) -> None:
    worker, command = Worker(), Pack(number=4)
    bus = packing(site, worker)

    async with bus:
        ticket = await bus.enqueue(command)
        assert ticket.message_id == command.message_id
        assert await ticket.result(timeout=30) == 40
        await bus.settled()

        assert worker.attempts == [(4, 1)]
        assert await recorded(bus) == [("packing.Pack", "command")]
        assert await outcomes(bus, command.message_id) == [("Worker", 1, "ok")]
        assert await ticket.state() is TicketState.DONE
        assert bus.stats().commands["Worker"].handled == 1
        report = await bus.stop()
        assert report.persisted == 0


async def test_it_is_durable_before_anybody_handles_it(site: Site) -> None:
    async with site.bus() as shop:
        ticket = await shop.enqueue(Pack(number=1))
        await shop.settled()
        assert await recorded(shop) == [("packing.Pack", "command")]
        assert await ticket.state() is TicketState.PENDING
    worker = Worker()

    async with packing(site, worker) as bus:
        await bus.settled()
        again = await bus.ticket(ticket.message_id)

        assert await again.result(timeout=30) == 10
        assert worker.attempts == [(1, 1)]


async def test_it_waits_for_its_delay_over_a_restart(site: Site) -> None:
    worker = Worker()
    async with packing(site, worker) as bus:
        await bus.enqueue(Pack(number=1), delay=60)
        await site.clock.advance(30)
        await bus.settled()
        report = await bus.stop()
    assert report.persisted == 1

    async with packing(site, worker) as bus:
        await site.clock.advance(29)
        await bus.settled()
        assert worker.attempts == []
        await site.clock.advance(1)
        await bus.settled()

    assert worker.attempts == [(1, 1)]


async def test_settled_waits_for_what_is_due_and_for_what_comes_of_it(site: Site) -> None:
    bus = site.bus()
    seen: list[int] = []

    @bus.handles(Pack)
    async def pack(command: Pack, context: Context) -> int:
        context.emit(Placed(number=command.number))
        return 0

    @bus.on(Placed)
    async def note(event: Placed, context: Context) -> None:
        seen.append(event.number)
        if event.number < 3:
            await context.bus.enqueue(Pack(number=event.number + 1))

    async with bus:
        await bus.enqueue(Pack(number=1))
        await bus.settled(timeout=60)

        assert seen == [1, 2, 3]


async def test_cause_and_headers_go_with_it(site: Site) -> None:
    bus, first, command = site.bus(), Place(), Pack()
    caused: list[Placed] = []
    handled: list[Pack] = []

    @bus.handles(Place)
    async def place(message: Place, context: Context) -> str:
        await context.bus.enqueue(command, headers={"trace": "1"})
        return ""

    @bus.handles(Pack)
    async def pack(message: Pack, context: Context) -> int:
        handled.append(message)
        context.emit(Placed())
        return 0

    @bus.on(Placed)
    async def note(event: Placed) -> None:
        caused.append(event)

    async with bus, bus.session("job-1") as session:
        await session.execute(first)
        await bus.settled()

    (packed,), (event,) = handled, caused
    assert packed is not command
    assert packed.message_id == command.message_id == event.causation_id
    assert packed.causation_id == packed.correlation_id == first.message_id
    assert event.correlation_id == first.message_id
    assert (packed.headers, event.headers) == ({"trace": "1"}, {"trace": "1"})
    assert packed.session_id == "job-1"


async def test_all_around_a_handler_is_around_an_enqueued_command_too(memory: Site) -> None:
    around: list[str] = []
    told: list[CommandResultEvent] = []

    async def note(message: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
        around.append(type(message).__name__)
        return await call_next(message)

    bus = packing(memory, Worker(fail=1))
    bus.add_middleware(note, types=Pack)

    @bus.on(CommandResultEvent)
    async def hear(event: CommandResultEvent) -> None:
        told.append(event)

    async with bus:
        await bus.enqueue(Pack(number=1))
        await bus.settled()
        await memory.clock.advance(1)
        await bus.settled()

    assert around == ["Pack", "Pack"]
    assert [(one.success, one.error) for one in told] == [
        (False, "DownError: password=[redacted]"),
        (True, None),
    ]


async def test_sync_handlers_and_subclasses_are_served_as_ever(site: Site) -> None:
    bus = site.bus()

    @bus.handles(Pack)
    def pack(command: Pack) -> int:
        assert isinstance(command, PackGift)
        return len(command.ribbon)

    async with bus:
        ticket = await bus.enqueue(PackGift(ribbon="green"))

        assert await ticket.result(timeout=30) == 5


async def test_enqueuing_a_command_twice_does_it_once(site: Site) -> None:
    worker, command = Worker(), Pack(number=1)

    async with packing(site, worker) as bus:
        first = await bus.enqueue(command)
        await bus.settled()
        second = await bus.enqueue(command)
        await bus.settled()

        assert await first.result(timeout=30) == await second.result(timeout=30) == 10
        assert worker.attempts == [(1, 1)]


async def test_a_command_joins_a_transaction(site: Site) -> None:
    worker = Worker()

    async with packing(site, worker) as bus:
        with suppress(LookupError):
            async with bus.transaction():
                await bus.enqueue(Pack(number=1))
                raise LookupError
        async with bus.transaction() as tx:
            if site.has_tables:
                tx.execute("CREATE TABLE parcels (number)")
            ticket = await bus.enqueue(Pack(number=2))
        assert await ticket.result(timeout=30) == 20
        await bus.settled()

    assert worker.attempts == [(2, 1)]


async def test_a_command_that_nobody_has_begun_can_be_taken_back(site: Site) -> None:
    worker = Worker()

    async with packing(site, worker) as bus:
        ticket = await bus.enqueue(Pack(), delay=5)
        begun = await bus.enqueue(Pack(number=1))
        await begun.result(timeout=30)

        assert await bus.unschedule(ticket.message_id)
        assert not await bus.unschedule(ticket.message_id)
        assert not await bus.unschedule(begun.message_id)
        with pytest.raises(TicketFailedError, match="taken back before it began"):
            await ticket.result(timeout=30)
        await site.clock.advance(10)
        await bus.settled()

    assert worker.attempts == [(1, 1)]


# -- what cannot be enqueued -------------------------------------------------------------------


async def test_without_a_journal_nothing_can_be_enqueued() -> None:
    async with MessageBus() as bus:
        with pytest.raises(ConfigurationError, match=r"bus\.enqueue\(\) needs a journal"):
            await bus.enqueue(Pack())
        with pytest.raises(ConfigurationError, match=r"bus\.ticket\(\) needs a journal"):
            await bus.ticket("id")


class Strange(Command[DownError]):
    pass


class Opaque(Command):
    thing: Any = None


async def test_what_cannot_be_enqueued_is_refused_at_once_and_leaves_nothing(memory: Site) -> None:
    async with memory.bus() as bus:
        with pytest.raises(WrongMessageTypeError, match="CountOrders is a query"):
            await bus.enqueue(CountOrders())
        with pytest.raises(WrongMessageTypeError, match="Events are published"):
            await bus.enqueue(Placed())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        with pytest.raises(ConfigurationError, match="Strange cannot be enqueued: its reply"):
            await bus.enqueue(Strange())
        with pytest.raises(StoredMessageError, match="Opaque"):
            await bus.enqueue(Opaque(thing=object()))
        with pytest.raises(ValueError, match="number of seconds"):
            await bus.enqueue(Pack(), delay=float("nan"))

        assert await recorded(bus) == []
    with pytest.raises(BusClosedError):
        await bus.enqueue(Pack())


# -- who handles it ----------------------------------------------------------------------------


async def test_only_a_bus_with_its_handler_takes_it(site: Site) -> None:
    worker = Worker()
    shop, elsewhere = site.bus(), site.bus()

    @elsewhere.handles(Place)
    async def place(command: Place) -> str:
        return ""

    async with shop, elsewhere:
        ticket = await shop.enqueue(Pack(number=2))
        await shop.settled()
        await elsewhere.settled()
        assert await ticket.state() is TicketState.PENDING
        async with packing(site, worker) as bus:
            await bus.settled()
        assert await (await shop.ticket(ticket.message_id)).result(timeout=30) == 20


async def test_of_several_buses_one_handles_it(site: Site) -> None:
    worker = Worker()
    buses = [packing(site, worker) for _ in range(3)]
    for bus in buses:
        await bus.start()
    tickets = [await buses[number % 3].enqueue(Pack(number=number)) for number in range(30)]

    for bus in buses:
        await bus.settled()

    assert sorted(worker.attempts) == [(number, 1) for number in range(30)]
    assert [await ticket.result(timeout=30) for ticket in tickets] == list(range(0, 300, 10))
    for bus in buses:
        await bus.stop()


async def test_a_handler_that_comes_later_is_found_and_one_that_goes_is_left_alone(
    memory: Site,
) -> None:
    worker = Worker()

    async with memory.bus() as bus:
        ticket = await bus.enqueue(Pack(number=1))
        await bus.settled()
        assert worker.attempts == []
        bus.register_command_handler(Pack, worker)
        await bus.settled()
        assert await ticket.result(timeout=30) == 10
        bus.unregister_command_handler(Pack)
        await bus.enqueue(Pack(number=2))
        await bus.settled()

        assert worker.attempts == [(1, 1)]


async def test_no_more_are_handled_at_once_than_the_config_says(memory: Site) -> None:
    slow = Slow()
    bus = packing(memory, slow, config=BusConfig(command_workers=2))

    async with bus:
        for number in range(5):
            await bus.enqueue(Pack(number=number))
        await slow.started.wait()
        await let_others_run()
        assert len(slow.begun) == 2
        slow.release.set()
        await bus.settled()

    assert sorted(slow.ended) == [0, 1, 2, 3, 4]


# -- failures ----------------------------------------------------------------------------------


async def test_a_failure_is_tried_again_later_and_the_journal_knows_each_try(site: Site) -> None:
    worker, command = Worker(fail=2), Pack(number=1)
    bus = packing(site, worker)

    async with bus:
        ticket = await bus.enqueue(command)
        await bus.settled()
        assert worker.attempts == [(1, 1)]
        for _ in range(4):
            await site.clock.advance(1)
            await bus.settled()

        assert await ticket.result(timeout=30) == 10
        assert worker.attempts == [(1, 1), (1, 2), (1, 3)]
        assert await outcomes(bus, command.message_id) == [
            ("Worker", 1, "failed"),
            ("Worker", 2, "failed"),
            ("Worker", 3, "ok"),
        ]
        assert await letters(bus) == []


async def test_a_pause_outlives_the_process(site: Site) -> None:
    worker = Worker(fail=1)
    async with packing(site, worker) as bus:
        await bus.enqueue(Pack(number=1))
        await bus.settled()
        report = await bus.stop()
    assert report.persisted == 1

    async with packing(site, worker) as bus:
        await site.clock.advance(1)
        await bus.settled()

    assert worker.attempts == [(1, 1), (1, 2)]


@pytest.mark.parametrize(("error", "attempts"), [(DownError, 9), (ValueError, 3)])
async def test_after_its_last_try_it_is_a_dead_letter_and_its_ticket_says_why(
    site: Site, caplog: pytest.LogCaptureFixture, error: type[Exception], attempts: int
) -> None:
    """Patience with an outage, little with an error of the message, and counted over restarts."""
    worker = Worker(fail=99, error=error)
    async with packing(site, worker) as bus:
        ticket = await bus.enqueue(Pack(number=1))
    for _ in range(attempts):
        async with packing(site, worker) as bus:
            await bus.settled()
        await site.clock.advance(601)

    text = f"{error.__name__}: password=[redacted]"
    async with packing(site, worker) as bus:
        await bus.settled()
        ticket = await bus.ticket(ticket.message_id)
        assert await letters(bus) == [(ticket.message_id, attempts, text, "retries exhausted")]
        with pytest.raises(
            TicketFailedError, match=rf"^Pack .* failed: {error.__name__}"
        ) as failed:
            await ticket.result(timeout=30)
        assert failed.value.error == text
        assert [attempt for _, attempt in worker.attempts] == list(range(1, attempts + 1))
        (entry,) = logged(caplog, "enqueued_command_failed")
        assert (entry["message_id"], entry["error"]) == (ticket.message_id, text)
        report = await bus.stop()
        assert report.persisted == 0


async def test_a_refusal_is_the_answer_and_no_dead_letter(site: Site) -> None:
    worker = Worker(fail=99, error=Refusal)

    async with packing(site, worker) as bus:
        ticket = await bus.enqueue(Pack(number=1))
        outcome = await ticket.wait(timeout=30)
        await bus.settled()

        assert (outcome.success, outcome.value) == (False, None)
        assert outcome.error == "Refusal: password=[redacted]"
        assert worker.attempts == [(1, 1)]
        assert await letters(bus) == []


async def test_what_is_not_to_be_retried_is_given_up_at_once(site: Site) -> None:
    async with packing(site, Worker(fail=99, error=Unhandleable)) as bus:
        ticket = await bus.enqueue(Pack(number=1))
        with pytest.raises(TicketFailedError):
            await ticket.result(timeout=30)

        (letter,) = await letters(bus)
        assert letter[1:] == (1, "Unhandleable: password=[redacted]", "not to be retried")


async def test_a_reply_that_cannot_be_kept_fails_the_ticket_and_runs_nothing_twice(
    site: Site,
) -> None:
    bus = site.bus()
    handled: list[int] = []

    @bus.handles(Pack)
    async def pack(command: Pack) -> Any:
        handled.append(command.number)
        return "none"

    async with bus:
        ticket = await bus.enqueue(Pack(number=1))
        with pytest.raises(TicketFailedError, match="was handled, but its reply cannot be kept"):
            await ticket.result(timeout=30)
        await site.clock.advance(5)
        await bus.settled()

        assert handled == [1]
        assert len(await letters(bus)) == 1


async def test_a_stored_command_that_does_not_fit_its_class_is_a_dead_letter(site: Site) -> None:
    record = MessageCodec().encode(Pack(), time=site.clock.time())
    broken = record._replace(payload=b'{"number":"many"}')
    worker = Worker()

    async with packing(site, worker) as bus:
        await journal_of(bus).commit([Append(broken, QUEUE)])
        ticket = await bus.ticket(broken.message_id)
        with pytest.raises(TicketFailedError, match="does not fit Pack"):
            await ticket.result(timeout=30)

        assert worker.attempts == []
        assert len(await letters(bus)) == 1
