"""A wall clock that is set: what is due then is noticed within a second, and nothing is lost."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import pytest

from msgbus import Command, Event, MessageBus
from msgbus.bus.durable.listening import LOOK
from msgbus.resilience import RetryConfig
from msgbus.runtime.clock import SystemClock
from msgbus.runtime.clock_jumps import ClockJumps

HOUR = 3_600.0
BOUND = 10.0


class JumpingClock:
    """The system's clock, whose wall clock can be set."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self._system = SystemClock()
        self.now = self._system.now
        self.sleep = self._system.sleep
        self.cancel_after = self._system.cancel_after

    def time(self) -> float:
        return time.time() + self.ahead


class Reminded(Event, name="jumps.Reminded"):
    pass


class Remind(Command[None], name="jumps.Remind"):
    pass


@pytest.fixture(params=["memory:", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory:" else f"sqlite:///{tmp_path}/jumps.db?reserve=0"


async def test_a_delayed_event_is_published_after_a_jump(url: str) -> None:
    clock, published = JumpingClock(), anyio.Event()
    bus = MessageBus(journal=url, clock=clock)

    @bus.on(Reminded, durable=False)
    async def handle(event: Reminded) -> None:
        published.set()

    async with bus:
        await bus.publish(Reminded(), delay=HOUR)
        await bus.settled()
        clock.ahead = HOUR + 1
        with anyio.fail_after(BOUND):
            await published.wait()


async def test_a_delayed_command_begins_after_a_jump(url: str) -> None:
    clock, begun = JumpingClock(), anyio.Event()
    bus = MessageBus(journal=url, clock=clock)

    @bus.handles(Remind)
    async def handle(command: Remind) -> None:
        begun.set()

    async with bus:
        await bus.enqueue(Remind(), delay=HOUR)
        await bus.settled()
        clock.ahead = HOUR + 1
        with anyio.fail_after(BOUND):
            await begun.wait()


async def test_a_retry_begins_after_a_jump(url: str) -> None:
    clock, attempts, again = JumpingClock(), [0], anyio.Event()
    bus = MessageBus(journal=url, clock=clock)
    retry = RetryConfig(initial_delay=HOUR, max_delay=HOUR, jitter=False)

    @bus.on(Reminded, durable="reminders", retry=retry)
    async def handle(event: Reminded) -> None:
        attempts[0] += 1
        if attempts[0] == 1:
            raise ConnectionError("not now")
        again.set()

    async with bus:
        await bus.publish(Reminded())
        await bus.settled()
        clock.ahead = HOUR + 1
        with anyio.fail_after(BOUND):
            await again.wait()


async def test_after_a_jump_back_an_event_is_late_and_not_lost(url: str) -> None:
    clock, published = JumpingClock(), anyio.Event()
    bus = MessageBus(journal=url, clock=clock)

    @bus.on(Reminded, durable=False)
    async def handle(event: Reminded) -> None:
        published.set()

    async with bus:
        await bus.publish(Reminded(), delay=0.05)
        clock.ahead = -HOUR
        with anyio.move_on_after(2 * LOOK):
            await published.wait()
        assert not published.is_set()

        clock.ahead = 0.0
        with anyio.fail_after(BOUND):
            await published.wait()


def test_only_a_jump_forward_is_one() -> None:
    clock = JumpingClock()
    jumps = ClockJumps(clock)

    assert jumps.seconds() == 0
    clock.ahead = 0.3  # the speed of the clock is corrected
    assert jumps.seconds() == 0
    clock.ahead = 0.6
    assert jumps.seconds() == pytest.approx(0.6, abs=0.1)
    assert jumps.seconds() == 0
    clock.ahead = -HOUR
    assert jumps.seconds() == 0
    clock.ahead = 0.0
    assert jumps.seconds() == pytest.approx(HOUR, abs=0.1)
