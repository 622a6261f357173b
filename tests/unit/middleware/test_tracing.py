"""TracingMiddleware: a span for every handling of a message."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import anyio
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from msgbus import MessageBus, MissingExtraError
from msgbus.middleware import TracingMiddleware, current_trace_headers
from msgbus.runtime.clock import VirtualClock
from tests.unit.middleware.traces import (
    MALFORMED,
    REMOTE,
    Check,
    OutOfStock,
    Place,
    Placed,
    Traces,
    attributes_of,
    header_of,
    ignore,
    parent_of,
    place,
)

# -- spans -----------------------------------------------------------------------------------


async def test_a_command_becomes_a_span_with_the_messaging_attributes() -> None:
    traces = Traces()
    traces.bus.register_command_handler(Place, place)
    command = Place()

    result = await traces.bus.execute(command)

    assert result.value == "placed"
    [span] = traces.spans
    assert span.name == "process Place"
    assert span.kind is trace.SpanKind.CONSUMER
    assert span.status.status_code is trace.StatusCode.UNSET
    assert attributes_of(span) == {
        "messaging.system": "msgbus",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "Place",
        "messaging.consumer.group.name": "place",
        "messaging.message.id": command.message_id,
        "messaging.message.conversation_id": command.correlation_id,
    }


@pytest.mark.parametrize(
    ("topic", "destination"), [(None, "shop.placed"), ("shop.other", "shop.other")]
)
async def test_the_destination_is_the_topic_if_there_is_one(
    topic: str | None, destination: str
) -> None:
    traces = Traces()
    traces.bus.register_event_handler(Placed, ignore)

    async with traces.bus as bus:
        await bus.publish(Placed(), topic=topic)
        await bus.settled()

    assert attributes_of(traces.spans[0])["messaging.destination.name"] == destination


async def test_the_parent_is_the_span_in_the_messages_header() -> None:
    traces = Traces()
    traces.bus.register_command_handler(Place, place)

    await traces.bus.execute(Place(), headers={"traceparent": REMOTE, "tracestate": "vendor=1"})

    [span] = traces.spans
    assert parent_of(span) == REMOTE
    context = span.get_span_context()
    assert context is not None
    assert context.trace_state.to_header() == "vendor=1"
    assert span.parent is not None
    assert span.parent.is_remote


async def test_without_a_header_the_parent_is_the_current_span() -> None:
    traces = Traces()
    traces.bus.register_command_handler(Place, place)

    with traces.provider.get_tracer("test").start_as_current_span("request"):
        await traces.bus.execute(Place())

    assert parent_of(traces.named("process Place")) == header_of(traces.named("request"))


async def test_without_header_and_current_span_a_trace_begins() -> None:
    traces = Traces()
    traces.bus.register_command_handler(Place, place)

    await traces.bus.execute(Place())

    assert parent_of(traces.spans[0]) is None


@pytest.mark.parametrize("header", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_header_is_ignored_and_a_trace_begins(header: str) -> None:
    traces = Traces()
    traces.bus.register_command_handler(Place, place)

    result = await traces.bus.execute(Place(), headers={"traceparent": header})

    assert result.success
    assert parent_of(traces.spans[0]) is None


async def test_the_handler_runs_inside_the_span() -> None:
    traces = Traces()
    tracer = traces.provider.get_tracer("test")

    @traces.bus.handles(Place)
    async def place_in_span(command: Place) -> str:
        with tracer.start_as_current_span("reserve stock"):
            return "placed"

    await traces.bus.execute(Place())

    assert parent_of(traces.named("reserve stock")) == header_of(traces.named("process Place"))


async def test_a_sync_handler_runs_inside_the_span_too() -> None:
    traces = Traces()
    tracer = traces.provider.get_tracer("test")

    @traces.bus.handles(Place)
    def place_in_thread(command: Place) -> str:
        with tracer.start_as_current_span("reserve stock"):
            return "placed"

    await traces.bus.execute(Place())

    assert parent_of(traces.named("reserve stock")) == header_of(traces.named("process Place"))


# -- outcomes --------------------------------------------------------------------------------


async def test_a_failure_marks_the_span_with_secrets_removed() -> None:
    traces = Traces()

    @traces.bus.handles(Place)
    async def fail(command: Place) -> str:
        raise ConnectionError("cannot reach https://bob:hunter2@bank")

    result = await traces.bus.execute(Place())

    assert isinstance(result.exception, ConnectionError)
    [span] = traces.spans
    assert span.status.status_code is trace.StatusCode.ERROR
    assert attributes_of(span)["error.type"] == "ConnectionError"
    [event] = span.events
    assert event.name == "exception"
    recorded = dict(event.attributes or {})
    assert recorded["exception.type"] == "ConnectionError"
    assert "cannot reach" in str(recorded["exception.message"])
    assert "in fail" in str(recorded["exception.stacktrace"])
    assert "hunter2" not in span.to_json()


async def test_an_error_of_the_applications_own_is_named_in_full() -> None:
    class StockError(Exception):
        pass

    traces = Traces()

    @traces.bus.handles(Place)
    async def fail(command: Place) -> str:
        raise StockError

    await traces.bus.execute(Place())

    named = attributes_of(traces.spans[0])["error.type"]
    assert named == f"{StockError.__module__}.{StockError.__qualname__}"


async def test_a_refusal_is_no_error() -> None:
    traces = Traces()

    @traces.bus.handles(Place)
    async def refuse(command: Place) -> str:
        raise OutOfStock

    result = await traces.bus.execute(Place())

    assert isinstance(result.exception, OutOfStock)
    [span] = traces.spans
    assert span.status.status_code is trace.StatusCode.UNSET
    assert attributes_of(span)["msgbus.refusal"].endswith("OutOfStock")
    assert "error.type" not in attributes_of(span)


async def test_a_cancelled_call_ends_its_span_and_is_no_error() -> None:
    traces = Traces()
    began = anyio.Event()

    @traces.bus.handles(Place)
    async def hang(command: Place) -> str:
        began.set()
        await anyio.sleep_forever()
        return "never"

    async with anyio.create_task_group() as group:
        group.start_soon(traces.bus.execute, Place())
        await began.wait()
        group.cancel_scope.cancel()

    [span] = traces.spans
    assert attributes_of(span)["msgbus.cancelled"] is True
    assert span.status.status_code is trace.StatusCode.UNSET


# -- without a provider ----------------------------------------------------------------------


async def test_without_a_provider_headers_flow_from_message_to_message() -> None:
    bus = MessageBus(middleware=[TracingMiddleware(tracer_provider=trace.NoOpTracerProvider())])
    seen: list[Mapping[str, str]] = []

    @bus.handles(Check)
    async def check(command: Check) -> None:
        seen.append(command.headers)

    @bus.handles(Place)
    async def place_and_check(command: Place) -> str:
        await bus.execute(Check())
        return "placed"

    headers = {"traceparent": REMOTE, "tracestate": "vendor=1"}
    result = await bus.execute(Place(), headers=headers)

    assert result.value == "placed"
    assert seen == [headers]


async def test_a_provider_that_is_set_later_is_noticed_within_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = VirtualClock()
    traces = Traces()
    looks: list[trace.TracerProvider] = []
    current: list[trace.TracerProvider] = [trace.ProxyTracerProvider()]

    def get_tracer_provider() -> trace.TracerProvider:
        looks.append(current[0])
        return current[0]

    monkeypatch.setattr(trace, "get_tracer_provider", get_tracer_provider)
    bus = MessageBus(middleware=[TracingMiddleware(clock=clock)])
    bus.register_command_handler(Place, place)

    for _ in range(10):
        await bus.execute(Place())
    looks_without_provider = len(looks)
    current[0] = traces.provider
    await clock.advance(1)
    for _ in range(10):
        await bus.execute(Place())

    assert looks_without_provider == 1
    assert len(looks) == 2
    assert len(traces.spans) == 10


async def test_a_provider_whose_tracers_do_nothing_counts_as_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    provider = TracerProvider()
    bus = MessageBus(middleware=[TracingMiddleware(tracer_provider=provider)])
    headers: list[Mapping[str, str]] = []

    @bus.handles(Check)
    async def check(command: Check) -> None:
        headers.append(current_trace_headers())

    await bus.execute(Check(), headers={"traceparent": REMOTE})

    assert headers == [{"traceparent": REMOTE}]


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)

    with pytest.raises(MissingExtraError, match=r"msgbus\[otel\]"):
        TracingMiddleware()


async def test_it_works_without_a_bus() -> None:
    traces = Traces()

    async def call_next(message: Place) -> str:
        return "placed"

    assert await traces.middleware(Place(), call_next) == "placed"
    assert [span.name for span in traces.spans] == ["process Place"]
