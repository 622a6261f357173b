"""Passing outputs on: what a dispatcher gave goes to the next topics, so many hops at most."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, final

from msgbus.errors import WrongMessageTypeError
from msgbus.messages.message import Event
from msgbus.messages.receipts import PublishReceipt
from msgbus.protocols import IMessageBus
from msgbus.routing.dispatch.results import HOP_LIMIT, DispatchResult
from msgbus.routing.envelope import HOPS_HEADER, EventEnvelope
from msgbus.telemetry.redaction import redact_exception

OutputPublisher: TypeAlias = Callable[[str, EventEnvelope[Any]], Any]
"""`(topic, envelope)`, sync or async; raising means that it failed, and so does giving a
`DispatchResult` or a `PublishReceipt` that says so. An engine's `dispatch` is one."""


@final
class Unpublished(NamedTuple):
    """An output that was not published."""

    topic: str
    reason: str
    code: str


async def publish_onward(
    publish: OutputPublisher, outputs: list[str], envelope: EventEnvelope[Any], max_hops: int
) -> list[Unpublished]:
    """Publish the payload under every output topic, in order; return what failed.

    One failure does not keep the others back.
    """
    failures: list[Unpublished] = []
    for topic in outputs:
        if envelope.hops >= max_hops:
            failures.append(_too_far(topic, envelope.hops, max_hops))
            continue
        try:
            answer = publish(topic, envelope.onward(topic))
            if inspect.isawaitable(answer):
                answer = await answer
        except Exception as error:
            failures.append(_failure(topic, redact_exception(error)))
            continue
        refusal = refusal_of(answer)
        if refusal is not None:
            failures.append(_refused(topic, answer, refusal))
    return failures


def refusal_of(answer: object) -> str | None:
    """Why a publisher's answer means that nothing was published; `None` if it was."""
    if isinstance(answer, DispatchResult) and answer.is_error():
        return f"{answer.status.value}: {answer.error_message or 'no reason given'}"
    if isinstance(answer, PublishReceipt) and not answer.accepted:
        return f"{answer.status.value}: {answer.reason or 'no reason given'}"
    return None


def _refused(topic: str, answer: object, refusal: str) -> Unpublished:
    if isinstance(answer, DispatchResult) and answer.error_code == HOP_LIMIT:
        # As it was said where the limit was met, not once more for each hop before.
        return Unpublished(topic, answer.error_message or refusal, HOP_LIMIT)
    return _failure(topic, refusal)


def _too_far(topic: str, hops: int, max_hops: int) -> Unpublished:
    reason = (
        f"{topic} was not published: the message has made {hops} hops, the limit of this engine. "
        f"Dispatchers pass it on in a circle, or max_hops={max_hops} is too low."
    )
    return Unpublished(topic, reason, HOP_LIMIT)


def _failure(topic: str, reason: str) -> Unpublished:
    return Unpublished(topic, f"{topic} was not published: {reason}", "PUBLISH_FAILED")


def publish_on(bus: IMessageBus) -> OutputPublisher:
    """Publish outputs on a bus, under their topics; the hops ride in a header.

    The payloads must be events. Each output is a new event of the same fields.
    """

    async def publish(topic: str, envelope: EventEnvelope[Any]) -> PublishReceipt:
        event = envelope.payload
        if not isinstance(event, Event):
            message = f"Only events can be published on a bus, not {envelope.message_type}."
            raise WrongMessageTypeError(message)
        headers = {**envelope.headers, HOPS_HEADER: str(envelope.hops)}
        return await bus.publish(event.model_copy(), topic=topic, headers=headers)

    return publish
