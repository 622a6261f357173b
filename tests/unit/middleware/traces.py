"""What the tests of tracing share: messages, headers, and a provider of one test alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

from msgbus import Command, Event, MessageBus, Refusal
from msgbus.middleware import TracingMiddleware

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
REMOTE = f"00-{TRACE}-{SPAN}-01"


class Place(Command[str]):
    pass


class Check(Command):
    pass


class Placed(Event, topic="shop.placed"):
    number: int = 0


class OutOfStock(Refusal):
    pass


MALFORMED = {
    "empty": "",
    "nonsense": "nonsense",
    "short": REMOTE[:-1],
    "long": REMOTE + "-00",
    "upper case": REMOTE.upper(),
    "no trace": f"00-{'0' * 32}-{SPAN}-01",
    "no span": f"00-{TRACE}-{'0' * 16}-01",
    "forbidden version": f"ff-{TRACE}-{SPAN}-01",
    "line break": REMOTE + "\n",
}


class Traces:
    """A tracer provider of one test alone, and the spans it was given."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.provider = TracerProvider(sampler=sampler)
        self._exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.middleware = TracingMiddleware(tracer_provider=self.provider)
        self.bus = MessageBus(middleware=[self.middleware])

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> ReadableSpan:
        [span] = [span for span in self.spans if span.name == name]
        return span


def header_of(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def parent_of(span: ReadableSpan) -> str | None:
    parent = span.parent
    if parent is None:
        return None
    return f"00-{parent.trace_id:032x}-{parent.span_id:016x}-{parent.trace_flags:02x}"


def attributes_of(span: ReadableSpan) -> Mapping[str, Any]:
    return dict(span.attributes or {})


async def place(command: Place) -> str:
    return "placed"


async def ignore(event: Placed) -> None: ...
