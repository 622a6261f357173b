"""What a middleware must be, and what happens to one that is not."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import pytest

from msgbus import (
    CallNext,
    Command,
    ConfigurationError,
    Event,
    EventHandlerFailedEvent,
    MessageBus,
)
from msgbus.errors import MiddlewareError


class Greet(Command[str]):
    who: str = "you"


class Happened(Event):
    pass


async def greet(command: Greet) -> str:
    return f"hello {command.who}"


async def pass_on(message: Any, call_next: CallNext) -> Any:
    return await call_next(message)


class PassOn:
    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        return await call_next(message)


async def test_a_command_whose_middleware_forgets_to_await_fails_and_says_so() -> None:
    async def forgetful(message: Any, call_next: CallNext) -> Any:
        return call_next(message)

    bus = MessageBus(middleware=[forgetful])
    bus.register_command_handler(Greet, greet)

    result = await bus.execute(Greet())

    assert isinstance(result.exception, MiddlewareError)
    assert "await" in str(result.exception)
    assert result.exception.handler == "greet"
    assert result.exception.message_type is Greet


async def test_an_event_whose_middleware_forgets_to_await_fails() -> None:
    async def forgetful(message: Any, call_next: CallNext) -> Any:
        return call_next(message)

    bus = MessageBus()
    bus.add_middleware(forgetful, types=Happened)
    failures: list[EventHandlerFailedEvent] = []
    bus.register_event_handler(EventHandlerFailedEvent, failures.append, inline=True)

    @bus.on(Happened)
    async def record(event: Happened) -> None: ...

    async with bus:
        await bus.publish(Happened())
        await bus.settled()

    assert [failure.error_type for failure in failures] == ["MiddlewareError"]


async def test_a_sync_middleware_that_gives_a_plain_value_fails_and_says_so() -> None:
    def answer(message: Any, call_next: CallNext) -> Any:
        return "plain"

    bus = MessageBus(middleware=[answer])
    bus.register_command_handler(Greet, greet)

    result = await bus.execute(Greet())

    assert isinstance(result.exception, MiddlewareError)
    assert "async def" in str(result.exception)
    assert "answer" in str(result.exception)


async def test_a_sync_middleware_that_gives_an_awaitable_works() -> None:
    def pass_it_on(message: Any, call_next: CallNext) -> Awaitable[Any]:
        return call_next(message)

    bus = MessageBus(middleware=[pass_it_on])
    bus.register_command_handler(Greet, greet)

    assert (await bus.execute(Greet())).value == "hello you"


def test_a_middleware_of_the_wrong_arity_is_refused_at_once() -> None:
    async def lonely(message: Any) -> Any: ...

    with pytest.raises(ConfigurationError, match=r"lonely must take \(message, call_next\)"):
        MessageBus(middleware=[lonely])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]


def test_a_middleware_class_instead_of_an_instance_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"PassOn is a class; add an instance"):
        MessageBus(middleware=[PassOn])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]


def test_per_must_be_attempt_or_message() -> None:
    bus = MessageBus()

    with pytest.raises(ConfigurationError, match="not 'call'"):
        bus.add_middleware(pass_on, per="call")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
