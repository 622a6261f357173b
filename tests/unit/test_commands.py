"""Commands: one handler, one result."""

from __future__ import annotations

import gc
import logging
import pickle

import anyio
import pytest

from msgbus import (
    BusClosedError,
    Command,
    CommandResult,
    CommandResultEvent,
    CommandStartedEvent,
    Context,
    DuplicateHandlerError,
    Event,
    HandlerTimeoutError,
    MessageBus,
    MissingHandlerError,
    Query,
    Refusal,
    WrongMessageTypeError,
    current_context,
)
from msgbus.clock import VirtualClock


class Add(Command[int]):
    left: int
    right: int


class Fail(Command):
    text: str = "boom"


class Outer(Command[str]):
    pass


class Inner(Query[str]):
    pass


class Added(Event):
    total: int


class OutOfStock(Refusal):
    pass


async def add(command: Add) -> int:
    return command.left + command.right


async def fail(command: Fail) -> None:
    raise ValueError(command.text)


def make_bus() -> MessageBus:
    bus = MessageBus()
    bus.register_command_handler(Add, add)
    bus.register_command_handler(Fail, fail)
    return bus


async def test_execute_gives_the_handlers_reply() -> None:
    bus = make_bus()

    result = await bus.execute(Add(left=1, right=2))

    assert result.success
    assert result.value == 3
    assert result.unwrap() == 3
    assert result.error is None
    assert result.exception is None
    assert result.attempts == 1
    assert result.duration >= 0


async def test_call_gives_the_value_itself() -> None:
    assert await make_bus().call(Add(left=1, right=2)) == 3


async def test_a_failed_handler_gives_a_failed_result_with_its_own_exception() -> None:
    result = await make_bus().execute(Fail())

    assert not result.success
    assert result.value is None
    assert result.error == "ValueError: boom"
    assert isinstance(result.exception, ValueError)
    with pytest.raises(ValueError, match="boom"):
        result.unwrap()


async def test_call_raises_the_handlers_own_exception() -> None:
    with pytest.raises(ValueError, match="boom"):
        await make_bus().call(Fail())


async def test_secrets_are_removed_from_the_error_text() -> None:
    result = await make_bus().execute(Fail(text="no route to https://bob:hunter2@db/x"))

    assert result.error is not None
    assert "hunter2" not in result.error


async def test_the_error_text_of_a_failed_validation_shows_no_payload() -> None:
    bus = MessageBus()

    @bus.handles(Fail)
    async def validate(command: Fail) -> None:
        Add.model_validate({"left": "my diary", "right": 1})

    result = await bus.execute(Fail())

    assert result.error is not None
    assert "left" in result.error
    assert "diary" not in result.error


async def test_a_refusal_fails_the_command_and_reaches_the_caller() -> None:
    bus = MessageBus()

    @bus.handles(Fail)
    async def refuse(command: Fail) -> None:
        raise OutOfStock(command.text)

    with pytest.raises(OutOfStock):
        await bus.call(Fail())


async def test_the_result_knows_its_commands_id() -> None:
    command = Add(left=1, right=2)

    result = await make_bus().execute(command)

    assert result.command_id == command.message_id


async def test_a_result_is_read_only() -> None:
    result: CommandResult[int] = await make_bus().execute(Add(left=1, right=2))

    for name in ("success", "value", "error", "exception", "duration", "attempts", "command_id"):
        with pytest.raises(AttributeError):
            setattr(result, name, None)


async def test_a_command_without_handler_raises_and_says_how_to_register_one() -> None:
    with pytest.raises(MissingHandlerError, match="register_command_handler") as caught:
        await MessageBus().execute(Add(left=1, right=2))

    assert caught.value.message_type is Add


async def test_an_event_cannot_be_executed_and_the_error_says_what_to_do() -> None:
    with pytest.raises(WrongMessageTypeError, match=r"bus\.publish"):
        await make_bus().execute(Added(total=1))  # type: ignore[arg-type]


async def test_a_class_or_a_stranger_cannot_be_executed() -> None:
    with pytest.raises(WrongMessageTypeError, match="pass an instance"):
        await make_bus().execute(Add)  # type: ignore[arg-type]
    with pytest.raises(WrongMessageTypeError, match="int"):
        await make_bus().execute(3)  # type: ignore[arg-type]


def test_a_second_handler_for_a_command_is_refused() -> None:
    bus = make_bus()

    with pytest.raises(DuplicateHandlerError, match="replace=True"):
        bus.register_command_handler(Add, add)


async def test_replace_takes_the_place_of_a_handler_also_after_first_use() -> None:
    bus = make_bus()
    await bus.execute(Add(left=1, right=2))

    async def multiply(command: Add) -> int:
        return command.left * command.right

    bus.register_command_handler(Add, multiply, replace=True)

    assert await bus.call(Add(left=2, right=5)) == 10


async def test_an_unregistered_handler_is_gone_also_after_first_use() -> None:
    bus = make_bus()
    await bus.execute(Add(left=1, right=2))

    assert bus.unregister_command_handler(Add)

    with pytest.raises(MissingHandlerError):
        await bus.execute(Add(left=1, right=2))
    assert not bus.unregister_command_handler(Add)


async def test_a_handler_of_a_base_command_takes_its_subclasses() -> None:
    class AddMore(Add):
        pass

    assert await make_bus().call(AddMore(left=1, right=1)) == 2


async def test_sync_handlers_run_in_a_thread_with_their_context() -> None:
    bus = MessageBus()
    seen: list[str] = []

    @bus.handles(Add)
    def add_slowly(command: Add) -> int:
        context = current_context()
        assert context is not None
        seen.append(context.handler)
        return command.left + command.right

    assert await bus.call(Add(left=1, right=2)) == 3
    assert seen == [context_name(add_slowly)]


def context_name(function: object) -> str:
    return str(getattr(function, "__qualname__", "")).rsplit("<locals>.", 1)[-1]


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
    bus = make_bus()

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
    bus = make_bus()

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
    bus = make_bus()
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
    assert make_bus().stats().events == {}


async def test_execute_works_before_start_and_is_refused_after_stop() -> None:
    bus = make_bus()

    assert await bus.call(Add(left=1, right=1)) == 2
    await bus.stop()

    with pytest.raises(BusClosedError, match="has stopped"):
        await bus.execute(Add(left=1, right=1))


async def test_counts_add_up_after_many_commands() -> None:
    bus = make_bus()

    for number in range(1500):
        await bus.execute(Add(left=number, right=1))
        if number % 3 == 0:
            assert not (await bus.execute(Fail())).success

    stats = bus.stats().commands
    assert (stats["add"].sent, stats["add"].handled) == (1500, 1500)
    assert (stats["fail"].sent, stats["fail"].failed) == (500, 500)
    assert sum(stats["add"].buckets) == 1500


def test_errors_survive_pickling() -> None:
    error = HandlerTimeoutError(handler="h", message_type=Add, seconds=2.0)

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is HandlerTimeoutError
    assert (str(copy), copy.handler, copy.seconds) == (str(error), "h", 2.0)
