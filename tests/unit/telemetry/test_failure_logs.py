"""What the log says of failures: each once, with its traceback and ids, forging nothing (20.1)."""

from __future__ import annotations

import gc
import io
import json
import logging
from collections.abc import Generator, Mapping
from typing import Any

import pytest
import structlog

from msgbus import BusConfig, Command, Context, Event, MessageBus, QueueConfig
from msgbus.middleware import LoggingMiddleware
from msgbus.resilience import ResilientMessageBus, RetryConfig
from msgbus.runtime.clock import VirtualClock
from msgbus.telemetry.logging import log
from tests.fakes import logged

UNSAFE = "\n\r\t\x00\x07\x0b\x1b\x7f\x85\x9b\u2028\u2029\u202e\ud800"


class Charge(Command):
    pass


class Charged(Event):
    number: int = 0


class CountingError(Exception):
    """Counts how often its text is asked for."""

    asked = 0

    def __str__(self) -> str:
        self.asked += 1
        return "no funds"


def charge() -> None:
    raise ConnectionError("no route to https://bob:hunter2@bank.example")


async def fail(message: object) -> None:
    charge()


async def broken_filter(event: Event) -> bool:
    await fail(event)
    return True


@pytest.fixture(autouse=True)
def unconfigured_structlog() -> Generator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


def levels(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Name and level of all warnings and errors, apart from results of earlier tests."""
    rows = [(getattr(one, "msgbus", {}).get("event", ""), one.levelname) for one in caplog.records]
    return [row for row in rows if row[1] in {"WARNING", "ERROR"}]


def shows_where(entry: Mapping[str, Any]) -> None:
    """The traceback of `fail`, with the user's frames only, and without the secret."""
    traceback: str = entry["traceback"]
    lines = traceback.split("\n")
    assert all(line.startswith("  | ") for line in lines)
    assert lines[0] == "  | Traceback (most recent call last):"
    assert "in fail" in traceback
    assert "in charge" in traceback
    assert "frame" in traceback
    assert "of msgbus" in traceback
    assert "/msgbus/bus/lanes/worker.py" not in traceback
    assert lines[-1] == "  | ConnectionError: no route to https://bob:[redacted]@bank.example"
    assert "hunter2" not in traceback


# -- each failure once, with its traceback and ids -----------------------------------------------


async def test_a_failed_event_handler_is_one_error_with_traceback_and_ids(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MessageBus(BusConfig(name="shop"))
    bus.register_event_handler(Charged, fail, name="book")

    @bus.handles(Charge)
    async def begin(command: Charge, context: Context) -> None:
        await context.publish(Charged())

    command = Charge()
    async with bus, bus.session("job-1") as session:
        await session.execute(command)
        await bus.settled()

    assert levels(caplog) == [("handler_failed", "ERROR")]
    (entry,) = logged(caplog, "handler_failed")
    assert (entry["bus"], entry["handler"], entry["message_type"]) == ("shop", "book", "Charged")
    assert (entry["correlation_id"], entry["session_id"]) == (command.message_id, "job-1")
    assert entry["attempt"] == 1
    shows_where(entry)


async def test_a_filter_that_raises_is_a_failed_handler_with_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MessageBus()

    @bus.on(Charged, filter=broken_filter)
    async def single(event: Charged) -> None: ...

    @bus.on(Charged, filter=broken_filter, batch=True)
    async def many(events: list[Charged]) -> None: ...

    async with bus:
        await bus.publish(Charged())
        await bus.settled()

    assert levels(caplog) == [("handler_failed", "ERROR")] * 2
    for entry in logged(caplog, "handler_failed"):
        assert entry["attempt"] == 1
        shows_where(entry)


async def test_a_failed_command_that_nobody_looks_at_is_one_error_with_traceback_and_ids(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MessageBus(BusConfig(name="unseen"))
    bus.register_command_handler(Charge, fail)
    command = Charge()

    async with bus, bus.session("job-2") as session:
        await session.execute(command)
    gc.collect()

    (entry,) = [
        one for one in logged(caplog, "command_failed_unobserved") if one["bus"] == "unseen"
    ]
    assert entry["message_id"] == entry["correlation_id"] == command.message_id
    assert (entry["message_type"], entry["session_id"]) == ("Charge", "job-2")
    assert entry["attempt"] == 1
    shows_where(entry)


async def test_no_traceback_is_formatted_for_a_failed_command_that_is_looked_at() -> None:
    bus = MessageBus()
    error = CountingError()

    @bus.handles(Charge)
    async def refuse(command: Charge) -> None:
        raise error

    async with bus:
        assert (await bus.execute(Charge())).error == "CountingError: no funds"

    assert error.asked == 1


async def test_no_traceback_is_formatted_if_the_logger_is_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, logger="msgbus")
    bus = MessageBus()
    error = CountingError()

    @bus.on(Charged)
    async def refuse(event: Charged) -> None:
        raise error

    async with bus:
        await bus.publish(Charged())
        await bus.settled()

    assert error.asked == 1


async def test_attempts_that_are_repeated_are_warnings_and_only_the_last_is_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    bus = ResilientMessageBus(
        clock=clock, retry=RetryConfig(max_retries=2, initial_delay=1, jitter=False)
    )
    bus.register_event_handler(Charged, fail)

    async with bus, bus.session("job-3") as session:
        await session.publish(Charged())
        await clock.advance(10)
        await bus.settled()

    assert levels(caplog) == [
        ("retry_scheduled", "WARNING"),
        ("retry_scheduled", "WARNING"),
        ("handler_failed", "ERROR"),
    ]
    retries = logged(caplog, "retry_scheduled")
    assert [(one["attempt"], one["delay"]) for one in retries] == [(1, 1.0), (2, 2.0)]
    (failed,) = logged(caplog, "handler_failed")
    assert failed["attempt"] == 3
    for entry in (*retries, failed):
        assert entry["session_id"] == "job-3"
        shows_where(entry)


async def test_a_list_that_is_retried_is_a_warning_and_its_bad_event_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MessageBus()

    @bus.on(Charged, batch=True, queue=QueueConfig(linger=60))
    async def book(events: list[Charged]) -> None:
        if any(event.number == 1 for event in events):
            await fail(events)

    async with bus:
        await bus.publish_many([Charged(number=number) for number in range(3)])
        await bus.settled()

    assert levels(caplog) == [
        ("batch_retried", "WARNING"),
        ("batch_retried", "WARNING"),
        ("handler_failed", "ERROR"),
    ]
    retries = logged(caplog, "batch_retried")
    assert [(one["attempt"], one["count"]) for one in retries] == [(1, 3), (2, 3)]
    (failed,) = logged(caplog, "handler_failed")
    assert failed["attempt"] == 3
    for entry in (*retries, failed):
        shows_where(entry)


async def test_a_durable_handler_that_fails_is_an_error_only_at_its_last_attempt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MessageBus(journal="memory:")
    retry = RetryConfig(max_retries=1, initial_delay=0)
    bus.register_event_handler(Charged, fail, durable="book", retry=retry)

    async with bus:
        await bus.publish(event := Charged())
        await bus.settled()

    assert levels(caplog) == [
        ("subscription_retry_scheduled", "WARNING"),
        ("subscription_dead_lettered", "ERROR"),
    ]
    (retried,) = logged(caplog, "subscription_retry_scheduled")
    (dead,) = logged(caplog, "subscription_dead_lettered")
    assert (retried["attempt"], dead["attempt"]) == (1, 2)
    for entry in (retried, dead):
        assert entry["message_id"] == entry["correlation_id"] == event.message_id
        assert entry["session_id"] is None
        shows_where(entry)


async def test_an_enqueued_command_that_fails_is_an_error_only_at_its_last_attempt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    retry = RetryConfig(max_retries=1, initial_delay=1, jitter=False)
    bus = ResilientMessageBus(journal="memory:", clock=clock, retry=retry)
    bus.register_command_handler(Charge, fail)

    async with bus:
        ticket = await bus.enqueue(Charge())
        await bus.settled()
        await clock.advance(2)
        await bus.settled()
    gc.collect()

    assert [row for row in levels(caplog) if row[0].startswith("enqueued")] == [
        ("enqueued_command_retried", "WARNING"),
        ("enqueued_command_failed", "ERROR"),
    ]
    (retried,) = logged(caplog, "enqueued_command_retried")
    (failed,) = logged(caplog, "enqueued_command_failed")
    assert (retried["attempt"], failed["attempt"]) == (1, 2)
    for entry in (retried, failed):
        assert entry["message_id"] == entry["correlation_id"] == ticket.message_id
        shows_where(entry)


async def test_a_delayed_event_that_a_filter_fails_on_has_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock, filters=[broken_filter])

    @bus.on(Charged)
    async def book(event: Charged) -> None: ...

    async with bus:
        await bus.publish(event := Charged(), delay=5)
        await clock.advance(5)

    assert levels(caplog) == [("delayed_event_refused", "ERROR")]
    (entry,) = logged(caplog, "delayed_event_refused")
    assert entry["message_id"] == entry["correlation_id"] == event.message_id
    shows_where(entry)


async def test_logging_middleware_has_all_ids(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="msgbus")
    bus = MessageBus(middleware=[LoggingMiddleware()])
    bus.register_event_handler(Charged, fail)

    @bus.handles(Charge)
    async def begin(command: Charge, context: Context) -> None:
        await context.publish(Charged())

    command = Charge()
    async with bus, bus.session("job-4") as session:
        await session.execute(command)
        await bus.settled()

    (handled,) = logged(caplog, "message_handled")
    (failed,) = logged(caplog, "message_failed")
    assert (handled["causation_id"], failed["causation_id"]) == (None, command.message_id)
    assert (handled["handler"], failed["handler"]) == ("begin", "fail")
    for entry in (handled, failed):
        assert entry["correlation_id"] == command.message_id
        assert (entry["session_id"], entry["attempt"]) == ("job-4", 1)
        assert "traceback" not in entry  # it is in the one error line


# -- nothing is forged ---------------------------------------------------------------------------


def test_values_cannot_forge_lines_of_the_standard_logger(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log.warning("odd", handler=f"a{UNSAFE}b", chain=[f"c{UNSAFE}d"])

    text = caplog.records[0].getMessage()
    assert text.startswith(
        r"odd handler=a\n\r\t\x00\x07\x0b\x1b\x7f\x85\x9b\u2028\u2029\u202e\ud800b "
    )
    assert text.isprintable()
    (entry,) = logged(caplog, "odd")
    assert entry["handler"].isprintable()


async def test_the_text_of_an_error_cannot_forge_lines(caplog: pytest.LogCaptureFixture) -> None:
    forged = "handler_failed bus=shop handler=admin"
    bus = MessageBus()

    @bus.on(Charged)
    async def fail_oddly(event: Charged) -> None:
        raise ValueError(f"first\n{forged}\x1b[2J{UNSAFE}")

    async with bus:
        await bus.publish(Charged())
        await bus.settled()

    first, *rest = caplog.records[0].getMessage().split("\n")
    assert r"error=ValueError: first\nhandler_failed" in first
    assert f"  | {forged}" in "\n".join(rest)
    assert all(line.startswith("  | ") for line in rest)
    assert all(line.isprintable() for line in (first, *rest))


@pytest.mark.parametrize("colors", [True, False])
async def test_the_console_of_structlog_cannot_be_forged_either(colors: bool) -> None:
    written = io.StringIO()
    structlog.configure(
        processors=[structlog.dev.ConsoleRenderer(colors=colors)],
        logger_factory=structlog.PrintLoggerFactory(written),
    )
    bus = MessageBus(BusConfig(name="a\x1b[2J\nforged"))

    @bus.on(Charged)
    async def fail_oddly(event: Charged) -> None:
        raise ValueError("first\nforged\x1b[2J")

    async with bus:
        await bus.publish(Charged())
        await bus.settled()

    first, *rest = written.getvalue().rstrip("\n").split("\n")
    assert "handler_failed" in first
    assert "\x1b[2J" not in written.getvalue()
    assert "forged" in rest[-1]
    assert all(line.startswith("  | ") for line in rest)


async def test_structlog_gets_the_traceback_under_the_key_of_its_renderers() -> None:
    written = io.StringIO()
    structlog.configure(
        processors=[structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(written),
    )
    bus = MessageBus()
    bus.register_event_handler(Charged, fail)

    async with bus:
        await bus.publish(Charged())
        await bus.settled()

    entry = json.loads(written.getvalue())
    assert "traceback" not in entry
    shows_where({"traceback": entry["stack"]})
