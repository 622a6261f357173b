"""TimeoutMiddleware: a limit on how long a call may take."""

from __future__ import annotations

import anyio
import pytest

from msgbus import (
    Command,
    CommandResult,
    ConfigurationError,
    Event,
    EventHandlerFailedEvent,
    HandlerTimeoutError,
    MessageBus,
)
from msgbus.middleware import TimeoutMiddleware
from msgbus.runtime.clock import VirtualClock


class Work(Command[str]):
    seconds: float = 0.0


class Ticked(Event):
    pass


def bus_with(clock: VirtualClock, seconds: float) -> MessageBus:
    bus = MessageBus(clock=clock)
    bus.add_middleware(TimeoutMiddleware(seconds), types=[Work, Ticked])

    @bus.handles(Work)
    async def work(command: Work) -> str:
        await clock.sleep(command.seconds)
        return "done"

    return bus


async def run(bus: MessageBus, command: Work, clock: VirtualClock) -> CommandResult[str]:
    """The result of a command that needs at most 100 seconds."""
    results: list[CommandResult[str]] = []

    async def execute() -> None:
        results.append(await bus.execute(command))

    async with anyio.create_task_group() as group:
        group.start_soon(execute)
        await clock.advance(100)
    return results[0]


async def test_a_call_that_is_fast_enough_gives_its_value() -> None:
    clock = VirtualClock()
    bus = bus_with(clock, 5)

    result = await run(bus, Work(seconds=4.9), clock)

    assert result.value == "done"


async def test_a_call_that_is_too_slow_is_cancelled_and_fails() -> None:
    clock = VirtualClock()
    bus = bus_with(clock, 5)

    result = await run(bus, Work(seconds=5.1), clock)

    error = result.exception
    assert isinstance(error, HandlerTimeoutError)
    assert (error.handler, error.message_type, error.seconds) == ("work", Work, 5)
    assert result.duration == 5


async def test_an_event_handler_that_is_too_slow_fails_and_the_next_event_is_handled() -> None:
    clock = VirtualClock()
    bus = bus_with(clock, 5)
    failures: list[EventHandlerFailedEvent] = []
    bus.register_event_handler(EventHandlerFailedEvent, failures.append, inline=True)
    calls: list[str] = []

    @bus.on(Ticked)
    async def hang_once(event: Ticked) -> None:
        calls.append("called")
        if len(calls) == 1:
            await anyio.sleep_forever()

    async with bus:
        await bus.publish(Ticked())
        await bus.publish(Ticked())
        await clock.advance(5)
        await bus.settled()

    assert [failure.error_type for failure in failures] == ["HandlerTimeoutError"]
    assert len(calls) == 2


async def test_a_batch_handler_has_the_time_for_the_whole_list() -> None:
    clock = VirtualClock()
    bus = bus_with(clock, 5)
    sizes: list[int] = []

    @bus.on(Ticked, batch=True)
    async def hang_on_lists(events: list[Ticked]) -> None:
        sizes.append(len(events))
        if len(events) > 1:
            await anyio.sleep_forever()

    for _ in range(2):
        await bus.publish(Ticked())
    async with bus:
        await clock.advance(10)
        await bus.settled()

    assert sizes == [2, 2, 1, 1]


async def test_a_clock_of_its_own_decides_when_time_is_up() -> None:
    clock = VirtualClock()
    bus = MessageBus(middleware=[TimeoutMiddleware(5, clock=clock)])

    @bus.handles(Work)
    async def hang(command: Work) -> str:
        await anyio.sleep_forever()
        return "never"

    result = await run(bus, Work(), clock)

    assert isinstance(result.exception, HandlerTimeoutError)


async def test_cancelling_the_caller_is_no_timeout() -> None:
    clock = VirtualClock()
    bus = bus_with(clock, 5)
    results: list[CommandResult[str]] = []

    async def execute() -> None:
        results.append(await bus.execute(Work(seconds=3)))

    async with anyio.create_task_group() as group:
        group.start_soon(execute)
        await clock.advance(1)
        group.cancel_scope.cancel()

    assert results == []


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_the_limit_must_be_above_zero(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match="seconds must be above 0"):
        TimeoutMiddleware(seconds)
