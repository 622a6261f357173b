"""A resilient bus that is started again keeps its circuits, letters and limits (19a)."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from msgbus import CircuitOpenError, Command, Event
from msgbus.errors import BusStateError
from msgbus.resilience import (
    CircuitBreakerConfig,
    ResilientMessageBus,
    RetryConfig,
    SqliteDeadLetterStore,
)
from msgbus.runtime.clock import VirtualClock

TWO_LOOPS = [("asyncio", "asyncio"), ("trio", "trio"), ("asyncio", "trio"), ("trio", "asyncio")]


class Charge(Command[int]):
    number: int = 0


class Charged(Event):
    number: int = 0


class Bank:
    """A handler that can be down."""

    def __init__(self) -> None:
        self.is_down = True
        self.seen: list[int] = []

    async def charge(self, command: Charge) -> int:
        return self._do(command.number)

    async def book(self, event: Charged) -> None:
        self._do(event.number)

    def _do(self, number: int) -> int:
        if self.is_down:
            raise OSError("down")
        self.seen.append(number)
        return number


@pytest.mark.parametrize("where", ["memory", "file", "journal"])
async def test_dead_letters_stay_and_go_on(where: str, tmp_path: Path) -> None:
    bank = Bank()
    store = SqliteDeadLetterStore(tmp_path / "letters.db") if where == "file" else None
    bus = ResilientMessageBus(
        retry=None,
        breaker=None,
        dead_letters="auto" if store is None else store,
        journal=f"sqlite:///{tmp_path / 'shop.db'}" if where == "journal" else None,
    )
    bus.subscribe(Charged, bank.book, durable=False)
    for number in (1, 2):
        async with bus:
            await bus.publish(Charged(number=number))
        assert bus.stats().dead_letters == number
    bank.is_down = False
    async with bus:
        assert (await bus.dead_letters.replay_all()).succeeded == 2
    assert sorted(bank.seen) == [1, 2]


async def test_a_circuit_stays_as_it_was() -> None:
    clock = VirtualClock()
    bank = Bank()
    bus = ResilientMessageBus(
        retry=None,
        breaker=CircuitBreakerConfig(failure_threshold=1, recovery_time=60, max_recovery_time=60),
        clock=clock,
    )
    bus.register_command_handler(Charge, bank.charge)
    async with bus:
        assert not (await bus.execute(Charge())).success
    bank.is_down = False
    async with bus:
        with pytest.raises(CircuitOpenError):
            await bus.call(Charge())
        await clock.advance(61)
        assert await bus.call(Charge(number=3)) == 3


async def test_policies_may_change_between_two_runs() -> None:
    bank = Bank()
    bus = ResilientMessageBus(retry=None, breaker=None)
    bus.register_command_handler(Charge, bank.charge)
    async with bus:
        with pytest.raises(BusStateError, match="Policies must be set"):
            bus.policy(Charge, fallback=7)
        assert not (await bus.execute(Charge())).success
    bus.policy(Charge, fallback=7)
    async with bus:
        assert await bus.call(Charge()) == 7


@pytest.mark.parametrize(("first", "second"), TWO_LOOPS)
def test_those_who_wait_do_so_on_the_event_loop_of_their_run(first: str, second: str) -> None:
    """For an open circuit, a place of a bulkhead, a turn of a rate limit and a retry."""
    bank = Bank()
    bus = ResilientMessageBus(
        retry=RetryConfig(max_retries=1, initial_delay=0.001, jitter=False),
        breaker=CircuitBreakerConfig(
            failure_threshold=1, recovery_time=3600, max_recovery_time=3600
        ),
        bulkhead=1,
        rate_limit=2000,
    )
    bus.register_command_handler(Charge, bank.charge)
    bus.subscribe(Charged, bank.book)

    async def run(number: int) -> None:
        bank.is_down = True
        await bus.start()
        await bus.publish(Charged(number=number))
        waiting = bus.circuits["Bank.book"]
        with anyio.fail_after(10):
            while waiting.is_closed:
                await anyio.lowlevel.checkpoint()
        await bus.publish(Charged(number=number + 1))  # waits for the circuit
        await anyio.lowlevel.checkpoint()
        bank.is_down = False
        if number > 10:
            waiting.reset()
        async with anyio.create_task_group() as tasks:
            for one in range(5):
                tasks.start_soon(bus.call, Charge(number=100 + one))
        with anyio.fail_after(10):
            await bus.stop(0 if number < 10 else None)

    anyio.run(run, 1, backend=first)
    assert sorted(bank.seen) == [100, 101, 102, 103, 104]
    anyio.run(run, 11, backend=second)
    assert sorted(bank.seen[5:]) == [11, 12, 100, 101, 102, 103, 104]
