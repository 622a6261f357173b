"""Trace context in headers: reading it, and giving it to others."""

from __future__ import annotations

import sys

import pytest

from msgbus import MessageBus
from msgbus.middleware import current_trace_headers
from msgbus.middleware.tracing import TraceParent, parse_traceparent
from tests.unit.middleware.traces import (
    MALFORMED,
    REMOTE,
    SPAN,
    TRACE,
    Check,
    Placed,
    Traces,
    header_of,
    ignore,
    parent_of,
)

# -- current_trace_headers -------------------------------------------------------------------


def test_outside_of_everything_there_are_no_trace_headers() -> None:
    assert current_trace_headers() == {}


def test_inside_a_span_the_trace_headers_are_that_spans() -> None:
    traces = Traces()

    with traces.provider.get_tracer("test").start_as_current_span("request"):
        headers = current_trace_headers()

    assert headers == {"traceparent": header_of(traces.named("request"))}


async def test_an_event_published_with_them_joins_the_trace() -> None:
    traces = Traces()
    traces.bus.register_event_handler(Placed, ignore)

    async with traces.bus as bus:
        with traces.provider.get_tracer("test").start_as_current_span("request"):
            await bus.publish(Placed(), headers=current_trace_headers())
        await bus.settled()

    assert parent_of(traces.named("process Placed")) == header_of(traces.named("request"))


async def headers_in_handler(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> dict[str, str]:
    """What a handler sees of such a message, in a program without OpenTelemetry."""
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    bus = MessageBus()
    seen: list[dict[str, str]] = []

    @bus.handles(Check)
    async def check(command: Check) -> None:
        seen.append(current_trace_headers())

    await bus.execute(Check(), headers=headers)
    return seen[0]


async def test_in_a_handler_without_opentelemetry_they_are_the_messages_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced = {"traceparent": REMOTE, "tracestate": "vendor=1"}

    assert await headers_in_handler(monkeypatch, {**traced, "tenant": "acme"}) == traced


async def test_malformed_headers_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"traceparent": "nonsense", "tracestate": "vendor=1"}

    assert await headers_in_handler(monkeypatch, headers) == {}


@pytest.mark.parametrize(
    ("second", "expected"), [(REMOTE, {"traceparent": REMOTE}), ("other", {})], ids=["same", "not"]
)
async def test_in_a_batch_handler_they_are_what_all_events_share(
    second: str, expected: dict[str, str]
) -> None:
    bus = MessageBus()
    seen: list[dict[str, str]] = []

    @bus.on(Placed, batch=True)
    async def record(events: list[Placed]) -> None:
        seen.append(current_trace_headers())

    for header in (REMOTE, second):
        await bus.publish(Placed(), headers={"traceparent": header})
    async with bus:
        await bus.settled()

    assert seen == [expected]


# -- the header ------------------------------------------------------------------------------


def test_a_header_is_read_into_its_parts() -> None:
    assert parse_traceparent(REMOTE) == TraceParent(int(TRACE, 16), int(SPAN, 16), 1)


def test_a_header_of_a_version_to_come_is_read_as_far_as_it_is_known() -> None:
    assert parse_traceparent(f"01-{TRACE}-{SPAN}-01-more") == parse_traceparent(REMOTE)


@pytest.mark.parametrize("text", [None, *MALFORMED.values()], ids=["missing", *MALFORMED])
def test_a_malformed_header_says_nothing(text: str | None) -> None:
    assert parse_traceparent(text) is None
