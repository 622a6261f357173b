"""Outputs: published to a callable, another engine or a bus, with a limit of hops."""

from __future__ import annotations

from typing import Any

import pytest

from msgbus import Event, MessageBus
from msgbus.routing import (
    DispatchResult,
    DispatchRoute,
    DispatchStatus,
    EventEnvelope,
    MessageCategory,
    MessageDispatchEngine,
    publish_on,
)

EVENT = MessageCategory.EVENT
TOPIC = "shop.events.orders"


class OrderPlaced(Event):
    number: int = 0


ENVELOPE = EventEnvelope(OrderPlaced(number=7), correlation_id="flow")


def engine_of(outputs: list[str], publish: Any, **options: Any) -> MessageDispatchEngine:
    async def dispatcher(envelope: EventEnvelope[Any]) -> list[str]:
        return outputs

    engine = MessageDispatchEngine(publish_outputs=publish, **options)
    engine.register_dispatcher("d", dispatcher, EVENT)
    engine.register_route(DispatchRoute("r", "shop.**", EVENT, "d"))
    engine.freeze()
    return engine


async def test_outputs_are_published_in_order_with_the_payload() -> None:
    sent: list[tuple[str, EventEnvelope[Any]]] = []

    def publish(topic: str, envelope: EventEnvelope[Any]) -> None:
        sent.append((topic, envelope))

    engine = engine_of(["a.x", "b.y"], publish)

    result = await engine.dispatch(TOPIC, ENVELOPE)

    assert result.is_successful()
    assert [topic for topic, _ in sent] == ["a.x", "b.y"]
    first = sent[0][1]
    assert first.payload is ENVELOPE.payload
    assert (first.hops, first.topic, first.correlation_id) == (1, "a.x", "flow")
    assert first.envelope_id != ENVELOPE.envelope_id


async def test_an_output_that_cannot_be_published_is_told_and_keeps_no_other_back() -> None:
    sent: list[str] = []

    async def publish(topic: str, envelope: EventEnvelope[Any]) -> None:
        if topic == "bad.one":
            message = "amqp://bob:hunter2@broker is gone"
            raise ConnectionError(message)
        sent.append(topic)

    result = await engine_of(["bad.one", "good.one"], publish).dispatch(TOPIC, ENVELOPE)

    assert result.status is DispatchStatus.PUBLISH_FAILED
    assert result.requires_retry()
    assert result.error_code == "PUBLISH_FAILED"
    assert list(result.unpublished) == ["bad.one"]
    assert sent == ["good.one"]
    assert "hunter2" not in (result.error_message or "")
    assert [outcome.status for outcome in result.outcomes] == [DispatchStatus.SUCCESS]


async def test_engines_form_a_chain() -> None:
    seen: list[int] = []

    async def last(envelope: EventEnvelope[Any]) -> None:
        seen.append(envelope.hops)

    second = MessageDispatchEngine()
    second.register_dispatcher("last", last, EVENT)
    second.register_route(DispatchRoute("r", "mail.**", EVENT, "last"))
    second.freeze()

    sent = await engine_of(["mail.events.welcome"], second.dispatch).dispatch(TOPIC, ENVELOPE)
    lost = await engine_of(["nobody.here"], second.dispatch).dispatch(TOPIC, ENVELOPE)

    assert sent.is_successful()
    assert seen == [1]
    assert lost.status is DispatchStatus.PUBLISH_FAILED
    assert "no_dispatcher" in (lost.error_message or "")


async def test_a_message_that_goes_round_in_circles_is_stopped() -> None:
    engines: list[MessageDispatchEngine] = []

    async def back(topic: str, envelope: EventEnvelope[Any]) -> DispatchResult:
        return await engines[0].dispatch(topic, envelope)

    engines.append(engine_of([TOPIC], back, max_hops=5))

    result = await engines[0].dispatch(TOPIC, ENVELOPE)

    assert result.status is DispatchStatus.PUBLISH_FAILED
    assert "made 5 hops" in (result.error_message or "")
    assert engines[0].get_structured_metrics().total_dispatches == 6


async def test_outputs_go_to_a_bus_and_their_hops_with_them() -> None:
    async with MessageBus() as bus:
        hops: list[tuple[int, str | None]] = []

        @bus.on(OrderPlaced)
        async def note(event: OrderPlaced) -> None:
            envelope = EventEnvelope.of(event)
            hops.append((envelope.hops, envelope.topic))

        result = await engine_of(["out.x", "out.y"], publish_on(bus)).dispatch(TOPIC, ENVELOPE)
        await bus.settled()

    assert result.is_successful()
    assert hops == [(1, "out.x"), (1, "out.y")]


async def test_a_bus_that_refuses_an_output_fails_it() -> None:
    async with MessageBus(filters=[lambda event: False]) as bus:
        filtered = await engine_of(["out.x"], publish_on(bus)).dispatch(TOPIC, ENVELOPE)
        no_event = await engine_of(["out.x"], publish_on(bus)).dispatch(TOPIC, EventEnvelope(1))

    assert filtered.status is DispatchStatus.PUBLISH_FAILED
    assert "filtered" in (filtered.error_message or "")
    assert "Only events" in (no_event.error_message or "")


async def test_without_a_publisher_outputs_are_only_reported() -> None:
    result = await engine_of(["out.x"], None).dispatch(TOPIC, ENVELOPE)

    assert result.is_successful()
    assert result.outputs == ["out.x"]


def test_an_envelope_of_a_message_has_its_ids() -> None:
    event = OrderPlaced(number=1)

    envelope = EventEnvelope.of(event, "shop.x")

    assert envelope.envelope_id == event.message_id
    assert envelope.correlation_id == event.correlation_id
    assert (envelope.message_type, envelope.topic, envelope.hops) == ("OrderPlaced", "shop.x", 0)


def test_an_envelope_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        ENVELOPE.hops = 3  # type: ignore[misc]
