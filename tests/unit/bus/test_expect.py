"""`bus.expect(...)` gives the next event that fits (issue 19, point c)."""

from __future__ import annotations

import gc

import anyio
import anyio.to_thread
import pytest

from msgbus import (
    BusClosedError,
    Command,
    ConfigurationError,
    Context,
    ExpectTimeoutError,
    MessageBus,
    TypeFilter,
)
from msgbus.testing import VirtualClock
from tests.fakes import OrderEvent, OrderPlaced, OrderShipped, conserves, let_others_run


async def test_nothing_published_after_the_call_is_missed() -> None:
    async with MessageBus() as bus:
        await bus.publish(OrderPlaced(number=1))
        expected = bus.expect(OrderPlaced)
        await bus.publish(OrderPlaced(number=2))
        await bus.publish(OrderPlaced(number=3))
        await bus.settled()

        assert (await expected).number == 2
        assert (await expected).number == 2
    conserves(bus)


async def test_the_next_event_that_fits_is_given_and_the_handler_is_gone() -> None:
    async with MessageBus() as bus, anyio.create_task_group() as tasks:

        async def publish() -> None:
            for number in range(5, 10):
                await bus.publish(OrderPlaced(number=number))

        tasks.start_soon(publish)
        event = await bus.expect(OrderPlaced, where=lambda event: event.number == 7, timeout=5)
        await bus.settled()
        receipt = await bus.publish(OrderPlaced())

        assert event.number == 7
        assert receipt.handlers == 0
    conserves(bus)


async def test_subclasses_topics_filters_and_async_conditions_work() -> None:
    async def even(event: OrderEvent) -> bool:
        return event.number % 2 == 0

    async with MessageBus() as bus:
        of_base = bus.expect(OrderEvent, where=even)
        by_filter = bus.expect(OrderEvent, where=TypeFilter(OrderShipped))
        of_topic = bus.expect("shop.**")
        await bus.publish(OrderPlaced(number=1), topic="shop.orders.placed")
        await bus.publish(OrderShipped(number=2))

        assert (await of_base).number == 2
        assert isinstance(await by_filter, OrderShipped)
        assert isinstance(await of_topic, OrderPlaced)


async def test_a_timeout_counts_from_the_call_and_says_what_came_instead() -> None:
    clock = VirtualClock()
    async with MessageBus(clock=clock) as bus:
        expected = bus.expect(OrderPlaced, where=lambda event: event.number == 7, timeout=5)
        await bus.publish(OrderPlaced(number=1))
        await bus.settled()
        await clock.advance(5)
        with pytest.raises(ExpectTimeoutError) as raised:
            await expected
        receipt = await bus.publish(OrderPlaced(number=7))

    assert str(raised.value) == (
        "No matching OrderPlaced was published within 5 s. 1 did not match where=."
    )
    assert (raised.value.seconds, raised.value.seen) == (5, 1)
    assert isinstance(raised.value, TimeoutError)
    assert receipt.handlers == 0


async def test_an_event_that_came_in_time_is_given_however_late_it_is_asked_for() -> None:
    clock = VirtualClock()
    async with MessageBus(clock=clock) as bus:
        expected = bus.expect(OrderPlaced, timeout=5)
        await bus.publish(OrderPlaced(number=3))
        await bus.settled()
        await clock.advance(60)

        assert (await expected).number == 3


async def test_what_the_condition_raises_is_raised_to_the_one_who_waits() -> None:
    def broken(event: OrderPlaced) -> bool:
        raise LookupError(event.number)

    async with MessageBus() as bus:
        expected = bus.expect(OrderPlaced, where=broken)
        await bus.publish(OrderPlaced(number=3))
        with pytest.raises(LookupError, match="3"):
            await expected

        assert [one.failed for one in bus.stats().handlers.values()] == [0]


async def test_a_cancelled_wait_leaves_no_handler_behind() -> None:
    async with MessageBus() as bus:
        with anyio.move_on_after(0):
            await bus.expect(OrderPlaced)

        assert (await bus.publish(OrderPlaced())).handlers == 0


@pytest.mark.parametrize("what", ["bus", "session"])
async def test_the_end_of_the_bus_or_session_ends_the_wait(what: str) -> None:
    bus = MessageBus()
    await bus.start()
    session = bus.session("job")
    await session.__aenter__()
    expected = (bus if what == "bus" else session).expect(OrderPlaced, timeout=60)

    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            with pytest.raises(BusClosedError, match=f"The {what}.* ended before OrderPlaced"):
                await expected

        tasks.start_soon(wait)
        await let_others_run()
        await session.close()
        await bus.stop()


async def test_a_session_looks_at_its_own_events() -> None:
    async with MessageBus() as bus, bus.session("job") as session:
        expected = session.expect(OrderPlaced)
        await bus.publish(OrderPlaced(number=1))
        await session.publish(OrderPlaced(number=2))

        assert (await expected).number == 2


async def test_handlers_and_threads_can_expect_too() -> None:
    class Pay(Command[int]):
        pass

    seen: list[int] = []
    async with MessageBus() as bus, anyio.create_task_group() as tasks:

        @bus.handles(Pay)
        async def pay(command: Pay, context: Context) -> int:
            expected = context.expect(OrderPlaced, timeout=5)
            await context.publish(OrderPlaced(number=8))
            return (await expected).number

        assert await bus.call(Pay()) == 8
        portal = bus.portal()

        def wait() -> None:
            seen.append(portal.expect(OrderShipped, timeout=5).number)

        tasks.start_soon(anyio.to_thread.run_sync, wait)
        while (await bus.publish(OrderShipped(number=9))).handlers == 0:
            await let_others_run()

    assert seen == [9]


def _forget(bus: MessageBus) -> None:
    bus.expect(OrderPlaced)
    gc.collect()


async def test_one_that_is_never_awaited_warns_and_leaves_no_handler() -> None:
    async with MessageBus() as bus:
        with pytest.warns(RuntimeWarning, match=r"expect\(OrderPlaced\) was never awaited"):
            _forget(bus)

        assert (await bus.publish(OrderPlaced())).handlers == 0


async def test_a_wrong_target_is_refused_at_the_call() -> None:
    class Pay(Command[None]):
        pass

    async with MessageBus() as bus:
        with pytest.raises(ConfigurationError, match="Pay is not an Event class"):
            bus.expect(Pay)  # type: ignore[type-var]
