"""Streams: events as an async iterator."""

from __future__ import annotations

import anyio
import pytest

from msgbus import ConfigurationError, EventHandlerFailedEvent, MessageBus, QueueConfig
from msgbus.errors import BusStateError
from tests.fakes import (
    OrderEvent,
    OrderPlaced,
    OrderShipped,
    SlowHandler,
    conserves,
    let_others_run,
    logged,
)


async def publish(bus: MessageBus, *numbers: int) -> None:
    for number in numbers:
        await bus.publish(OrderPlaced(number=number))


async def test_a_stream_gives_events_from_the_moment_it_is_entered() -> None:
    async with MessageBus() as bus:
        await publish(bus, 0)
        seen: list[int] = []
        async with bus.stream(OrderPlaced) as events:
            await publish(bus, 1, 2, 3)
            async for event in events:
                seen.append(event.number)
                if event.number == 3:
                    break
        await publish(bus, 4)

    assert seen == [1, 2, 3]
    conserves(bus)


async def test_a_stream_waits_for_what_has_not_happened_yet() -> None:
    seen: list[int] = []

    async with MessageBus() as bus, anyio.create_task_group() as tasks:

        async def read() -> None:
            async with bus.stream(OrderPlaced) as events:
                seen.append((await anext(events)).number)

        tasks.start_soon(read)
        await let_others_run()
        assert seen == []
        await publish(bus, 7)

    assert seen == [7]


async def test_a_stream_of_a_base_class_gives_subclasses() -> None:
    async with MessageBus() as bus, bus.stream(OrderEvent) as events:
        await bus.publish(OrderPlaced(number=1))
        await bus.publish(OrderShipped(number=2))

        assert [await anext(events), await anext(events)] == [
            OrderPlaced(number=1),
            OrderShipped(number=2),
        ]


async def test_a_stream_may_name_a_system_event() -> None:
    bus = MessageBus()

    @bus.on(OrderPlaced)
    async def fail(event: OrderPlaced) -> None:
        raise ValueError

    async with bus, bus.stream(EventHandlerFailedEvent) as failures:
        await publish(bus, 1)
        failure = await anext(failures)

    assert failure.handler == "fail"


async def test_two_streams_of_one_type_each_get_every_event() -> None:
    async with (
        MessageBus() as bus,
        bus.stream(OrderPlaced) as first,
        bus.stream(OrderPlaced) as second,
    ):
        await publish(bus, 1)

        assert (await anext(first)).number == (await anext(second)).number == 1


# -- too slow --------------------------------------------------------------------------------


async def test_a_reader_that_is_too_slow_misses_the_oldest_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with MessageBus() as bus, bus.stream(OrderPlaced, buffer=3) as events:
        await publish(bus, *range(10))
        await bus.settled()

        assert events.missed == 7
        assert events.lag == 3
        assert [(await anext(events)).number for _ in range(3)] == [7, 8, 9]
        assert events.lag == 0
    (entry,) = logged(caplog, "stream_lagged")
    assert entry["message_type"] == "OrderPlaced"
    conserves(bus)


async def test_each_gap_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with MessageBus() as bus, bus.stream(OrderPlaced, buffer=2) as events:
        for _ in range(2):
            await publish(bus, *range(5))
            await bus.settled()
            await anext(events)
            await anext(events)

        assert events.missed == 6
    assert len(logged(caplog, "stream_lagged")) == 2


async def test_a_slow_reader_holds_up_nobody() -> None:
    bus = MessageBus()
    async with bus, bus.stream(OrderPlaced, buffer=1):
        summary = await bus.publish_many(OrderPlaced(number=number) for number in range(20_000))
        await bus.settled()

    assert summary.accepted == 20_000
    conserves(bus)


# -- the end ---------------------------------------------------------------------------------


async def test_leaving_a_stream_leaves_no_registration_behind() -> None:
    async with MessageBus() as bus:
        before = bus.stats().registered_handlers
        for _ in range(3):
            async with bus.stream(OrderPlaced):
                assert bus.stats().registered_handlers == before + 1
                await publish(bus, 1)

        assert bus.stats().registered_handlers == before
        assert (await bus.publish(OrderPlaced())).handlers == 0
        await bus.settled()
        assert bus.stats().total("queued") == 0
        conserves(bus)


async def test_a_stream_that_is_left_by_cancellation_leaves_nothing_behind() -> None:
    async with MessageBus() as bus:
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                async with bus.stream(OrderPlaced) as events:
                    async for _ in events:
                        pass

            tasks.start_soon(read)
            await let_others_run()
            await publish(bus, 1, 2)
            tasks.cancel_scope.cancel()

        assert bus.stats().registered_handlers == 0
        await bus.settled()
        assert bus.stats().total("pending") == 0
        conserves(bus)


async def test_a_loop_over_a_stream_ends_when_the_bus_stops() -> None:
    bus = MessageBus()
    seen: list[int] = []
    await bus.start()

    async def read() -> None:
        async with bus.stream(OrderPlaced) as events:
            seen.extend([event.number async for event in events])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await let_others_run()
        await publish(bus, 1, 2)
        await bus.stop()

    assert seen == [1, 2]
    conserves(bus)


async def test_a_stream_that_has_ended_gives_what_is_buffered_and_then_ends() -> None:
    async with MessageBus() as bus, bus.stream(OrderPlaced) as events:
        await publish(bus, 1, 2)
        await bus.settled()
        events.end()

        assert [event.number async for event in events] == [1, 2]


async def test_leaving_a_stream_spares_publishers_who_wait_for_another_handler() -> None:
    bus = MessageBus()
    slow = SlowHandler()
    bus.subscribe(OrderPlaced, slow, queue=QueueConfig(max_size=1))
    published: list[int] = []

    async def publish_one(number: int) -> None:
        await publish(bus, number)
        published.append(number)

    async with bus, anyio.create_task_group() as tasks:
        async with bus.stream(OrderPlaced):
            await publish_one(0)
            await slow.started.wait()
            await publish_one(1)
            tasks.start_soon(publish_one, 2)
            await let_others_run()
        slow.release.set()
        await let_others_run()
        await bus.settled()

    assert published == [0, 1, 2]
    assert slow.ended == [0, 1, 2]
    conserves(bus)


# -- wrong use -------------------------------------------------------------------------------


async def test_a_stream_must_be_entered_before_it_is_read() -> None:
    async with MessageBus() as bus:
        events = bus.stream(OrderPlaced)
        with pytest.raises(BusStateError, match="async with"):
            aiter(events)


@pytest.mark.parametrize("buffer", [0, -1])
def test_a_stream_needs_a_buffer(buffer: int) -> None:
    with pytest.raises(ValueError, match="buffer"):
        MessageBus().stream(OrderPlaced, buffer=buffer)


@pytest.mark.parametrize("wrong", [str, MessageBus])
async def test_a_stream_of_what_is_no_event_is_refused(wrong: type[OrderEvent]) -> None:
    with pytest.raises(ConfigurationError):
        async with MessageBus().stream(wrong):
            pass
