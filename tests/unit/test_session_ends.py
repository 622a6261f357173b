"""Sessions that end with work left: at once where waiting is in vain, and never silently."""

from __future__ import annotations

import anyio
import pytest

from msgbus import BusConfig, BusNotStartedError, MessageBus
from msgbus.clock import VirtualClock
from tests.fakes import OrderPlaced, Recorder, conserves, let_others_run, logged


async def test_a_session_on_a_bus_that_is_not_started_does_not_wait_for_its_handlers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MessageBus()
    handler = Recorder()

    with anyio.fail_after(5):
        async with bus.session("job") as session:
            session.subscribe(OrderPlaced, handler, name="handler")
            await session.publish(OrderPlaced())

    assert handler.numbers == []
    assert bus.stats().handlers["handler"].abandoned == 1
    conserves(bus)
    (entry,) = logged(caplog, "session_ended_with_leftovers")
    assert (entry["session_id"], entry["abandoned"]) == ("job", 1)


async def test_a_handler_on_a_bus_that_is_not_started_is_closed_at_once() -> None:
    bus = MessageBus()
    subscription = bus.subscribe(OrderPlaced, Recorder())
    await bus.publish(OrderPlaced())

    with anyio.fail_after(5):
        assert await subscription.close() == 1
    conserves(bus)


async def test_a_session_cannot_settle_on_a_bus_that_is_not_started() -> None:
    bus = MessageBus()
    async with bus.session() as session:
        await session.settled()
        session.subscribe(OrderPlaced, Recorder())
        await session.publish(OrderPlaced())

        with anyio.fail_after(5), pytest.raises(BusNotStartedError, match="not started"):
            await session.settled()


async def test_a_session_that_ends_with_work_left_is_logged_and_an_empty_one_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MessageBus(BusConfig(session_timeout=0))

    async def hang(event: OrderPlaced) -> None:
        await anyio.sleep_forever()

    async with bus:
        async with bus.session("done") as session:
            session.subscribe(OrderPlaced, Recorder())
            await session.publish(OrderPlaced())
            await session.settled()
        async with bus.session("stuck") as session:
            session.subscribe(OrderPlaced, hang)
            for _ in range(3):
                await session.publish(OrderPlaced())
            await let_others_run()

    (entry,) = logged(caplog, "session_ended_with_leftovers")
    assert (entry["session_id"], entry["abandoned"]) == ("stuck", 3)
    conserves(bus)


async def test_a_session_whose_close_is_cancelled_still_gives_its_handlers_back() -> None:
    clock = VirtualClock()
    bus = MessageBus(BusConfig(session_timeout=5), clock=clock)

    async def hang(event: OrderPlaced) -> None:
        await anyio.sleep_forever()

    async with bus:
        async with bus.session("job") as session:
            session.subscribe(OrderPlaced, hang)
            await session.publish(OrderPlaced())
            await let_others_run()
            async with anyio.create_task_group() as group:
                group.start_soon(session.close)
                await let_others_run()
                group.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await clock.advance(6)

        assert not bus.sessions
        assert bus.stats().registered_handlers == 0
        conserves(bus)
