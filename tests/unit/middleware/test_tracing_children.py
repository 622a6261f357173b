"""TracingMiddleware: what handlers send carries their span."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, Sampler, SamplingResult

from msgbus import CallNext, Context, MessageBus
from msgbus.middleware.tracing import TraceParent, parse_traceparent
from tests.unit.middleware.traces import (
    REMOTE,
    SPAN,
    TRACE,
    Check,
    Place,
    Placed,
    Traces,
    attributes_of,
    header_of,
    ignore,
    parent_of,
)

# -- what the handler sends ------------------------------------------------------------------


async def test_a_message_keeps_its_own_headers_and_its_children_carry_the_span() -> None:
    traces = Traces()
    seen: dict[str, Mapping[str, str]] = {}

    @traces.bus.handles(Place)
    async def place_and_publish(command: Place, context: Context) -> str:
        await context.publish(Placed())
        seen["context"] = dict(context.headers)
        return "placed"

    @traces.bus.on(Placed)
    async def record(event: Placed) -> None:
        seen["event"] = dict(event.headers)

    command = Place()
    async with traces.bus as bus:
        await bus.execute(command, headers={"traceparent": REMOTE, "tenant": "acme"})
        await bus.settled()

    process = traces.named("process Place")
    assert command.headers == seen["context"] == {"traceparent": REMOTE, "tenant": "acme"}
    assert seen["event"] == {"traceparent": header_of(process), "tenant": "acme"}
    assert parent_of(traces.named("process Placed")) == header_of(process)


async def test_a_nested_command_is_a_child_of_the_handlers_span() -> None:
    traces = Traces()

    @traces.bus.handles(Check)
    async def check(command: Check) -> None: ...

    @traces.bus.handles(Place)
    async def place_and_check(command: Place) -> str:
        await traces.bus.execute(Check())
        return "placed"

    await traces.bus.execute(Place())

    assert parent_of(traces.named("process Check")) == header_of(traces.named("process Place"))


async def test_what_is_sent_inside_an_inner_span_carries_that_span() -> None:
    traces = Traces()
    tracer = traces.provider.get_tracer("test")
    traces.bus.register_event_handler(Placed, ignore)

    @traces.bus.handles(Place)
    async def place_in_span(command: Place) -> str:
        with tracer.start_as_current_span("reserve stock"):
            await traces.bus.publish(Placed())
        return "placed"

    async with traces.bus as bus:
        await bus.execute(Place())
        await bus.settled()

    assert parent_of(traces.named("process Placed")) == header_of(traces.named("reserve stock"))


async def test_emitted_events_carry_the_handlers_span_not_the_callers() -> None:
    traces = Traces()
    traces.bus.register_event_handler(Placed, ignore)

    @traces.bus.handles(Place)
    async def place_and_emit(command: Place, context: Context) -> str:
        context.emit(Placed())
        return "placed"

    async with traces.bus as bus:
        with traces.provider.get_tracer("test").start_as_current_span("request"):
            await bus.execute(Place())
        await bus.settled()

    assert parent_of(traces.named("process Placed")) == header_of(traces.named("process Place"))


async def test_each_attempt_has_its_span_and_emitted_events_carry_the_one_that_succeeded() -> None:
    async def try_twice(message: Any, call_next: CallNext) -> Any:
        try:
            return await call_next(message)
        except ConnectionError:
            return await call_next(message)

    traces = Traces()
    bus = MessageBus()
    bus.add_middleware(try_twice, types=Place)
    bus.add_middleware(traces.middleware)
    bus.register_event_handler(Placed, ignore)
    calls: list[int] = []

    @bus.handles(Place)
    async def fail_once(command: Place, context: Context) -> str:
        calls.append(1)
        context.emit(Placed())
        if len(calls) == 1:
            raise ConnectionError
        return "placed"

    async with bus:
        await bus.execute(Place())
        await bus.settled()

    _, second = [span for span in traces.spans if span.name == "process Place"]
    assert parent_of(traces.named("process Placed")) == header_of(second)


async def test_headers_given_by_hand_win() -> None:
    traces = Traces()
    traces.bus.register_event_handler(Placed, ignore)

    @traces.bus.handles(Place)
    async def publish_elsewhere(command: Place, context: Context) -> str:
        await context.publish(Placed(), headers={"traceparent": REMOTE})
        return "placed"

    async with traces.bus as bus:
        await bus.execute(Place())
        await bus.settled()

    assert parent_of(traces.named("process Placed")) == REMOTE


async def test_a_message_that_is_sent_on_keeps_its_headers() -> None:
    traces = Traces()
    event = Placed()
    traces.bus.register_event_handler(Placed, ignore)

    @traces.bus.handles(Place)
    async def publish_again(command: Place, context: Context) -> str:
        await context.publish(event)
        return "placed"

    async with traces.bus as bus:
        await bus.publish(event, headers={"traceparent": REMOTE})
        await bus.execute(Place())
        await bus.settled()

    assert event.headers == {"traceparent": REMOTE}


async def test_what_is_sent_from_a_task_of_another_trace_carries_the_handlers_span() -> None:
    traces = Traces()
    contexts: list[Context] = []
    ready, sent = anyio.Event(), anyio.Event()
    traces.bus.register_event_handler(Placed, ignore)

    async def send_from_elsewhere() -> None:
        with traces.provider.get_tracer("test").start_as_current_span("elsewhere"):
            await ready.wait()
            await contexts[0].publish(Placed())
            sent.set()

    @traces.bus.handles(Place)
    async def lend_context(command: Place, context: Context) -> str:
        contexts.append(context)
        ready.set()
        await sent.wait()
        return "placed"

    async with traces.bus as bus, anyio.create_task_group() as group:
        group.start_soon(send_from_elsewhere)
        await bus.execute(Place())
        await bus.settled()

    assert parent_of(traces.named("process Placed")) == header_of(traces.named("process Place"))


class Forgetful(Sampler):
    """Samples everything and drops the trace state."""

    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        return SamplingResult(Decision.RECORD_AND_SAMPLE)

    def get_description(self) -> str:
        return "forgetful"


@pytest.mark.parametrize(
    ("sampler", "state"), [(None, "vendor=1"), (Forgetful(), "")], ids=["kept", "dropped"]
)
async def test_children_carry_the_trace_state_of_the_span(
    sampler: Sampler | None, state: str
) -> None:
    traces = Traces(sampler)
    seen: list[str | None] = []

    @traces.bus.handles(Check)
    async def check(command: Check) -> None:
        seen.append(command.headers.get("tracestate"))

    @traces.bus.handles(Place)
    async def place_and_check(command: Place) -> str:
        await traces.bus.execute(Check())
        return "placed"

    await traces.bus.execute(Place(), headers={"traceparent": REMOTE, "tracestate": "vendor=1"})

    assert seen == [state]


async def test_a_trace_that_is_not_sampled_is_carried_on_as_such() -> None:
    traces = Traces(ALWAYS_OFF)
    seen: list[TraceParent | None] = []

    @traces.bus.handles(Check)
    async def check(command: Check) -> None:
        seen.append(parse_traceparent(command.headers.get("traceparent")))

    @traces.bus.handles(Place)
    async def place_and_check(command: Place) -> str:
        await traces.bus.execute(Check())
        return "placed"

    await traces.bus.execute(Place(), headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})

    assert traces.spans == []
    assert seen[0] is not None
    assert f"{seen[0].trace_id:032x}" == TRACE
    assert seen[0].flags == 0


# -- lists -----------------------------------------------------------------------------------


async def handle_list(*headers: dict[str, str]) -> tuple[ReadableSpan, Mapping[str, str]]:
    """The span of a list of such events, and the headers of an event its handler sent."""
    traces = Traces()
    sent = Check()

    @traces.bus.on(Placed, batch=True)
    async def record(events: list[Placed]) -> None:
        await traces.bus.execute(sent)

    @traces.bus.handles(Check)
    async def check(command: Check) -> None: ...

    for one in headers:
        await traces.bus.publish(Placed(), headers=one)
    async with traces.bus as bus:
        await bus.settled()
    return traces.named("process Placed"), sent.headers


async def test_a_list_of_several_traces_is_a_span_with_links() -> None:
    other = REMOTE.replace("0af7", "1af7")

    span, sent = await handle_list(
        {"traceparent": REMOTE}, {"traceparent": other}, {"traceparent": "nonsense"}, {}
    )

    assert parent_of(span) is None
    links = [link.context.trace_id for link in span.links]
    assert [f"{trace_id:032x}" for trace_id in links] == [TRACE, TRACE.replace("0af7", "1af7")]
    assert attributes_of(span)["messaging.batch.message_count"] == 4
    assert "messaging.message.id" not in attributes_of(span)
    assert "messaging.message.conversation_id" not in attributes_of(span)
    assert sent["traceparent"] == header_of(span)


async def test_a_list_of_one_trace_is_a_part_of_it() -> None:
    span, sent = await handle_list({"traceparent": REMOTE}, {"traceparent": REMOTE})

    assert parent_of(span) == REMOTE
    assert len(span.links) == 2
    assert sent["traceparent"] == header_of(span)


async def test_a_list_of_one_event_is_like_that_event() -> None:
    span, _ = await handle_list({"traceparent": REMOTE})

    assert parent_of(span) == REMOTE
    assert list(span.links) == []
    assert attributes_of(span)["messaging.batch.message_count"] == 1
