"""Publish the outputs of dispatchers under their topics, with a limit of hops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, final

from msgbus.errors import WrongMessageTypeError
from msgbus.messages.message import Event
from msgbus.messages.receipts import PublishReceipt
from msgbus.routing.dispatch.results import HOP_LIMIT, DispatchResult
from msgbus.routing.envelope import HOPS_HEADER, EventEnvelope
from msgbus.telemetry.redaction import redact_exception

OutputPublisher: TypeAlias = Callable[[str, EventEnvelope[Any]], Any]
"""Called with `(topic, envelope)`, sync or async. It failed if it raises, or returns a failed
`DispatchResult` or a `PublishReceipt` that is not accepted. An engine's `dispatch` is one."""


class PublishesEvents(Protocol):
    """The part of a bus that `publish_on` needs."""

    async def publish(
        self, event: Event, *, headers: Mapping[str, str] | None = None, topic: str | None = None
    ) -> PublishReceipt:
        """Publish an event."""
        ...


@final
class Unpublished(NamedTuple):
    """An output that was not published."""

    topic: str
    reason: str
    code: str


async def publish_outputs(
    publish: OutputPublisher, outputs: list[str], envelope: EventEnvelope[Any], max_hops: int
) -> list[Unpublished]:
    """Publish the payload under each output topic, in order; return the failures."""
    failures: list[Unpublished] = []
    for topic in outputs:
        if envelope.hops >= max_hops:
            failures.append(_over_hop_limit(topic, envelope.hops, max_hops))
            continue
        try:
            returned = publish(topic, envelope.onward(topic))
            if inspect.isawaitable(returned):
                returned = await returned
        except Exception as error:
            failures.append(_failure(topic, redact_exception(error)))
            continue
        reason = rejection_reason(returned)
        if reason is not None:
            failures.append(_rejected(topic, returned, reason))
    return failures


def rejection_reason(returned: object) -> str | None:
    """Return why a publisher's return value is a failure; `None` if it is not."""
    if isinstance(returned, DispatchResult) and returned.is_error():
        return f"{returned.status.value}: {returned.error_message or 'no reason given'}"
    if isinstance(returned, PublishReceipt) and not returned.accepted:
        return f"{returned.status.value}: {returned.reason or 'no reason given'}"
    return None


def _rejected(topic: str, returned: object, reason: str) -> Unpublished:
    if isinstance(returned, DispatchResult) and returned.error_code == HOP_LIMIT:
        # The text from where the limit was reached, not repeated for each hop before.
        return Unpublished(topic, returned.error_message or reason, HOP_LIMIT)
    return _failure(topic, reason)


def _over_hop_limit(topic: str, hops: int, max_hops: int) -> Unpublished:
    reason = (
        f"{topic} was not published: the message has made {hops} hops, the limit of this engine. "
        f"Dispatchers forward it in a loop, or max_hops={max_hops} is too low."
    )
    return Unpublished(topic, reason, HOP_LIMIT)


def _failure(topic: str, reason: str) -> Unpublished:
    return Unpublished(topic, f"{topic} was not published: {reason}", "PUBLISH_FAILED")


def publish_on(bus: PublishesEvents) -> OutputPublisher:
    """Return an output publisher that publishes on a bus; a header carries the number of hops.

    The payloads must be events. Each output is a new event with the same fields.
    """

    async def publish(topic: str, envelope: EventEnvelope[Any]) -> PublishReceipt:
        event = envelope.payload
        if not isinstance(event, Event):
            message = f"Only events can be published on a bus, not {envelope.message_type}."
            raise WrongMessageTypeError(message)
        headers = {**envelope.headers, HOPS_HEADER: str(envelope.hops)}
        return await bus.publish(event.model_copy(), topic=topic, headers=headers)

    return publish
