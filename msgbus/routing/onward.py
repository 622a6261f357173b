"""Passing outputs on: what a dispatcher gave goes to the next topics, so many hops at most."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from msgbus.errors import WrongMessageTypeError
from msgbus.messages import Event
from msgbus.protocols import IMessageBus
from msgbus.receipts import PublishReceipt
from msgbus.routing.dispatch import DispatchResult
from msgbus.routing.envelope import HOPS_HEADER, EventEnvelope
from msgbus.telemetry.redaction import redact_exception

OutputPublisher: TypeAlias = Callable[[str, EventEnvelope[Any]], Any]
"""`(topic, envelope)`, sync or async; raising means that it failed, and so does giving a
`DispatchResult` or a `PublishReceipt` that says so. An engine's `dispatch` is one."""


async def publish_onward(
    publish: OutputPublisher, outputs: list[str], envelope: EventEnvelope[Any], max_hops: int
) -> list[tuple[str, str, str]]:
    """Publish the payload under every output topic, in order; what failed, why, and its code.

    One failure does not keep the others back.
    """
    failures: list[tuple[str, str, str]] = []
    for topic in outputs:
        if envelope.hops >= max_hops:
            reason = f"the message has made {envelope.hops} hops, and no more are allowed"
            failures.append((topic, reason, "HOP_LIMIT"))
            continue
        try:
            answer = publish(topic, envelope.onward(topic))
            if inspect.isawaitable(answer):
                answer = await answer
        except Exception as error:
            failures.append((topic, redact_exception(error), "PUBLISH_FAILED"))
            continue
        refusal = refusal_of(answer)
        if refusal is not None:
            failures.append((topic, refusal, "PUBLISH_FAILED"))
    return failures


def refusal_of(answer: object) -> str | None:
    """Why a publisher's answer means that nothing was published; `None` if it was."""
    if isinstance(answer, DispatchResult) and answer.is_error():
        return f"{answer.status.value}: {answer.error_message or 'no reason given'}"
    if isinstance(answer, PublishReceipt) and not answer.accepted:
        return f"{answer.status.value}: {answer.reason or 'no reason given'}"
    return None


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
