"""Log events: to structlog if the application uses it, else to the standard logger."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from collections.abc import Generator, MutableMapping
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from msgbus import BusConfig, Command, Event, MessageBus
from msgbus.telemetry.logging import log
from tests.fakes import logged

SECRET = "hunter2"
PAYLOAD = "Lovelace-1815"


class ChargeCard(Command):
    holder: str = PAYLOAD


class CardCharged(Event):
    holder: str = PAYLOAD


async def fail(message: object) -> None:
    raise OSError(f"https://bob:{SECRET}@bank.example refused")


@pytest.fixture(autouse=True)
def unconfigured_structlog() -> Generator[None]:
    """structlog as a program finds it that has only imported it."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


def make_bus(name: str) -> MessageBus:
    """A bus on which everything fails, and says a secret."""
    bus = MessageBus(BusConfig(name=name))
    bus.register_command_handler(ChargeCard, fail)
    bus.register_event_handler(CardCharged, fail, name="book")
    return bus


async def fail_once_each(bus: MessageBus) -> None:
    """A failed event, and a failed command that nobody looks at."""
    async with bus:
        await bus.publish(CardCharged())
        await bus.settled()
        await bus.execute(ChargeCard())
    gc.collect()


def of_bus(entries: list[MutableMapping[str, Any]], name: str) -> list[MutableMapping[str, Any]]:
    """Only this bus's: the collection may also find results of tests that ran before."""
    return [entry for entry in entries if entry.get("bus") == name]


# -- where events go ---------------------------------------------------------------------------


def test_without_structlog_events_go_to_the_standard_logger(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log.warning("queue_is_full", handler="book", size=3)

    (record,) = caplog.records
    assert (record.name, record.levelno) == ("msgbus", logging.WARNING)
    assert record.getMessage() == "queue_is_full handler=book size=3"
    assert logged(caplog, "queue_is_full") == [
        {"event": "queue_is_full", "handler": "book", "size": 3}
    ]


def test_configured_structlog_gets_the_events_instead(caplog: pytest.LogCaptureFixture) -> None:
    with capture_logs() as entries:
        log.warning("queue_is_full", handler="book", size=3)

    assert entries == [
        {"event": "queue_is_full", "log_level": "warning", "handler": "book", "size": 3}
    ]
    assert caplog.records == []


def test_an_event_that_structlog_fails_on_goes_to_the_standard_logger(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(logger: object, method: str, data: object) -> str:
        raise RuntimeError

    structlog.configure(processors=[broken])

    log.error("handler_failed", handler="ship")

    (record,) = caplog.records
    assert record.getMessage() == "handler_failed handler=ship logger_error=RuntimeError"


def test_structlog_that_is_imported_but_not_configured_is_left_alone(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    log.error("queue_is_full")

    assert [record.getMessage() for record in caplog.records] == ["queue_is_full"]
    assert capsys.readouterr().out == ""
    assert not structlog.is_configured()


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_every_level_is_kept(level: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="msgbus")

    getattr(log, level)("something")
    with capture_logs() as entries:
        getattr(log, level)("something")

    assert [record.levelname for record in caplog.records] == [level.upper()]
    assert [entry["log_level"] for entry in entries] == [level]


def test_what_the_logger_does_not_want_is_not_written(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="msgbus")

    log.warning("something")

    assert caplog.records == []


def test_a_program_without_any_logging_set_up_still_sees_errors_and_imports_no_structlog() -> None:
    code = """
import sys
from msgbus.telemetry.logging import log
log.error("handler_failed", handler="book")
print("structlog" in sys.modules)
"""

    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert answer.stderr.strip() == "handler_failed handler=book"
    assert answer.stdout.strip() == "False"


# -- what events say ---------------------------------------------------------------------------


async def test_a_failed_handler_is_named_with_its_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = make_bus("named")
    event = CardCharged()

    async with bus:
        await bus.publish(event)

    (entry,) = logged(caplog, "handler_failed")
    assert dict(entry, traceback=None) == {
        "event": "handler_failed",
        "bus": "named",
        "handler": "book",
        "message_type": "CardCharged",
        "message_id": event.message_id,
        "correlation_id": event.message_id,
        "session_id": None,
        "attempt": 1,
        "error": "OSError: https://bob:[redacted]@bank.example refused",
        "traceback": None,
    }


async def test_a_failed_command_that_nobody_looked_at_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = make_bus("unobserved")
    command = ChargeCard()

    async with bus:
        await bus.execute(command)
    gc.collect()

    failures = logged(caplog, "command_failed_unobserved")
    entries = [dict(entry, traceback=None) for entry in failures]
    assert [entry for entry in entries if entry["bus"] == "unobserved"] == [
        {
            "event": "command_failed_unobserved",
            "bus": "unobserved",
            "handler": "fail",
            "message_type": "ChargeCard",
            "message_id": command.message_id,
            "correlation_id": command.message_id,
            "session_id": None,
            "attempt": 1,
            "error": "OSError: https://bob:[redacted]@bank.example refused",
            "traceback": None,
        }
    ]


async def test_a_failed_command_that_somebody_looked_at_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = make_bus("observed")

    async with bus:
        assert not (await bus.execute(ChargeCard())).success
    gc.collect()

    entries = logged(caplog, "command_failed_unobserved")
    assert [entry for entry in entries if entry["bus"] == "observed"] == []


async def test_neither_payloads_nor_secrets_reach_the_standard_logger(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="msgbus")

    await fail_once_each(make_bus("standard"))

    names = {entry["event"] for entry in (getattr(one, "msgbus", {}) for one in caplog.records)}
    assert {"handler_failed", "command_failed_unobserved"} <= names
    everything = caplog.text + repr([vars(record) for record in caplog.records])
    assert "[redacted]" in everything
    assert SECRET not in everything
    assert PAYLOAD not in everything


async def test_neither_payloads_nor_secrets_reach_structlog() -> None:
    with capture_logs() as entries:
        await fail_once_each(make_bus("structured"))

    mine = of_bus(entries, "structured")
    assert [entry["event"] for entry in mine] == ["handler_failed", "command_failed_unobserved"]
    assert [entry["log_level"] for entry in mine] == ["error", "error"]
    assert "[redacted]" in repr(mine)
    assert SECRET not in repr(mine)
    assert PAYLOAD not in repr(mine)


async def test_a_bus_that_does_its_work_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="msgbus")
    bus = MessageBus(BusConfig(name="quiet"))

    async def work(message: object) -> None:
        pass

    bus.register_command_handler(ChargeCard, work)
    bus.register_event_handler(CardCharged, work)

    async with bus, bus.session() as session:
        await session.execute(ChargeCard())
        await session.publish(CardCharged())
        await session.settled()

    entries = [getattr(record, "msgbus", {}) for record in caplog.records]
    assert [entry for entry in entries if entry.get("bus") == "quiet"] == []
