"""Tracing: W3C trace context in headers, spans by OpenTelemetry.

The headers `traceparent` and `tracestate` are inherited by the messages that a message causes,
as all headers are, with or without OpenTelemetry.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from msgbus.errors import MissingExtraError, Refusal
from msgbus.handlers.observers import CallEnded, observed
from msgbus.messages.frame import Frame, context_of, current_frame
from msgbus.messages.message import Message, message_type_of, metadata_of
from msgbus.middleware.chain import CallNext
from msgbus.middleware.delivery import current_handler, messages_in
from msgbus.runtime.clock import Clock
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.tracebacks import redacted_traceback

if TYPE_CHECKING:
    from opentelemetry.context import Context as OtelContext
    from opentelemetry.trace import Link, Span, SpanContext, Tracer, TracerProvider

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

_FORMAT: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
# Seconds. Asking OpenTelemetry for its provider takes longer than executing a command.
_LOOKUP_INTERVAL: Final = 1.0


@final
@dataclass(frozen=True, slots=True)
class TraceParent:
    """A valid `traceparent` header."""

    trace_id: int
    span_id: int
    flags: int


def parse_traceparent(text: str | None) -> TraceParent | None:
    """Parse a `traceparent` header; `None` if it is missing or malformed.

    Later versions are read as version 00, as the standard asks.
    """
    match = None if text is None else _FORMAT.fullmatch(text)
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["more"]):
        return None
    trace_id, span_id = int(match["trace"], 16), int(match["span"], 16)
    if not trace_id or not span_id:
        return None
    return TraceParent(trace_id, span_id, int(match["flags"], 16))


def current_trace_headers() -> dict[str, str]:
    """The current trace as headers, to publish from outside of handlers.

    `await bus.publish(event, headers=current_trace_headers())` makes the event part of the
    current OpenTelemetry span's trace. In a handler without a span, these are the trace
    headers of the current message, if valid: use them to call other services. Otherwise
    empty.
    """
    # If OpenTelemetry was never imported there is no current span.
    trace = sys.modules.get("opentelemetry.trace")
    if trace is not None:
        current: SpanContext = trace.get_current_span().get_span_context()
        if current.is_valid:
            return _headers_of(current)
    frame = current_frame.get()
    return {} if frame is None else _headers_in(_messages_of(frame))


@final
class TracingMiddleware:
    """Create an OpenTelemetry span for every handler call, in the trace of its message.

    The span `process <Type>` is a child of the one in the message's `traceparent` header,
    else of the current one. Messages that the handler sends carry the span they were sent
    in, so their spans become its children; the handled message keeps its headers. A
    malformed header is ignored, and a new trace begins.

    A failure gives the span the status ERROR and an exception event, with secrets removed.
    A `Refusal` is not an error: `msgbus.refusal` names it. A cancelled span has
    `msgbus.cancelled`.

    A list for a batch handler is one span with a link to each event's trace; if all events
    come from the same span, that is its parent.

    Without a tracer provider the cost is next to nothing. One that is set while the bus runs
    is noticed within a second.

    Args:
        tracer_provider: Provider of the tracer; OpenTelemetry's global one unless given.
        clock: Clock for looking up the global provider again; the system's unless given.

    Raises:
        MissingExtraError: The package `opentelemetry-api` is not installed.
    """

    batch: Final = True

    def __init__(
        self, *, tracer_provider: TracerProvider | None = None, clock: Clock | None = None
    ) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise MissingExtraError("opentelemetry-api", extra="otel") from error
        self._trace = trace
        self._uses_global = tracer_provider is None
        self._tracer = None if tracer_provider is None else self._tracer_of(tracer_provider)
        self._now: Callable[[], float] = time.monotonic if clock is None else clock.now
        self._next_lookup = float("-inf")

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        """Call the handler inside a span."""
        return await observed(self._began, call_next)(message)

    def _began(self, message: Any) -> CallEnded | None:
        tracer = self._tracer or (self._find_tracer() if self._uses_global else None)
        if tracer is None:
            return None
        messages = messages_in(message)
        parent, links = self._origin(messages)
        span = tracer.start_span(
            f"process {message_type_of(message).__name__}",
            context=parent,
            kind=self._trace.SpanKind.CONSUMER,
            attributes=_attributes(message),
            links=links,
        )
        frame = current_frame.get()
        if frame is not None:
            context_of(frame).outgoing = self._outgoing(span.get_span_context(), messages)
        current = self._trace.use_span(span, record_exception=False, set_status_on_exception=False)
        current.__enter__()

        def ended(error: BaseException | None) -> None:
            current.__exit__(None, None, None)
            self._record(span, error)
            span.end()

        return ended

    def _tracer_of(self, provider: TracerProvider) -> Tracer | None:
        """The provider's tracer; `None` if it is a no-op."""
        trace = self._trace
        if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
            return None
        tracer = provider.get_tracer("msgbus")
        return None if isinstance(tracer, trace.NoOpTracer) else tracer

    def _find_tracer(self) -> Tracer | None:
        now = self._now()
        if now >= self._next_lookup:
            self._next_lookup = now + _LOOKUP_INTERVAL
            self._tracer = self._tracer_of(self._trace.get_tracer_provider())
        return self._tracer

    def _origin(self, messages: Sequence[Message]) -> tuple[OtelContext | None, list[Link]]:
        """The parent, if all messages share it; and links, if there are several messages."""
        trace = self._trace
        origins = [self._span_context_in(message.headers) for message in messages]
        first = origins[0]
        shared = first is not None and all(origin == first for origin in origins)
        parent: OtelContext | None = None
        if first is not None and shared:
            parent = trace.set_span_in_context(trace.NonRecordingSpan(first))
        if len(messages) == 1:
            return parent, []
        return parent, [trace.Link(origin) for origin in origins if origin is not None]

    def _span_context_in(self, headers: Mapping[str, str]) -> SpanContext | None:
        found = parse_traceparent(headers.get(TRACEPARENT))
        if found is None:
            return None
        state = headers.get(TRACESTATE)
        return self._trace.SpanContext(
            found.trace_id,
            found.span_id,
            is_remote=True,
            trace_flags=self._trace.TraceFlags(found.flags),
            trace_state=None if not state else self._trace.TraceState.from_header([state]),
        )

    def _outgoing(
        self, own: SpanContext, messages: Sequence[Message]
    ) -> Callable[[], Mapping[str, str]]:
        """The headers of messages sent while this span, or one inside of it, is current."""
        replaces_state = any(TRACESTATE in message.headers for message in messages)
        get_current_span = self._trace.get_current_span

        def headers() -> Mapping[str, str]:
            current = get_current_span().get_span_context()
            # A task that was started elsewhere may have a span of its own.
            chosen = current if current.trace_id == own.trace_id else own
            return _headers_of(chosen, keep_empty_state=replaces_state)

        return headers

    def _record(self, span: Span, error: BaseException | None) -> None:
        if error is None:
            return
        if isinstance(error, Refusal):
            span.set_attribute("msgbus.refusal", _type_name(error))
            return
        if not isinstance(error, Exception):
            span.set_attribute("msgbus.cancelled", True)
            return
        text = redact_exception(error)
        span.set_attribute("error.type", _type_name(error))
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, text))
        span.add_event(
            "exception",
            {
                "exception.type": _type_name(error),
                "exception.message": text,
                "exception.stacktrace": redacted_traceback(error),
            },
        )


def _attributes(handled: Any) -> dict[str, str | int]:
    """Span attributes by OpenTelemetry's conventions for messaging."""
    messages = messages_in(handled)
    first = metadata_of(messages[0])
    wire = type(messages[0]).__wire__
    attributes: dict[str, str | int] = {
        "messaging.system": "msgbus",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": first.topic or wire.topic or wire.name,
        "messaging.consumer.group.name": current_handler(),
    }
    if isinstance(handled, list):
        attributes["messaging.batch.message_count"] = len(messages)
    else:
        attributes["messaging.message.id"] = first.message_id
    if all(message.correlation_id == first.correlation_id for message in messages):
        attributes["messaging.message.conversation_id"] = first.correlation_id
    return attributes


def _headers_of(span: SpanContext, *, keep_empty_state: bool = False) -> dict[str, str]:
    headers = {TRACEPARENT: f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"}
    state = span.trace_state.to_header()
    # An empty one is valid, and replaces one that would be inherited.
    if state or keep_empty_state:
        headers[TRACESTATE] = state
    return headers


def _messages_of(frame: Frame) -> Sequence[Message]:
    return messages_in(frame.message if frame.events is None else frame.events)


def _headers_in(messages: Sequence[Message]) -> dict[str, str]:
    """The trace headers that all messages share, if valid."""
    headers = messages[0].headers
    same = all(message.headers.get(TRACEPARENT) == headers.get(TRACEPARENT) for message in messages)
    if not same or parse_traceparent(headers.get(TRACEPARENT)) is None:
        return {}
    return {name: headers[name] for name in (TRACEPARENT, TRACESTATE) if name in headers}


def _type_name(error: BaseException) -> str:
    cls = type(error)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
