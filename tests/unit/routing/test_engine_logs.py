"""MessageDispatchEngine: log events, their levels, fields and loggers."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any

import anyio
import pytest
import structlog
from structlog.testing import capture_logs

from msgbus import ConfigurationError
from msgbus.routing import DispatchResult, DispatchStatus, EventEnvelope, MessageDispatchEngine
from msgbus.runtime.clock import VirtualClock
from msgbus.telemetry.logging import EventLog
from tests.unit.routing.engines import (
    COMMAND,
    EVENT,
    TOPIC,
    OrderPlaced,
    engine_of,
    failing,
    nothing,
    route,
)

ENVELOPE = EventEnvelope(
    OrderPlaced(number=1815), correlation_id="flow-1", trace_id="trace-1", envelope_id="id-1"
)
MESSAGE = {
    "topic": TOPIC,
    "category": "event",
    "message_type": "shop.OrderPlaced",
    "message_id": "id-1",
    "correlation_id": "flow-1",
    "trace_id": "trace-1",
}


class Notes:
    """A logger of the application's own: methods of an event and its keys."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str, dict[str, Any]]] = []

    def debug(self, event: str, **keys: Any) -> None:
        self.entries.append(("debug", event, keys))

    def info(self, event: str, **keys: Any) -> None:
        self.entries.append(("info", event, keys))

    def warning(self, event: str, **keys: Any) -> None:
        self.entries.append(("warning", event, keys))

    def error(self, event: str, **keys: Any) -> None:
        self.entries.append(("error", event, keys))

    @property
    def names(self) -> list[tuple[str, str]]:
        return [(level, event) for level, event, _ in self.entries]

    def keys(self, event: str) -> dict[str, Any]:
        [keys] = [keys for _, name, keys in self.entries if name == event]
        return keys


async def reserve(envelope: EventEnvelope[Any]) -> list[str]:
    return ["shop.events.reserved"]


@pytest.fixture(autouse=True)
def unconfigured_structlog() -> Generator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


# -- what is logged ----------------------------------------------------------------------------


async def test_a_dispatch_logs_its_start_its_routing_and_its_end() -> None:
    notes = Notes()
    engine = engine_of({"stock": reserve}, logger=notes, clock=VirtualClock())

    await engine.dispatch(TOPIC, ENVELOPE)

    ids = {"dispatcher_ids": ["stock"], "route_ids": ["to-stock"], "dispatcher_count": 1}
    one = {"dispatcher_id": "stock", "route_id": "to-stock"}
    done = {"status": "success", "duration_ms": 0.0, "output_count": 1, "error_code": None}
    assert notes.entries == [
        ("info", "dispatch_started", MESSAGE | ids),
        ("debug", "dispatch_routed", MESSAGE | one),
        ("debug", "dispatcher_completed", MESSAGE | one | done),
        ("info", "dispatch_completed", MESSAGE | ids | done),
    ]


async def test_a_message_without_dispatcher_is_a_warning() -> None:
    notes = Notes()

    await engine_of({"stock": nothing}, logger=notes).dispatch("bank.events.x", ENVELOPE)

    assert notes.names == [
        ("info", "dispatch_started"),
        ("warning", "no_dispatcher"),
        ("info", "dispatch_completed"),
    ]
    keys = notes.keys("no_dispatcher")
    assert keys["topic"] == "bank.events.x"
    assert keys["error_code"] == "NO_DISPATCHER"
    assert "Register a route" in keys["error"]
    assert notes.keys("dispatch_started")["dispatcher_count"] == 0


async def test_a_category_that_contradicts_the_topic_is_a_warning() -> None:
    notes = Notes()
    engine = engine_of({"stock": nothing}, logger=notes)

    await engine.dispatch(TOPIC, EventEnvelope(OrderPlaced(), category=COMMAND))

    assert ("warning", "category_mismatch") in notes.names
    keys = notes.keys("category_mismatch")
    assert (keys["topic"], keys["category"]) == (TOPIC, "event")
    assert "carries events" in keys["error"]


@pytest.mark.parametrize(
    ("topic", "envelope"), [("shop..x", ENVELOPE), (None, ENVELOPE), (TOPIC, OrderPlaced())]
)
async def test_a_message_that_is_not_valid_is_an_error(topic: Any, envelope: Any) -> None:
    notes = Notes()

    await engine_of({"stock": nothing}, logger=notes).dispatch(topic, envelope)

    assert ("error", "invalid_message") in notes.names
    assert notes.keys("invalid_message")["error_code"].startswith("INVALID_")
    assert notes.keys("invalid_message")["category"] is None


async def test_a_topic_that_is_none_cannot_forge_a_line_of_the_log() -> None:
    notes = Notes()
    forged = "shop.x\nERROR everything is lost" + "x" * 1000

    await engine_of({"stock": nothing}, logger=notes).dispatch(forged, ENVELOPE)

    topic = notes.keys("invalid_message")["topic"]
    assert "\n" not in topic
    assert len(topic) <= 80


async def test_a_message_that_only_disabled_routes_match_is_no_warning() -> None:
    notes = Notes()
    engine = MessageDispatchEngine(logger=notes)
    engine.register_dispatcher("stock", nothing, EVENT)
    engine.register_route(route("stock", enabled=False))
    engine.freeze()

    await engine.dispatch(TOPIC, ENVELOPE)

    assert notes.names == [("info", "dispatch_started"), ("info", "dispatch_completed")]
    assert notes.keys("dispatch_completed")["status"] == "skipped"


async def test_a_failed_dispatcher_is_an_error_with_a_redacted_traceback() -> None:
    notes = Notes()
    engine = engine_of({"stock": failing, "mail": nothing}, logger=notes, clock=VirtualClock())

    await engine.dispatch(TOPIC, ENVELOPE)

    assert [level for level, event, _ in notes.entries if event == "dispatcher_failed"] == ["error"]
    keys = notes.keys("dispatcher_failed")
    traceback = keys.pop("stack")
    assert keys == MESSAGE | {
        "dispatcher_id": "stock",
        "route_id": "to-stock",
        "duration_ms": 0.0,
        "error_code": "HANDLER_ERROR",
        "error": "ValueError: no way to https://bob:[redacted]@example.org",
    }
    assert "in failing\n" in traceback
    assert "frames of msgbus\n" in traceback or "frame of msgbus\n" in traceback
    assert "hunter2" not in repr(notes.entries)
    assert "1815" not in repr(notes.entries)
    completed = notes.keys("dispatch_completed")
    assert (completed["status"], completed["error_code"]) == ("partial", "HANDLER_ERROR")


async def test_a_failure_is_logged_when_it_happens_not_when_the_others_are_done() -> None:
    notes = Notes()
    seen: list[list[tuple[str, str]]] = []
    failed = anyio.Event()

    async def fail(envelope: EventEnvelope[Any]) -> None:
        failed.set()
        raise OSError

    async def wait(envelope: EventEnvelope[Any]) -> None:
        await failed.wait()
        await anyio.lowlevel.checkpoint()
        seen.append(notes.names)

    await engine_of({"fail": fail, "wait": wait}, logger=notes).dispatch(TOPIC, ENVELOPE)

    assert ("error", "dispatcher_failed") in seen[0]


async def test_a_dispatcher_out_of_time_is_an_error_without_a_traceback() -> None:
    notes = Notes()

    async def hang(envelope: EventEnvelope[Any]) -> None:
        await anyio.sleep_forever()

    await engine_of({"slow": hang}, logger=notes, timeout=0.001).dispatch(TOPIC, ENVELOPE)

    keys = notes.keys("dispatcher_failed")
    assert keys["error_code"] == "TIMEOUT"
    assert "stack" not in keys


async def test_a_failure_that_a_dispatcher_gives_as_its_result_is_an_error() -> None:
    notes = Notes()

    async def give(envelope: EventEnvelope[Any]) -> DispatchResult:
        return DispatchResult(
            status=DispatchStatus.HANDLER_ERROR, topic=TOPIC, error_message="password=hunter2"
        )

    await engine_of({"stock": give}, logger=notes).dispatch(TOPIC, ENVELOPE)

    assert notes.keys("dispatcher_failed")["error"] == "password=[redacted]"


async def test_a_cancelled_dispatch_logs_its_end() -> None:
    notes = Notes()

    async def hang(envelope: EventEnvelope[Any]) -> None:
        await anyio.sleep_forever()

    engine = engine_of({"slow": hang}, logger=notes)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.dispatch, TOPIC, ENVELOPE)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()

    assert notes.names[-1] == ("info", "dispatch_cancelled")
    assert notes.keys("dispatch_cancelled")["dispatcher_ids"] == ["slow"]


async def test_an_output_that_is_not_published_is_a_warning_of_the_same_message() -> None:
    notes = Notes()

    def refuse(topic: str, envelope: EventEnvelope[Any]) -> None:
        raise ConnectionError("amqp://bob:hunter2@broker is gone")

    engine = engine_of({"stock": reserve}, logger=notes, publish_outputs=refuse)
    await engine.dispatch(TOPIC, ENVELOPE)

    keys = notes.keys("output_not_published")
    assert ("warning", "output_not_published") in notes.names
    assert keys["outputs"] == ["shop.events.reserved"]
    assert "amqp://bob:[redacted]@broker" in keys["error"]
    assert keys.items() >= MESSAGE.items()


# -- where it goes -----------------------------------------------------------------------------


async def test_a_standard_logger_gets_text_and_keys(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("dispatch-engine")
    caplog.set_level(logging.INFO, logger="dispatch-engine")

    with capture_logs() as entries:  # structlog is configured, but a logger was given
        await engine_of({"stock": failing}, logger=logger).dispatch(TOPIC, ENVELOPE)

    assert entries == []
    assert {record.name for record in caplog.records} == {"dispatch-engine"}
    started, failed, completed = caplog.records
    assert started.getMessage().startswith(f"dispatch_started topic={TOPIC} category=event ")
    assert getattr(started, "msgbus", {})["event"] == "dispatch_started"
    line, _, traceback = failed.getMessage().partition("\n")
    assert (failed.levelname, line.split()[0]) == ("ERROR", "dispatcher_failed")
    assert "traceback" not in line
    assert traceback.startswith("  | Traceback (most recent call last):\n")
    assert completed.levelname == "INFO"


async def test_an_adapter_of_a_standard_logger_is_one(caplog: pytest.LogCaptureFixture) -> None:
    adapter = logging.LoggerAdapter(logging.getLogger("dispatch-engine"), {"team": "shop"})
    caplog.set_level(logging.WARNING, logger="dispatch-engine")

    await engine_of({"stock": nothing}, logger=adapter).dispatch("bank.x", ENVELOPE)

    [record] = caplog.records
    assert (record.name, getattr(record, "team", None)) == ("dispatch-engine", "shop")


@pytest.mark.usefixtures("collected")
async def test_a_logger_of_structlog_gets_the_keys() -> None:
    with capture_logs() as entries:
        engine = engine_of({"stock": nothing}, logger=structlog.get_logger())
        await engine.dispatch(TOPIC, ENVELOPE)

    assert [entry["event"] for entry in entries][::3] == ["dispatch_started", "dispatch_completed"]
    assert entries[0]["correlation_id"] == "flow-1"


async def test_without_a_logger_events_go_where_all_of_msgbus_go(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="msgbus")

    await engine_of({"stock": nothing}).dispatch(TOPIC, ENVELOPE)

    assert [record.name for record in caplog.records] == ["msgbus", "msgbus"]


@pytest.mark.parametrize("level", ["WARNING", "INFO", "DEBUG"])
async def test_a_level_that_is_off_logs_nothing(
    level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(level, logger="msgbus")

    await engine_of({"stock": nothing}).dispatch(TOPIC, ENVELOPE)

    levels = {record.levelname for record in caplog.records}
    assert levels == {"WARNING": set(), "INFO": {"INFO"}, "DEBUG": {"INFO", "DEBUG"}}[level]


@pytest.mark.parametrize("is_given", [False, True])
async def test_a_level_that_structlog_filters_is_off(is_given: bool) -> None:
    made: list[str] = []

    class Flow(str):
        """Notes that somebody made the keys of an event."""

        __slots__ = ()

        def __str__(self) -> str:
            made.append("keys")
            return "flow"

    def configure(level: int) -> None:
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(level),
            logger_factory=structlog.ReturnLoggerFactory(),
        )

    configure(logging.WARNING)
    engine = engine_of({"stock": nothing}, logger=structlog.get_logger() if is_given else None)
    envelope = EventEnvelope(OrderPlaced(), correlation_id=Flow("flow"))

    await engine.dispatch(TOPIC, envelope)
    assert made == []

    configure(logging.INFO)
    await engine.dispatch(TOPIC, envelope)
    assert made
    made.clear()

    configure(logging.WARNING)
    await engine.dispatch(TOPIC, envelope)
    assert made == []


def test_a_structlog_logger_around_a_standard_one_has_the_level_of_that() -> None:
    structlog.configure(
        wrapper_class=structlog.stdlib.BoundLogger, logger_factory=structlog.stdlib.LoggerFactory()
    )
    log = EventLog(structlog.get_logger("dispatch-engine"))

    logging.getLogger("dispatch-engine").setLevel(logging.ERROR)
    assert not log.is_enabled(logging.INFO)
    logging.getLogger("dispatch-engine").setLevel(logging.INFO)
    assert log.is_enabled(logging.INFO)
    logging.getLogger("dispatch-engine").setLevel(logging.NOTSET)


async def test_a_logger_that_raises_does_not_harm_the_dispatch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Notes):
        def info(self, event: str, **keys: Any) -> None:
            raise RuntimeError

    caplog.set_level(logging.INFO, logger="msgbus")

    result = await engine_of({"stock": nothing}, logger=Broken()).dispatch(TOPIC, ENVELOPE)

    assert result.is_successful()
    first = getattr(caplog.records[0], "msgbus", {})
    assert (first["event"], first["logger_error"]) == ("dispatch_started", "RuntimeError")


@pytest.mark.parametrize("logger", ["dispatch-engine", print, object()])
def test_what_is_no_logger_is_refused_with_what_it_lacks(logger: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"lacks debug, error, info.* of structlog"):
        MessageDispatchEngine(logger=logger)
