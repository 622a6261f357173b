"""Commands over time: deadlines, cancellation, results nobody reads, and what they emit."""

from __future__ import annotations

import gc
import logging

import anyio
import pytest

from msgbus import (
    Command,
    CommandResult,
    CommandResultEvent,
    CommandStartedEvent,
    Context,
    Event,
    HandlerTimeoutError,
    MessageBus,
    Query,
)
from msgbus.errors import WrongMessageTypeError
from msgbus.runtime.clock import VirtualClock
from tests.fakes import Add, Added, Fail, make_command_bus


class Outer(Command[str]):
    pass


class Inner(Query[str]):
    pass


async def test_a_timeout_fails_the_command_and_cancels_the_handler() -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    cancelled = False

    @bus.handles(Fail)
    async def hang(command: Fail) -> None:
        nonlocal cancelled
        try:
            await anyio.sleep_forever()
        finally:
            cancelled = True

    results: list[CommandResult[None]] = []
    async with anyio.create_task_group() as group:

        async def execute() -> None:
            results.append(await bus.execute(Fail(), timeout=5))

        group.start_soon(execute)
        await clock.advance(4)
        assert not results
        await clock.advance(2)

    assert isinstance(results[0].exception, HandlerTimeoutError)
    assert cancelled


async def test_nested_calls_inherit_the_deadline() -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    deadlines: list[float | None] = []

    @bus.handles(Outer)
    async def outer(command: Outer, context: Context) -> str:
        deadlines.append(context.deadline)
        return await context.call(Inner(), timeout=100)

    @bus.handles(Inner)
    async def inner(command: Inner, context: Context) -> str:
        deadlines.append(context.deadline)
        return "inner"

    await bus.execute(Outer(), timeout=5)

    assert deadlines == [clock.now() + 5, clock.now() + 5]


async def test_cancellation_propagates_and_is_counted() -> None:
    bus = MessageBus()
    started = anyio.Event()

    @bus.handles(Fail)
    async def hang(command: Fail) -> None:
        started.set()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(bus.execute, Fail())
        await started.wait()
        assert bus.stats().commands["hang"].running == 1
        group.cancel_scope.cancel()

    stats = bus.stats().commands["hang"]
    assert (stats.sent, stats.cancelled, stats.failed, stats.running) == (1, 1, 0, 0)


async def test_a_failed_result_that_nobody_looks_at_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = make_command_bus()

    with caplog.at_level(logging.ERROR, "msgbus"):
        await bus.execute(Fail(text="lost"))
        gc.collect()

    texts = [record.message for record in caplog.records]
    assert len(texts) == 1
    assert "command_failed_unobserved" in texts[0]
    assert "lost" in texts[0]


async def test_a_failed_result_that_was_looked_at_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = make_command_bus()

    with caplog.at_level(logging.ERROR, "msgbus"):
        assert not (await bus.execute(Fail())).success
        gc.collect()

    assert not caplog.records


async def test_emitted_events_are_published_after_success() -> None:
    bus = MessageBus()
    totals: list[int] = []
    when: list[int] = []

    @bus.on(Added)
    async def remember(event: Added) -> None:
        totals.append(event.total)

    @bus.handles(Add)
    async def add_and_tell(command: Add, context: Context) -> int:
        context.emit(Added(total=command.left))
        when.append(bus.stats().total("queued"))
        return command.left

    async with bus:
        await bus.execute(Add(left=7, right=0))
        await bus.settled()

    assert totals == [7]
    assert when == [0]


async def test_emitted_events_are_forgotten_when_the_handler_fails() -> None:
    bus = MessageBus()
    totals: list[int] = []

    @bus.on(Added)
    async def remember(event: Added) -> None:
        totals.append(event.total)

    @bus.handles(Add)
    async def add_and_fail(command: Add, context: Context) -> int:
        context.emit(Added(total=command.left))
        raise ValueError

    async with bus:
        assert not (await bus.execute(Add(left=7, right=0))).success
        await bus.settled()

    assert totals == []


async def test_emit_takes_only_events() -> None:
    bus = MessageBus()

    @bus.handles(Outer)
    async def outer(command: Outer, context: Context) -> str:
        context.emit(command)  # type: ignore[arg-type]
        return ""

    with pytest.raises(WrongMessageTypeError):
        await bus.call(Outer())


async def test_command_events_are_published_only_when_somebody_names_them() -> None:
    bus = make_command_bus()
    seen: list[Event] = []
    bus.subscribe(CommandStartedEvent, seen.append, inline=True)
    bus.subscribe(CommandResultEvent, seen.append, inline=True)

    async with bus:
        command = Fail()
        result = await bus.execute(command)
        await bus.settled()

    started, ended = sorted(seen, key=lambda event: isinstance(event, CommandResultEvent))
    assert isinstance(started, CommandStartedEvent)
    assert isinstance(ended, CommandResultEvent)
    assert started.command_id == ended.command_id == command.message_id
    assert started.causation_id == command.message_id
    assert (ended.success, ended.error) == (False, result.error)
    assert make_command_bus().stats().events == {}
