"""Enqueued commands whose process stops, dies, stalls or loses them."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from msgbus import BusConfig, Context, DrainReport, MessageBus, TicketFailedError
from msgbus.durability.claims import row_id
from msgbus.errors import JournalClosedError, JournalFullError
from msgbus.journal import MemoryJournal
from msgbus.journal.operations import CloseTicket, Operation, Schedule, Unschedule
from msgbus.journal.records import Ack, TicketState
from msgbus.resilience import CircuitBreakerConfig, ResilientMessageBus, RetryConfig
from msgbus.testing.simulation.processes import Process
from tests.durable_shop import DownError
from tests.fakes import let_others_run, logged
from tests.unit.durability.conftest import Site
from tests.unit.durability.test_enqueue import Pack, Slow, Worker, letters, packing


def process_on(site: Site) -> Process:
    assert isinstance(site.journal, MemoryJournal)
    return Process(site.journal, site.clock)


def kill(process: Process) -> None:
    """Let it write nothing any more. As `die`, but nobody hangs for ever behind a shield."""

    async def refuse(operations: Sequence[Operation]) -> list[Ack]:
        raise JournalClosedError("It is dead.")

    process.replace("commit", refuse)


# -- the bus stops -----------------------------------------------------------------------------


async def test_stop_lets_what_is_in_hand_finish(site: Site) -> None:
    slow = Slow()
    bus = packing(site, slow)
    reports: list[DrainReport] = []

    async def stop() -> None:
        reports.append(await bus.stop())

    await bus.start()
    ticket = await bus.enqueue(Pack(number=1))
    await slow.started.wait()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        await let_others_run()
        slow.release.set()

    async with site.bus() as later:
        assert await (await later.ticket(ticket.message_id)).state() is TicketState.DONE
    assert slow.ended == [1]
    assert reports[0].persisted == 0


async def test_what_does_not_finish_in_time_is_given_back_at_once_and_not_counted(
    site: Site,
) -> None:
    slow, worker = Slow(), Worker()
    bus = packing(site, slow)
    await bus.start()
    ticket = await bus.enqueue(Pack(number=1))
    await bus.enqueue(Pack(number=2), delay=60)
    await slow.started.wait()

    report = await bus.stop(timeout=0)

    assert slow.ended == []
    assert report.persisted == 2
    async with packing(site, worker) as later:
        await later.settled()  # no lease to wait for
        assert worker.tries == [(1, 1)]
        assert await (await later.ticket(ticket.message_id)).result(timeout=30) == 10


async def test_a_handler_that_makes_an_error_of_its_end_has_not_failed(memory: Site) -> None:
    begun = anyio.Event()

    async def grumble(command: Pack) -> int:
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            raise DownError("cut off")

    bus, worker = packing(memory, grumble), Worker()
    await bus.start()
    await bus.enqueue(Pack(number=1))
    await begun.wait()
    await bus.stop(timeout=0)

    async with packing(memory, worker) as later:
        await later.settled()
    assert worker.tries == [(1, 1)]


async def test_a_bus_that_stops_takes_nothing_new(memory: Site) -> None:
    slow = Slow()
    bus = packing(memory, slow, config=BusConfig(command_workers=1))
    reports: list[DrainReport] = []

    async def stop() -> None:
        reports.append(await bus.stop())

    await bus.start()
    await bus.enqueue(Pack(number=1))
    await bus.enqueue(Pack(number=2))
    await slow.started.wait()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        await let_others_run()
        slow.release.set()

    assert slow.begun == [1]
    assert reports[0].persisted == 1


# -- the process dies --------------------------------------------------------------------------


async def test_what_a_dead_process_had_in_hand_is_taken_after_its_lease(memory: Site) -> None:
    process, slow, worker = process_on(memory), Slow(), Worker()
    first, second = packing(memory, slow, journal=process.journal), packing(memory, worker)
    await first.start()
    ticket = await first.enqueue(Pack(number=1))
    await slow.started.wait()
    kill(process)

    async with second:
        await memory.clock.advance(9)
        await second.settled()
        assert worker.tries == []
        await memory.clock.advance(2)
        await second.settled()

        assert worker.tries == [(1, 2)]
        assert await (await second.ticket(ticket.message_id)).result(timeout=30) == 10


async def test_a_command_whose_process_always_dies_is_given_up(memory: Site) -> None:
    async with memory.bus() as shop:
        await shop.enqueue(Pack(number=1))
    for _ in range(5):
        process, slow = process_on(memory), Slow()
        await packing(memory, slow, journal=process.journal).start()
        await memory.clock.advance(11)
        with anyio.fail_after(10):
            await slow.started.wait()
        kill(process)
    worker = Worker()

    async with packing(memory, worker) as last:
        await memory.clock.advance(11)
        await last.settled()

        (letter,) = await letters(last)
        assert letter[1] == 5
        assert "Its process ended while it was being handled, 5 times." in str(letter[2])
        with pytest.raises(TicketFailedError, match="5 times"):
            await (await last.ticket(letter[0])).result(timeout=30)
    assert worker.tries == []


async def test_a_long_command_is_renewed_and_nobody_else_takes_it(site: Site) -> None:
    slow, worker = Slow(), Worker()
    bus, other = packing(site, slow), packing(site, worker)

    async with bus:
        ticket = await bus.enqueue(Pack(number=1))
        await slow.started.wait()
        async with other:
            for _ in range(20):
                await site.clock.advance(2)
                await written(bus, ticket.message_id)
            await other.settled()
            slow.release.set()
            assert await ticket.result(timeout=30) == 1

    assert worker.tries == []


async def written(bus: MessageBus, message_id: str) -> None:
    """Wait until the lease of a command in hand has been renewed, if it is time to."""
    assert bus.journal is not None
    with anyio.fail_after(10):
        while True:
            (row,) = await bus.journal.scheduled([row_id(message_id, 2)])
            if row.due - bus.clock.time() > 10 * 2 / 3 - 2:
                return


async def test_a_command_that_another_process_has_taken_over_is_cut_off(
    memory: Site, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Slow()
    bus = packing(memory, slow)

    async with bus:
        assert bus.journal is not None
        ticket = await bus.enqueue(Pack(number=1))
        await slow.started.wait()
        await bus.journal.commit([Unschedule(row_id(ticket.message_id, 2), required=True)])
        await memory.clock.advance(5)
        await bus.settled()

        assert len(logged(caplog, "enqueued_command_lost")) == 1
        assert await ticket.state() is TicketState.PENDING
        assert slow.ended == []


async def test_what_was_done_counts_even_if_another_has_taken_it_over(memory: Site) -> None:
    slow, worker = Slow(), Worker()
    bus = packing(memory, slow)

    async with bus:
        assert bus.journal is not None
        ticket = await bus.enqueue(Pack(number=7))
        await slow.started.wait()
        held = row_id(ticket.message_id, 2)
        (row,) = await bus.journal.scheduled([held])
        await bus.journal.commit([Unschedule(held, required=True)])
        slow.release.set()
        assert await ticket.result(timeout=30) == 7
        # The one that has taken it dies, and the next finds that nothing is left to do.
        await bus.journal.commit(
            [Schedule(row._replace(id=row_id(ticket.message_id, 3), due=0.0, attempt=3))]
        )
        async with packing(memory, worker) as other:
            await other.settled()

        assert worker.tries == []
        assert await ticket.result(timeout=30) == 7


async def test_a_result_is_written_as_soon_as_the_journal_takes_it(
    memory: Site, caplog: pytest.LogCaptureFixture
) -> None:
    process, worker = process_on(memory), Worker()
    inner = process.journal.commit
    full = True

    async def fail_while_full(operations: Sequence[Operation]) -> list[Ack]:
        if full and any(isinstance(one, CloseTicket) for one in operations):
            raise JournalFullError("No space is left.")
        return await inner(operations)

    process.replace("commit", fail_while_full)

    async with packing(memory, worker, journal=process.journal) as bus:
        ticket = await bus.enqueue(Pack(number=1))
        await memory.clock.advance(1)
        assert await ticket.state() is TicketState.PENDING
        assert logged(caplog, "journal_task_failed")[0]["task"] == "enqueued commands"
        full = False
        await memory.clock.advance(1)

        assert await ticket.result(timeout=30) == 10
        assert worker.tries == [(1, 1)]


# -- with policies -----------------------------------------------------------------------------


async def test_an_open_circuit_burns_no_tries(memory: Site) -> None:
    bus = ResilientMessageBus(
        retry=RetryConfig(initial_delay=0.1),
        breaker=CircuitBreakerConfig(failure_threshold=1, recovery_time=30.0, jitter=0),
        journal=memory.journal,
        clock=memory.clock,
    )
    worker = Worker(fail=1)
    bus.register_command_handler(Pack, worker)

    async with bus:
        first = await bus.enqueue(Pack(number=1))
        for _ in range(40):
            await bus.settled()
            await memory.clock.advance(1)

        assert await first.result(timeout=30) == 10
        assert worker.tries == [(1, 1), (1, 2)]


async def test_a_failed_try_is_no_dead_letter_of_the_bus(memory: Site) -> None:
    bus = ResilientMessageBus(
        breaker=None, journal=memory.journal, clock=memory.clock, dead_letters="memory"
    )

    @bus.handles(Pack)
    async def pack(command: Pack, context: Context) -> int:
        if context.attempt == 1:
            raise DownError
        return 1

    async with bus:
        ticket = await bus.enqueue(Pack())
        await bus.settled()
        await memory.clock.advance(1)

        assert await ticket.result(timeout=30) == 1
        assert bus.stats().dead_letters == 0


async def test_a_policy_is_followed_by_the_journal_and_not_once_more_in_each_try(
    memory: Site,
) -> None:
    retry = RetryConfig(max_retries=2, initial_delay=1.0, jitter=False)
    bus = ResilientMessageBus(retry=retry, breaker=None, journal=memory.journal, clock=memory.clock)
    worker = Worker(fail=99)
    bus.register_command_handler(Pack, worker)

    async with bus:
        ticket = await bus.enqueue(Pack(number=1))
        for _ in range(10):
            await bus.settled()
            await memory.clock.advance(1)

        assert worker.tries == [(1, 1), (1, 2), (1, 3)]
        (letter,) = await bus.dead_letters.find()
        assert letter.message_id == ticket.message_id
        worker.failing = 0
        outcome = await bus.dead_letters.replay(letter)
        assert outcome.status == "succeeded"
        assert worker.tries[3:] == [(1, 1)]
