"""TimingMiddleware: how long messages of each type take."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest

from msgbus import CallNext, Command, ConfigurationError, Event, MessageBus
from msgbus.middleware import TimingMiddleware
from msgbus.runtime.clock import VirtualClock
from msgbus.telemetry.stats import Durations, DurationStats


class Work(Command):
    seconds: float


class Rest(Command):
    pass


class Ticked(Event):
    pass


def bus_with(timing: TimingMiddleware, clock: VirtualClock) -> MessageBus:
    """A bus whose handlers take as long as the command says, without waiting."""
    bus = MessageBus(clock=clock, middleware=[timing])

    @bus.handles(Work)
    async def work(command: Work) -> None:
        await clock.advance(command.seconds)
        if command.seconds > 100:
            raise TimeoutError("far too long")

    @bus.handles(Rest)
    async def rest(command: Rest) -> None: ...

    return bus


async def test_nothing_is_known_at_first() -> None:
    assert TimingMiddleware().timings() == {}


async def test_durations_are_kept_by_message_type() -> None:
    timing = TimingMiddleware()
    bus = bus_with(timing, VirtualClock())

    for seconds in (0.2, 0.2, 4.0):
        await bus.execute(Work(seconds=seconds))
    await bus.execute(Rest())

    timings = timing.timings()
    assert sorted(timings) == ["Rest", "Work"]
    assert timings["Work"].count == 3
    assert timings["Work"].seconds == pytest.approx(4.4)
    assert timings["Rest"].count == 1
    assert timings["Rest"].seconds == 0


async def test_percentiles_come_from_the_buss_own_histogram() -> None:
    timing = TimingMiddleware()
    bus = bus_with(timing, VirtualClock())

    for seconds in [0.2] * 90 + [4.0] * 10:
        await bus.execute(Work(seconds=seconds))

    work = timing.timings()["Work"]
    assert isinstance(work, DurationStats)
    assert 0.1 < work.p50 <= 0.25
    assert 2.5 < work.p95 <= 5.0
    assert 2.5 < work.p99 <= 5.0
    assert work.p95 < work.p99


async def test_many_calls_are_folded_and_none_is_lost() -> None:
    timing = TimingMiddleware()
    bus = bus_with(timing, VirtualClock())

    for _ in range(Durations.FOLD_AT + 3):
        await bus.execute(Rest())

    assert timing.timings()["Rest"].count == Durations.FOLD_AT + 3
    assert sum(timing.timings()["Rest"].buckets) == Durations.FOLD_AT + 3


async def test_failed_calls_count_too() -> None:
    timing = TimingMiddleware()
    bus = bus_with(timing, VirtualClock())

    result = await bus.execute(Work(seconds=101))

    assert not result.success
    assert timing.timings()["Work"].seconds == 101


async def test_cancelled_calls_count_too() -> None:
    timing = TimingMiddleware()
    bus = MessageBus(middleware=[timing])
    began = anyio.Event()

    @bus.handles(Rest)
    async def hang(command: Rest) -> None:
        began.set()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(bus.execute, Rest())
        await began.wait()
        group.cancel_scope.cancel()

    assert timing.timings()["Rest"].count == 1


async def test_it_measures_what_stands_inside_of_it() -> None:
    clock = VirtualClock()
    outer, inner = TimingMiddleware(), TimingMiddleware()

    async def dawdle(message: Any, call_next: CallNext) -> Any:
        await clock.advance(10)
        return await call_next(message)

    bus = MessageBus(clock=clock, middleware=[outer, dawdle, inner])

    @bus.handles(Work)
    async def work(command: Work) -> None:
        await clock.advance(command.seconds)

    await bus.execute(Work(seconds=1))

    assert outer.timings()["Work"].seconds == 11
    assert inner.timings()["Work"].seconds == 1


async def test_a_slow_call_is_told_about() -> None:
    slow: list[tuple[Any, float]] = []
    timing = TimingMiddleware(slow=1.0, on_slow=lambda message, took: slow.append((message, took)))
    bus = bus_with(timing, VirtualClock())
    fast_one, slow_one = Work(seconds=0.5), Work(seconds=1.0)

    await bus.execute(fast_one)
    await bus.execute(slow_one)

    assert slow == [(slow_one, 1.0)]


async def test_a_failing_callback_is_logged_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, logger="msgbus")

    def explode(message: Any, seconds: float) -> None:
        raise RuntimeError("callback broke")

    bus = bus_with(TimingMiddleware(slow=1.0, on_slow=explode), VirtualClock())

    result = await bus.execute(Work(seconds=2))

    assert result.success
    assert "slow_callback_failed" in caplog.text
    assert "callback broke" in caplog.text


async def test_a_list_is_one_call_under_its_events_type() -> None:
    timing = TimingMiddleware()
    bus = MessageBus(middleware=[timing])

    @bus.on(Ticked, batch=True)
    async def record(events: list[Ticked]) -> None: ...

    for _ in range(3):
        await bus.publish(Ticked())
    async with bus:
        await bus.settled()

    assert timing.timings()["Ticked"].count == 1


async def test_a_clock_of_its_own_gives_the_durations() -> None:
    clock = VirtualClock()
    timing = TimingMiddleware(clock=clock)
    bus = MessageBus(middleware=[timing])

    @bus.handles(Rest)
    async def rest(command: Rest) -> None:
        await clock.advance(5)

    await bus.execute(Rest())

    assert timing.timings()["Rest"].seconds == 5


def ignore(message: Any, seconds: float) -> None: ...


@pytest.mark.parametrize("arguments", [{"slow": 1.0}, {"on_slow": ignore}], ids=["slow", "on_slow"])
def test_a_threshold_and_its_callback_go_together(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="go together"):
        TimingMiddleware(**arguments)


def test_the_threshold_must_be_above_zero() -> None:
    with pytest.raises(ConfigurationError, match="slow must be above 0"):
        TimingMiddleware(slow=0, on_slow=ignore)
