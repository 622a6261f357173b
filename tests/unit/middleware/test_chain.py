"""The middleware chain, as a bus builds it."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from msgbus import (
    CallNext,
    Context,
    Event,
    EventHandlerFailedEvent,
    MessageBus,
    Middleware,
)
from msgbus.errors import BusStateError
from msgbus.runtime.clock import VirtualClock
from tests.unit.middleware.greetings import Greet, Happened, greet


def noting(journal: list[str], name: str) -> Middleware:
    async def note(message: Any, call_next: CallNext) -> Any:
        journal.append(f"{name} in")
        value = await call_next(message)
        journal.append(f"{name} out")
        return value

    return note


class Counting:
    """Counts what it sees; `batch` says whether it wants lists."""

    def __init__(self, *, batch: bool) -> None:
        self.batch = batch
        self.seen: list[Any] = []

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        self.seen.append(message)
        return await call_next(message)


async def test_the_first_listed_middleware_is_outermost() -> None:
    journal: list[str] = []
    bus = MessageBus(middleware=[noting(journal, "first"), noting(journal, "second")])
    bus.add_middleware(noting(journal, "third"))
    bus.register_command_handler(Greet, greet)

    result = await bus.execute(Greet())

    assert result.value == "hello you"
    assert journal == [
        "first in",
        "second in",
        "third in",
        "third out",
        "second out",
        "first out",
    ]


async def test_middleware_wraps_event_handlers_too() -> None:
    journal: list[str] = []
    bus = MessageBus(middleware=[noting(journal, "around")])

    @bus.on(Happened)
    async def record(event: Happened) -> None:
        journal.append("handler")

    async with bus:
        await bus.publish(Happened())
        await bus.settled()

    assert journal == ["around in", "handler", "around out"]


async def test_middleware_wraps_sync_handlers_too() -> None:
    journal: list[str] = []
    bus = MessageBus(middleware=[noting(journal, "around")])

    @bus.handles(Greet)
    def greet_in_a_thread(command: Greet) -> str:
        journal.append("handler")
        return "hello"

    result = await bus.execute(Greet())

    assert result.value == "hello"
    assert journal == ["around in", "handler", "around out"]


async def test_per_message_middleware_stands_outside_of_per_attempt_middleware() -> None:
    journal: list[str] = []
    bus = MessageBus()
    bus.add_middleware(noting(journal, "attempt"))
    bus.add_middleware(noting(journal, "message"), per="message")
    bus.register_command_handler(Greet, greet)

    await bus.execute(Greet())

    assert journal == ["message in", "attempt in", "attempt out", "message out"]


async def test_the_handlers_timeout_stands_between_message_and_attempt() -> None:
    journal: list[str] = []

    def errors_seen_by(name: str) -> Middleware:
        async def see(message: Any, call_next: CallNext) -> Any:
            try:
                return await call_next(message)
            except Exception as error:
                journal.append(f"{name} saw {type(error).__name__}")
                raise

        return see

    async def hang(command: Greet) -> str:
        await anyio.sleep_forever()
        return "never"

    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    bus.add_middleware(errors_seen_by("attempt"))
    bus.add_middleware(errors_seen_by("message"), per="message")
    bus.register_command_handler(Greet, hang, timeout=5)

    async with anyio.create_task_group() as group:
        group.start_soon(bus.execute, Greet())
        await clock.advance(5)

    assert journal == ["message saw HandlerTimeoutError"]


async def test_a_middleware_that_does_not_call_next_answers_for_the_handler() -> None:
    called: list[Greet] = []

    async def answer(message: Any, call_next: CallNext) -> Any:
        return "not at home"

    async def never(command: Greet) -> str:
        called.append(command)
        return ""

    bus = MessageBus(middleware=[answer])
    bus.register_command_handler(Greet, never)

    result = await bus.execute(Greet())

    assert result.success
    assert result.value == "not at home"
    assert called == []


async def test_a_middleware_may_change_the_value() -> None:
    async def shout(message: Any, call_next: CallNext) -> Any:
        return (await call_next(message)).upper()

    bus = MessageBus(middleware=[shout])
    bus.register_command_handler(Greet, greet)

    assert (await bus.execute(Greet())).value == "HELLO YOU"


async def test_a_middleware_may_hand_on_another_message() -> None:
    async def rename(message: Any, call_next: CallNext) -> Any:
        return await call_next(message.model_copy(update={"who": "somebody"}))

    bus = MessageBus(middleware=[rename])
    seen: list[tuple[str, str]] = []

    @bus.handles(Greet)
    async def greet_from(command: Greet, context: Context) -> str:
        original = context.message
        assert isinstance(original, Greet)
        seen.append((command.who, original.who))
        return "hello"

    await bus.execute(Greet())

    assert seen == [("somebody", "you")]


async def test_a_middleware_sees_the_handlers_own_exception_and_may_answer_for_it() -> None:
    seen: list[Exception] = []

    async def rescue(message: Any, call_next: CallNext) -> Any:
        try:
            return await call_next(message)
        except ValueError as error:
            seen.append(error)
            return "rescued"

    async def fail(command: Greet) -> str:
        raise ValueError("no")

    bus = MessageBus(middleware=[rescue])
    bus.register_command_handler(Greet, fail)

    result = await bus.execute(Greet())

    assert result.value == "rescued"
    assert [str(error) for error in seen] == ["no"]


async def test_a_middleware_that_raises_fails_the_command() -> None:
    error = RuntimeError("closed today")

    async def refuse(message: Any, call_next: CallNext) -> Any:
        raise error

    bus = MessageBus(middleware=[refuse])
    bus.register_command_handler(Greet, greet)

    result = await bus.execute(Greet())

    assert not result.success
    assert result.exception is error


async def test_a_middleware_that_raises_fails_the_event() -> None:
    async def refuse(message: Any, call_next: CallNext) -> Any:
        raise RuntimeError("closed today")

    failures: list[EventHandlerFailedEvent] = []
    handled: list[Event] = []
    bus = MessageBus()
    bus.add_middleware(refuse, types=Happened)
    bus.register_event_handler(Happened, handled.append, inline=True, name="record")
    bus.register_event_handler(EventHandlerFailedEvent, failures.append, inline=True)

    async with bus:
        await bus.publish(Happened())
        await bus.settled()

    assert handled == []
    assert [(one.handler, one.error_type) for one in failures] == [("record", "RuntimeError")]
    assert bus.stats().handlers["record"].failed == 1


async def test_a_failure_after_the_handler_forgets_what_it_emitted() -> None:
    async def fail_late(message: Any, call_next: CallNext) -> Any:
        await call_next(message)
        raise RuntimeError("too late")

    published: list[Event] = []
    bus = MessageBus()
    bus.add_middleware(fail_late, types=Greet)
    bus.register_event_handler(Happened, published.append, inline=True)

    @bus.handles(Greet)
    async def greet_and_emit(command: Greet, context: Context) -> str:
        context.emit(Happened())
        return "hello"

    async with bus:
        result = await bus.execute(Greet())
        await bus.settled()

    assert not result.success
    assert published == []


async def try_twice(message: Any, call_next: CallNext) -> Any:
    try:
        return await call_next(message)
    except ConnectionError:
        return await call_next(message)


async def test_a_middleware_may_call_on_twice() -> None:
    calls: list[Greet] = []

    async def fail_once(command: Greet) -> str:
        calls.append(command)
        if len(calls) == 1:
            raise ConnectionError
        return "at last"

    bus = MessageBus(middleware=[try_twice])
    bus.register_command_handler(Greet, fail_once)

    result = await bus.execute(Greet())

    assert result.value == "at last"
    assert len(calls) == 2


async def test_what_a_failed_first_call_emitted_is_forgotten() -> None:
    published: list[int] = []
    calls: list[int] = []
    bus = MessageBus()
    bus.add_middleware(try_twice, types=Greet)

    @bus.on(Happened)
    async def record(event: Happened) -> None:
        published.append(event.number)

    @bus.handles(Greet)
    async def emit_then_fail_once(command: Greet, context: Context) -> str:
        calls.append(1)
        context.emit(Happened(number=len(calls)))
        if len(calls) == 1:
            raise ConnectionError
        return "at last"

    async with bus:
        await bus.execute(Greet())
        await bus.settled()

    assert published == [2]


async def test_middleware_cannot_be_added_to_a_started_bus() -> None:
    bus = MessageBus()

    async with bus:
        with pytest.raises(BusStateError, match="before the bus is started"):
            bus.add_middleware(try_twice)


async def test_middleware_added_between_two_calls_before_the_start_applies_to_the_second() -> None:
    counting = Counting(batch=False)
    bus = MessageBus()
    bus.register_command_handler(Greet, greet)

    await bus.execute(Greet(who="first"))
    bus.add_middleware(counting)
    await bus.execute(Greet(who="second"))

    assert [message.who for message in counting.seen] == ["second"]


async def test_session_handlers_are_wrapped_by_the_buss_middleware() -> None:
    counting = Counting(batch=False)
    bus = MessageBus(middleware=[counting])

    async with bus, bus.session() as session:
        session.register_command_handler(Greet, greet)
        result = await session.execute(Greet())

    assert result.value == "hello you"
    assert len(counting.seen) == 1
