"""Enqueued commands whose process stops, dies, stalls or loses them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from msgbus import BusConfig, Context, DrainReport, MessageBus, TicketFailedError
from msgbus.bus.durable.tickets import TicketState
from msgbus.errors import JournalFullError
from msgbus.journal.ports import Journal
from msgbus.resilience import CircuitBreakerConfig, ResilientMessageBus, RetryConfig
from tests.durable_shop import DownError, journal_of
from tests.fakes import let_others_run, logged
from tests.unit.durable.conftest import Site
from tests.unit.durable.packing import Pack, Slow, Worker, kill, letters, packing

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
        assert worker.attempts == [(1, 1)]
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
    assert worker.attempts == [(1, 1)]


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


async def test_settled_waits_for_a_command_that_is_claimed_and_not_handed_out_yet(
    memory: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, happened = Worker(), list[str]()
    is_claimed, may_go_on = anyio.Event(), anyio.Event()
    async with memory.bus() as shop:
        await shop.enqueue(Pack(number=1))
    bus = packing(memory, worker)
    claim = journal_of(bus).claim

    async def slow(*args: Any, **options: Any) -> Any:
        claims = await claim(*args, **options)
        if claims:
            is_claimed.set()
            await may_go_on.wait()
        return claims

    async def settle() -> None:
        await bus.settled()
        happened.append(f"settled after {worker.attempts}")

    monkeypatch.setattr(journal_of(bus), "claim", slow)
    async with bus, anyio.create_task_group() as tasks:
        await is_claimed.wait()
        tasks.start_soon(settle)
        await let_others_run()
        may_go_on.set()

    assert happened == ["settled after [(1, 1)]"]


# -- the process dies --------------------------------------------------------------------------


async def test_what_a_dead_process_had_in_flight_is_taken_when_it_was_silent_for_a_ttl(
    memory: Site,
) -> None:
    slow, worker = Slow(), Worker()
    first, second = packing(memory, slow), packing(memory, worker)
    await first.start()
    ticket = await first.enqueue(Pack(number=1))
    await slow.started.wait()
    kill(first)

    async with second:
        await memory.clock.advance(4)
        await second.settled(timeout=1)
        assert worker.attempts == []
        await memory.clock.advance(2)
        await second.settled()

        assert worker.attempts == [(1, 1)]  # nothing was counted: it was not alone
        assert await (await second.ticket(ticket.message_id)).result(timeout=30) == 10


async def test_a_command_whose_process_always_dies_is_dead_lettered(memory: Site) -> None:
    async with memory.bus() as shop:
        await shop.enqueue(Pack(number=1))
    for _ in range(10):  # once beside others, for all it knows, and nine times alone
        slow = Slow()
        bus = packing(memory, slow)
        await bus.start()
        await memory.clock.advance(6)
        with anyio.fail_after(10):
            await slow.started.wait()
        kill(bus)
    worker = Worker()

    async with packing(memory, worker) as last:
        await memory.clock.advance(6)
        await last.settled()

        (letter,) = await letters(last)
        error = "The process ended while the message was being handled, 9 times."
        assert letter[1:] == (9, error, "its process ended in every attempt")
        with pytest.raises(TicketFailedError, match="9 times"):
            await (await last.ticket(letter[0])).result(timeout=30)
    assert worker.attempts == []


async def test_a_long_command_stays_with_its_process(site: Site) -> None:
    slow, worker = Slow(), Worker()
    config = BusConfig(member_ttl=0.4)
    bus, other = packing(site, slow, config=config), packing(site, worker, config=config)

    async with bus:
        ticket = await bus.enqueue(Pack(number=1))
        await slow.started.wait()
        async with other:
            for _ in range(10):
                await site.clock.advance(0.2)
                if site.has_tables:
                    await renewed(bus)
            slow.release.set()
            assert await ticket.result(timeout=30) == 1

    assert slow.begun == [1]
    assert worker.attempts == []


async def renewed(bus: MessageBus) -> None:
    """Wait until all members have shown that they are alive, which a file does in real time."""
    journal = journal_of(bus)
    before = {one.id: one.renewals for one in await journal.members()}
    with anyio.fail_after(10):
        while any(before[one.id] == one.renewals for one in await journal.members()):
            await anyio.lowlevel.checkpoint()


async def end_first(journal: Journal) -> None:
    """End the first member, as another process does that has not heard of it for a TTL."""
    member = min(await journal.members(), key=lambda one: one.id)
    assert await journal.end(member)


async def test_a_command_that_another_process_may_take_is_cut_off(
    memory: Site, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Slow()
    bus = packing(memory, slow)

    async with bus:
        ticket = await bus.enqueue(Pack(number=1))
        await slow.started.wait()
        await end_first(memory.beside())
        await memory.clock.advance(2)
        assert len(logged(caplog, "member_lost")) == 1
        assert await ticket.state() is TicketState.PENDING
        assert (slow.begun, slow.ended) == ([1, 1], [])  # it has joined again
        slow.release.set()
        await bus.settled()

        assert (slow.begun, slow.ended) == ([1, 1], [1])
        assert await ticket.result(timeout=30) == 1


async def test_what_a_former_owner_has_done_is_refused(memory: Site) -> None:
    slow, worker = Slow(), Worker()
    bus, other = packing(memory, slow), packing(memory, worker)

    async with bus:
        ticket = await bus.enqueue(Pack(number=7))
        await slow.started.wait()
        async with other:
            await end_first(memory.beside())
            await other.settled()
            slow.release.set()
            await let_others_run()
            assert await ticket.result(timeout=30) == 70

    assert worker.attempts == [(7, 1)]


class FullDisk:
    """Fails every commit of a journal in memory while it is full."""

    def __init__(self) -> None:
        self.is_full = False
        self._lock = anyio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[Callable[[], None]]:
        async with self._lock:
            yield self._write
            await anyio.lowlevel.checkpoint()

    def _write(self) -> None:
        if self.is_full:
            raise JournalFullError("No space is left.")


async def test_a_result_is_written_as_soon_as_the_journal_takes_it(
    memory: Site, caplog: pytest.LogCaptureFixture
) -> None:
    disk, handled = FullDisk(), list[int]()
    bus = memory.bus(journal=memory.beside(disk.turn))

    @bus.handles(Pack)
    async def pack(command: Pack) -> int:
        handled.append(command.number)
        disk.is_full = True
        return 10

    async with bus:
        ticket = await bus.enqueue(Pack(number=1))
        await memory.clock.advance(1)
        assert await ticket.state() is TicketState.PENDING
        assert "No space is left" in logged(caplog, "subscription_failed")[0]["error"]
        disk.is_full = False
        await memory.clock.advance(1)

        assert await ticket.result(timeout=30) == 10
        assert handled == [1]


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
        assert worker.attempts == [(1, 1), (1, 2)]


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

        assert worker.attempts == [(1, 1), (1, 2), (1, 3)]
        (letter,) = await bus.dead_letters.find()
        assert letter.message_id == ticket.message_id
        worker.failing = 0
        outcome = await bus.dead_letters.replay(letter)
        assert outcome.status == "succeeded"
        assert worker.attempts[3:] == [(1, 1)]
