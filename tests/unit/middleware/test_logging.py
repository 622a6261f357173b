"""LoggingMiddleware: one log event for every outcome."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest
from pydantic import Field

from msgbus import Command, ConfigurationError, Event, MessageBus, Refusal
from msgbus.middleware import LoggingMiddleware, ValidationMiddleware
from msgbus.runtime.clock import VirtualClock

pytestmark = pytest.mark.usefixtures("everything_is_logged")


class Pay(Command[str]):
    card: str = "top secret"
    amount: int = Field(default=1, gt=0)


class Paid(Event):
    number: int = 0


class OutOfMoney(Refusal):
    pass


@pytest.fixture
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="msgbus")


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """Level and data of each event that the middleware wrote."""
    records = [record for record in caplog.records if hasattr(record, "msgbus")]
    rows: list[tuple[str, dict[str, Any]]] = [
        (record.levelname, record.__dict__["msgbus"]) for record in records
    ]
    return [row for row in rows if str(row[1]["event"]).startswith("message_")]


async def pay(command: Pay) -> str:
    return "receipt"


async def test_success_is_logged_with_type_id_handler_attempt_and_duration(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock, middleware=[LoggingMiddleware()])
    command = Pay()

    @bus.handles(Pay)
    async def slowly(command: Pay) -> str:
        await clock.sleep(3)
        return "receipt"

    async with anyio.create_task_group() as group:
        group.start_soon(bus.execute, command)
        await clock.advance(3)

    assert logged(caplog) == [
        (
            "DEBUG",
            {
                "event": "message_handled",
                "message_type": "Pay",
                "message_id": command.message_id,
                "correlation_id": command.message_id,
                "causation_id": None,
                "session_id": None,
                "handler": "slowly",
                "attempt": 1,
                "duration": 3.0,
            },
        )
    ]


async def test_success_is_logged_at_info_if_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    bus = MessageBus(middleware=[LoggingMiddleware(level="info")])
    bus.register_command_handler(Pay, pay)

    result = await bus.execute(Pay())

    assert result.value == "receipt"
    assert [(level, data["event"]) for level, data in logged(caplog)] == [
        ("INFO", "message_handled")
    ]


async def test_a_failure_is_logged_as_warning_with_secrets_removed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MessageBus(middleware=[LoggingMiddleware()])

    @bus.handles(Pay)
    async def fail(command: Pay) -> str:
        raise ConnectionError("cannot reach https://bob:hunter2@bank")

    result = await bus.execute(Pay())

    assert isinstance(result.exception, ConnectionError)
    [(level, data)] = logged(caplog)
    assert (level, data["event"]) == ("WARNING", "message_failed")
    assert data["error"].startswith("ConnectionError: cannot reach")
    assert "hunter2" not in caplog.text


async def test_a_refusal_is_logged_at_info(caplog: pytest.LogCaptureFixture) -> None:
    bus = MessageBus(middleware=[LoggingMiddleware()])

    @bus.handles(Pay)
    async def refuse(command: Pay) -> str:
        raise OutOfMoney("nothing left")

    result = await bus.execute(Pay())

    assert isinstance(result.exception, OutOfMoney)
    [(level, data)] = logged(caplog)
    assert (level, data["event"]) == ("INFO", "message_refused")
    assert data["error"] == "OutOfMoney: nothing left"


async def test_a_cancelled_call_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    bus = MessageBus(middleware=[LoggingMiddleware()])
    began = anyio.Event()

    @bus.handles(Pay)
    async def hang(command: Pay) -> str:
        began.set()
        await anyio.sleep_forever()
        return "never"

    async with anyio.create_task_group() as group:
        group.start_soon(bus.execute, Pay())
        await began.wait()
        group.cancel_scope.cancel()

    assert [(level, data["event"]) for level, data in logged(caplog)] == [
        ("DEBUG", "message_cancelled")
    ]


async def test_what_is_in_a_message_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    bus = MessageBus(middleware=[LoggingMiddleware(), ValidationMiddleware()])
    bus.register_command_handler(Pay, pay)

    handled = await bus.execute(Pay())
    invalid = await bus.execute(Pay.model_construct(card="top secret", amount=-4711_4711_4711))

    assert handled.success
    assert not invalid.success
    assert [data["event"] for _, data in logged(caplog)] == ["message_handled", "message_failed"]
    assert logged(caplog)[1][1]["error"] == "ValidationError: Pay: amount (greater_than)"
    assert "top secret" not in caplog.text
    assert "471147114711" not in caplog.text


async def test_a_list_is_one_outcome_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    bus = MessageBus(middleware=[LoggingMiddleware()])
    events = [Paid(number=number) for number in range(3)]

    @bus.on(Paid, batch=True)
    async def record(events: list[Paid]) -> None: ...

    for event in events:
        await bus.publish(event)
    async with bus:
        await bus.settled()

    [(_, data)] = logged(caplog)
    assert data["message_type"] == "Paid"
    assert data["message_id"] == events[0].message_id
    assert data["count"] == 3


async def test_each_attempt_of_a_list_is_logged_with_its_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MessageBus(middleware=[LoggingMiddleware()])

    @bus.on(Paid, batch=True)
    async def fail_on_one(events: list[Paid]) -> None:
        if any(event.number == 1 for event in events):
            raise ValueError("one is wrong")

    for number in range(2):
        await bus.publish(Paid(number=number))
    async with bus:
        await bus.settled()

    assert [(data["event"], data["attempt"], data["count"]) for _, data in logged(caplog)] == [
        ("message_failed", 1, 2),
        ("message_failed", 2, 2),
        ("message_handled", 3, 1),
        ("message_failed", 3, 1),
    ]


async def test_a_clock_of_its_own_gives_the_durations(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    bus = MessageBus(middleware=[LoggingMiddleware(clock=clock)])

    @bus.handles(Pay)
    async def slowly(command: Pay) -> str:
        await clock.advance(7)
        return "receipt"

    await bus.execute(Pay())

    [(_, data)] = logged(caplog)
    assert data["duration"] == 7


async def test_it_works_without_a_bus(caplog: pytest.LogCaptureFixture) -> None:
    async def call_next(message: Pay) -> str:
        return "receipt"

    value = await LoggingMiddleware()(Pay(), call_next)

    assert value == "receipt"
    [(_, data)] = logged(caplog)
    assert (data["handler"], data["attempt"]) == ("unknown", 1)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not 'loud'"):
        LoggingMiddleware(level="loud")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
