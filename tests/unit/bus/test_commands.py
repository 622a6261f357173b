"""Commands: one handler, one result."""

from __future__ import annotations

import pickle

import pytest

from msgbus import (
    BusClosedError,
    CommandResult,
    DuplicateHandlerError,
    HandlerTimeoutError,
    MessageBus,
    MissingHandlerError,
    Refusal,
    current_context,
)
from msgbus.errors import WrongMessageTypeError
from tests.fakes import Add, Added, Fail, add, make_command_bus


class OutOfStock(Refusal):
    pass


async def test_execute_gives_the_handlers_reply() -> None:
    bus = make_command_bus()

    result = await bus.execute(Add(left=1, right=2))

    assert result.success
    assert result.value == 3
    assert result.unwrap() == 3
    assert result.error is None
    assert result.exception is None
    assert result.attempts == 1
    assert result.duration >= 0


async def test_call_gives_the_value_itself() -> None:
    assert await make_command_bus().call(Add(left=1, right=2)) == 3


async def test_a_failed_handler_gives_a_failed_result_with_its_own_exception() -> None:
    result = await make_command_bus().execute(Fail())

    assert not result.success
    assert result.value is None
    assert result.error == "ValueError: boom"
    assert isinstance(result.exception, ValueError)
    with pytest.raises(ValueError, match="boom"):
        result.unwrap()


async def test_the_exception_of_the_first_command_has_no_context_of_the_bus() -> None:
    """20.6: it would be logged as what the handler was dealing with."""
    bus = make_command_bus()

    for _ in range(2):
        result = await bus.execute(Fail())
        assert result.exception is not None
        assert result.exception.__context__ is None


async def test_call_raises_the_handlers_own_exception() -> None:
    with pytest.raises(ValueError, match="boom"):
        await make_command_bus().call(Fail())


async def test_secrets_are_removed_from_the_error_text() -> None:
    result = await make_command_bus().execute(Fail(text="no route to https://bob:hunter2@db/x"))

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

    result = await make_command_bus().execute(command)

    assert result.command_id == command.message_id


async def test_a_result_is_read_only() -> None:
    result: CommandResult[int] = await make_command_bus().execute(Add(left=1, right=2))

    for name in ("success", "value", "error", "exception", "duration", "attempts", "command_id"):
        with pytest.raises(AttributeError):
            setattr(result, name, None)


async def test_a_command_without_handler_raises_and_says_how_to_register_one() -> None:
    with pytest.raises(MissingHandlerError, match="register_command_handler") as caught:
        await MessageBus().execute(Add(left=1, right=2))

    assert caught.value.message_type is Add


async def test_an_event_cannot_be_executed_and_the_error_says_what_to_do() -> None:
    with pytest.raises(WrongMessageTypeError, match=r"bus\.publish"):
        await make_command_bus().execute(Added(total=1))  # type: ignore[arg-type]


async def test_a_class_or_a_stranger_cannot_be_executed() -> None:
    with pytest.raises(WrongMessageTypeError, match="pass an instance"):
        await make_command_bus().execute(Add)  # type: ignore[arg-type]
    with pytest.raises(WrongMessageTypeError, match="int"):
        await make_command_bus().execute(3)  # type: ignore[arg-type]


def test_a_second_handler_for_a_command_is_refused() -> None:
    bus = make_command_bus()

    with pytest.raises(DuplicateHandlerError, match="replace=True"):
        bus.register_command_handler(Add, add)


async def test_replace_takes_the_place_of_a_handler_also_after_first_use() -> None:
    bus = make_command_bus()
    await bus.execute(Add(left=1, right=2))

    async def multiply(command: Add) -> int:
        return command.left * command.right

    bus.register_command_handler(Add, multiply, replace=True)

    assert await bus.call(Add(left=2, right=5)) == 10


async def test_an_unregistered_handler_is_gone_also_after_first_use() -> None:
    bus = make_command_bus()
    await bus.execute(Add(left=1, right=2))

    assert bus.unregister_command_handler(Add)

    with pytest.raises(MissingHandlerError):
        await bus.execute(Add(left=1, right=2))
    assert not bus.unregister_command_handler(Add)


async def test_a_handler_of_a_base_command_takes_its_subclasses() -> None:
    class AddMore(Add):
        pass

    assert await make_command_bus().call(AddMore(left=1, right=1)) == 2


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


async def test_execute_works_before_start_and_is_refused_after_stop() -> None:
    bus = make_command_bus()

    assert await bus.call(Add(left=1, right=1)) == 2
    await bus.stop()

    with pytest.raises(BusClosedError, match="has stopped"):
        await bus.execute(Add(left=1, right=1))


async def test_counts_add_up_after_many_commands() -> None:
    bus = make_command_bus()

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
