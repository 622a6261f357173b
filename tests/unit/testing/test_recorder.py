"""`record(bus)` sees all that goes through a bus, and changes none of it."""

from __future__ import annotations

import anyio
import anyio.to_thread

from msgbus import (
    Context,
    MessageBus,
    PublishStatus,
    SessionEndEvent,
)
from msgbus.testing import record
from tests.fakes import OrderEvent, OrderPlaced
from tests.unit.testing.shop import (
    CardCharged,
    ChargeCard,
    PlaceOrder,
    ReceiptSent,
    handled,
    handlers,
    ignore,
    kinds,
)


async def test_everything_that_a_command_sets_off_is_recorded() -> None:
    async with record(MessageBus(registries=[handlers])) as recorder:
        result = await recorder.execute(PlaceOrder(number=7))
        await recorder.settled()

    assert result.value == 7
    assert recorder.executed() == [PlaceOrder(number=7), ChargeCard(number=7)]
    assert kinds(recorder.published()) == ["CardCharged", "OrderPlaced", "ReceiptSent"]
    assert handled(recorder) == [
        ("ChargeCard", "charge_card"),
        ("PlaceOrder", "place_order"),
        ("OrderPlaced", "send_receipt"),
    ]
    assert recorder.failed() == []


async def test_answers_can_be_limited_to_a_class_and_its_subclasses() -> None:
    async with record(MessageBus(registries=[handlers])) as recorder:
        await recorder.call(PlaceOrder())
        await recorder.settled()

    assert kinds(recorder.executed(ChargeCard)) == ["ChargeCard"]
    assert kinds(recorder.published(OrderPlaced)) == ["OrderPlaced"]
    assert len(recorder.published(OrderEvent)) == 3
    assert [one.handler for one in recorder.handled(OrderEvent)] == ["send_receipt"]
    assert recorder.failed(OrderEvent) == []


async def test_what_is_sent_through_a_session_is_recorded() -> None:
    async with record(MessageBus(registries=[handlers])) as recorder:
        async with recorder.session("job") as session:
            session.register_event_handler(CardCharged, ignore, name="ledger")
            await session.call(PlaceOrder())
            await session.settled()
        await recorder.settled()

    assert kinds(recorder.executed()) == ["PlaceOrder", "ChargeCard"]
    assert ("CardCharged", "ledger") in handled(recorder)
    assert {event.session_id for event in recorder.published()} == {"job"}


async def test_handlers_of_one_name_in_bus_and_session_are_two() -> None:
    bus = MessageBus()
    bus.register_event_handler(OrderPlaced, ignore, name="audit")

    async with record(bus) as recorder, recorder.session() as session:
        session.register_event_handler(OrderPlaced, ignore, name="audit")
        await session.publish(OrderPlaced())
        await recorder.settled()

    assert handled(recorder) == [("OrderPlaced", "audit")] * 2


async def test_what_comes_from_another_thread_is_recorded() -> None:
    async with record(MessageBus(registries=[handlers])) as recorder:
        portal = recorder.bus.portal()
        await anyio.to_thread.run_sync(portal.call, PlaceOrder())
        await anyio.to_thread.run_sync(portal.publish, ReceiptSent())

    assert kinds(recorder.executed()) == ["PlaceOrder", "ChargeCard"]
    assert kinds(recorder.published(ReceiptSent)) == ["ReceiptSent", "ReceiptSent"]


async def test_published_many_are_recorded_one_by_one() -> None:
    async with record(MessageBus()) as recorder:
        await recorder.publish_many(OrderPlaced(number=number) for number in range(3))

    assert [event.number for event in recorder.published(OrderPlaced)] == [0, 1, 2]


async def test_one_message_sent_twice_is_recorded_twice() -> None:
    bus = MessageBus()
    bus.register_command_handler(ChargeCard, ignore)
    bus.register_event_handler(OrderPlaced, ignore, name="listen")
    command, event = ChargeCard(), OrderPlaced()

    async with record(bus) as recorder:
        await recorder.execute(command)
        await recorder.execute(command)
        await recorder.publish(event)
        await recorder.publish(event)
        await recorder.settled()

    assert recorder.executed() == [command, command]
    assert recorder.published() == [event, event]
    assert len(recorder.handled(OrderPlaced)) == 2


async def test_a_system_event_that_somebody_asked_for_counts_as_published() -> None:
    bus = MessageBus()
    bus.register_event_handler(SessionEndEvent, ignore, name="listen")

    async with record(bus) as recorder:
        async with recorder.session("job"):
            pass
        await recorder.settled()

    (event,) = recorder.published(SessionEndEvent)
    assert event.session_id == "job"
    assert handled(recorder) == [("SessionEndEvent", "listen")]


async def test_an_event_from_before_the_block_is_handled_in_it_but_not_published() -> None:
    bus = MessageBus()
    bus.register_event_handler(OrderPlaced, ignore, name="low")
    bus.register_event_handler(OrderPlaced, ignore, name="high", priority=1)
    await bus.publish(OrderPlaced())

    async with record(bus) as recorder:
        await recorder.settled()

    assert recorder.published() == []
    assert handled(recorder) == [("OrderPlaced", "high"), ("OrderPlaced", "low")]


async def test_a_method_taken_before_the_block_is_seen_when_a_handler_gets_the_message() -> None:
    bus = MessageBus(registries=[handlers])
    publish, execute = bus.publish, bus.execute
    event = OrderPlaced()

    async with record(bus) as recorder:
        await publish(event)
        await execute(ChargeCard())
        await recorder.settled()
        await recorder.publish(event)

    assert kinds(recorder.executed()) == ["ChargeCard"]
    assert recorder.published(OrderPlaced) == [event, event]
    assert ("ChargeCard", "charge_card") in handled(recorder)
    assert ("OrderPlaced", "send_receipt") in handled(recorder)


async def test_a_recording_adds_up_with_the_counters_of_the_bus() -> None:
    bus = MessageBus(filters=[lambda event: getattr(event, "number", 0) % 7 != 0])

    @bus.on(OrderPlaced)
    async def sometimes(event: OrderPlaced, context: Context) -> None:
        if event.number % 5 == 0:
            raise ValueError(event.number)
        await context.publish(ReceiptSent(number=event.number))

    bus.register_event_handler(ReceiptSent, ignore, name="pairs", batch=True)

    async with record(bus) as recorder:
        await recorder.publish_many(OrderPlaced(number=number) for number in range(500))
        await recorder.settled()

    stats = bus.stats()
    assert len(recorder.published()) == sum(one.published for one in stats.events.values())
    assert len(recorder.handled()) == stats.total("handled")
    assert len(recorder.failed()) == stats.total("failed")
    filtered = recorder.published(status=PublishStatus.FILTERED)
    assert len(filtered) == sum(one.filtered for one in stats.events.values())


async def test_a_request_and_an_awaited_publish_are_recorded() -> None:
    seen: list[int] = []

    async with record(MessageBus(registries=[handlers])) as recorder:

        @recorder.bus.on(OrderPlaced)
        async def look(event: OrderPlaced) -> None:
            seen.append(len(recorder.published(OrderPlaced)))

        assert await recorder.request(PlaceOrder(number=7)) == 7
        await recorder.settled()
        receipt = await recorder.publish(OrderPlaced(number=8), wait=True)

    assert len(receipt.outcomes) == 2
    assert [event.number for event in recorder.published(OrderPlaced)] == [7, 8]
    assert seen == [1, 2]
    assert recorder.executed(PlaceOrder) == [PlaceOrder(number=7)]


async def test_what_streams_and_expectations_read_is_recorded_once() -> None:
    async with record(MessageBus()) as recorder, recorder.stream(OrderPlaced) as events:
        expected = recorder.expect(OrderPlaced)
        await recorder.publish(OrderPlaced(number=1))
        read = await anext(events)
        assert await expected == read == OrderPlaced(number=1)

    assert recorder.published() == [OrderPlaced(number=1)]
    assert len(recorder.handled()) == 2
