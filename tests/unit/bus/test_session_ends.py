"""Sessions that end with work left: at once where waiting is in vain, and never silently."""

from __future__ import annotations

import anyio
import pytest

from msgbus import (
    BusConfig,
    EventRefusedEvent,
    MessageBus,
    SessionEndEvent,
    SessionReport,
    Undelivered,
)
from msgbus.errors import BusNotStartedError
from msgbus.runtime.clock import VirtualClock
from tests.fakes import OrderPlaced, Recorder, SlowHandler, conserves, let_others_run, logged


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
    assert bus.stats().handlers["Recorder"].abandoned == 1
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


# -- point 8: what a session leaves is handed back ----------------------------------------------


async def test_a_delayed_event_of_a_session_that_ends_first_is_handed_back_and_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Point 8: it was ACCEPTED, so it must not be lost in silence."""
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    handler = Recorder()
    refused: list[EventRefusedEvent] = []
    ends: list[SessionEndEvent] = []
    bus.subscribe(EventRefusedEvent, refused.append, inline=True)
    bus.subscribe(SessionEndEvent, ends.append, inline=True)

    async with bus:
        event = OrderPlaced(number=1)
        async with bus.session("job") as session:
            session.subscribe(OrderPlaced, handler, name="handler")
            receipt = await session.publish(event, delay=10)
            assert session.report is None
        assert session.report == SessionReport(1, (Undelivered(event, "handler"),))
        assert bus.stats().scheduled == 0
        assert receipt.cancel is not None
        assert not receipt.cancel()
        await clock.advance(20)
        await bus.settled()

    assert handler.numbers == []
    (told,) = refused
    assert told.event_id == event.message_id
    assert "'job' ended" in told.reason
    assert "handler" in told.reason
    assert [end.leftovers for end in ends] == [1]
    assert logged(caplog, "delayed_event_refused")
    assert logged(caplog, "session_ended_with_leftovers")
    conserves(bus)


async def test_a_delayed_event_that_the_bus_handles_too_still_reaches_the_bus() -> None:
    """Point 8: only the pair with the session's own handler is handed back."""
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    mine, everyones = Recorder(), Recorder()
    bus.subscribe(OrderPlaced, everyones)

    async with bus:
        async with bus.session("job") as session:
            session.subscribe(OrderPlaced, mine, name="mine")
            await session.publish(OrderPlaced(number=1), delay=10)
        assert await session.close() == session.report
        assert session.report is not None
        assert [left.handler for left in session.report.leftovers] == ["mine"]
        await clock.advance(20)
        await bus.settled()

    assert (mine.numbers, everyones.numbers) == ([], [1])
    conserves(bus)


async def test_a_delayed_event_of_a_session_without_handlers_for_it_stays_scheduled() -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    late = Recorder()

    async with bus:
        async with bus.session("job") as session:
            await session.publish(OrderPlaced(number=1), delay=10)
        assert session.report == SessionReport()
        bus.subscribe(OrderPlaced, late)
        await clock.advance(20)
        await bus.settled()

    assert late.numbers == [1]


async def test_a_delayed_event_that_was_due_or_taken_back_is_no_leftover() -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    handler = Recorder()

    async with bus:
        async with bus.session("job") as session, bus.session("other") as other:
            session.subscribe(OrderPlaced, handler)
            other.subscribe(OrderPlaced, Recorder())
            await session.publish(OrderPlaced(number=1), delay=1)
            taken = OrderPlaced(number=2)
            await session.publish(taken, delay=1)
            assert await bus.unschedule(taken)
            await clock.advance(2)
            await other.publish(OrderPlaced(number=3), delay=1)
            report = await session.close()
        assert report == SessionReport()

    assert handler.numbers == [1]


async def test_what_is_queued_when_a_session_ends_is_handed_back() -> None:
    """Point 8: with the handler that did not get it, as `bus.stop()` does."""
    bus = MessageBus(BusConfig(session_timeout=0))
    slow = SlowHandler()

    async with bus:
        async with bus.session("job") as session:
            session.subscribe(OrderPlaced, slow, name="slow")
            await session.publish(OrderPlaced(number=0))
            await slow.started.wait()
            await session.publish(OrderPlaced(number=1))
        assert session.report == SessionReport(2, (Undelivered(OrderPlaced(number=1), "slow"),))
    conserves(bus)
