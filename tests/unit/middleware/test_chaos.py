"""ChaosMiddleware: fault injection, seeded, by share and by type."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from msgbus import Command, ConfigurationError, Event, MessageBus
from msgbus.middleware import ChaosError, ChaosMiddleware
from msgbus.resilience import (
    ChaosMiddleware as FromResilience,
    CircuitBreakerConfig,
    ResilientMessageBus,
    RetryConfig,
)
from msgbus.runtime.clock import VirtualClock
from tests.fakes import conserves, logged


class Charge(Command[str]):
    pass


class Paid(Event):
    number: int = 0


class BigPaid(Paid):
    pass


class Echo:
    """A handler that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, command: Charge) -> str:
        self.calls += 1
        return f"call {self.calls}"


def outcomes_of(results: list[Any]) -> str:
    return "".join("." if result.success else "F" for result in results)


async def run(chaos: ChaosMiddleware, times: int = 200) -> str:
    bus = MessageBus(middleware=[chaos])
    bus.register_command_handler(Charge, Echo())
    return outcomes_of([await bus.execute(Charge()) for _ in range(times)])


def test_it_is_exported_by_both_packages() -> None:
    assert FromResilience is ChaosMiddleware


async def test_a_share_of_the_calls_fails_and_the_seed_says_which() -> None:
    first = await run(ChaosMiddleware(fail=0.3, seed=1))
    again = await run(ChaosMiddleware(fail=0.3, seed=1))
    other = await run(ChaosMiddleware(fail=0.3, seed=2))

    assert first == again != other
    assert 30 < first.count("F") < 90


async def test_one_fault_does_not_shift_another() -> None:
    alone = await run(ChaosMiddleware(fail=0.3, seed=1))
    beside = await run(ChaosMiddleware(fail=0.3, duplicate=0.5, delay=0.5, seconds=0, seed=1))

    assert alone == beside


async def test_nothing_happens_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    chaos = ChaosMiddleware()

    assert await run(chaos) == "." * 200
    assert (chaos.counts.calls, chaos.counts.failed, chaos.counts.duplicated) == (200, 0, 0)
    assert logged(caplog, "chaos") == []


async def test_the_error_is_a_chaos_error_or_ones_own(caplog: pytest.LogCaptureFixture) -> None:
    for middleware, kind in (
        (ChaosMiddleware(fail=1), ChaosError),
        (ChaosMiddleware(fail=1, error=lambda: ConnectionError("no route")), ConnectionError),
    ):
        handler = Echo()
        bus = MessageBus(middleware=[middleware])
        bus.register_command_handler(Charge, handler)

        with pytest.raises(kind):
            await bus.call(Charge())

        assert handler.calls == 0
        assert middleware.counts.failed == 1
    entry = logged(caplog, "chaos")[0]
    assert (entry["fault"], entry["handler"], entry["message_type"]) == ("fail", "Echo", "Charge")


async def test_a_duplicate_runs_the_handler_twice_and_the_second_outcome_counts() -> None:
    chaos = ChaosMiddleware(duplicate=1)
    bus = MessageBus(middleware=[chaos])
    bus.register_command_handler(Charge, Echo())

    assert await bus.call(Charge()) == "call 2"
    assert chaos.counts.duplicated == 1


async def test_a_delay_is_by_the_clock_of_the_bus() -> None:
    clock = VirtualClock()
    chaos = ChaosMiddleware(delay=1, seconds=5)
    bus = MessageBus(middleware=[chaos], clock=clock)
    bus.register_command_handler(Charge, Echo())
    results: list[Any] = []

    async def execute() -> None:
        results.append(await bus.execute(Charge()))

    async with anyio.create_task_group() as group:
        group.start_soon(execute)
        await clock.advance(4.9)
        assert results == []
        await clock.advance(0.1)

    assert results[0].duration == 5
    assert chaos.counts.delayed == 1


async def test_only_the_named_types_have_faults() -> None:
    chaos = ChaosMiddleware(fail=1, types=[BigPaid])
    bus = MessageBus(middleware=[chaos])
    seen: list[Paid] = []
    lists: list[list[Paid]] = []

    @bus.on(Paid, name="one")
    async def one(event: Paid) -> None:
        seen.append(event)

    @bus.on(Paid, name="many", batch=True)
    async def many(events: list[Paid]) -> None:
        lists.append(events)

    small, big = Paid(), BigPaid()
    async with bus:
        await bus.publish(small)
        await bus.publish(big)
        await bus.settled()

    assert seen == [small]
    assert [event for events in lists for event in events] == [small]
    assert bus.stats().handlers["one"].failed == 1
    conserves(bus)


async def test_a_policy_can_be_tested_with_it() -> None:
    chaos = ChaosMiddleware(fail=0.4, types=Paid, seed=3)
    clock = VirtualClock()
    bus = ResilientMessageBus(
        clock=clock,
        middleware=[chaos],
        retry=RetryConfig(max_retries=50),
        breaker=CircuitBreakerConfig(failure_threshold=3, recovery_time=5),
    )
    seen: list[int] = []

    @bus.on(Paid)
    async def note(event: Paid) -> None:
        seen.append(event.number)

    async with bus:
        for number in range(50):
            await bus.publish(Paid(number=number))
        await clock.advance(5000)
        await bus.settled()

    assert seen == list(range(50))
    assert chaos.counts.failed > 10
    assert chaos.counts.calls == 50 + chaos.counts.failed
    conserves(bus)


@pytest.mark.parametrize("share", [-0.1, 1.1])
@pytest.mark.parametrize("name", ["fail", "delay", "duplicate"])
def test_a_share_is_between_nothing_and_all(name: str, share: float) -> None:
    options: dict[str, Any] = {name: share}

    with pytest.raises(ConfigurationError, match=f"{name} is a share of the calls"):
        ChaosMiddleware(**options)


def test_a_delay_is_not_negative() -> None:
    with pytest.raises(ConfigurationError, match="seconds must not be negative"):
        ChaosMiddleware(seconds=-1)
