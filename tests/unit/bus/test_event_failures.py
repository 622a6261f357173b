"""Event handlers that fail: alone, told once, and never in a circle."""

from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel
import pytest

from msgbus import (
    BusConfig,
    Command,
    Context,
    EventHandlerFailedEvent,
    MessageBus,
    QueueConfig,
)
from msgbus.runtime.clock import VirtualClock
from tests.fakes import (
    OrderEvent,
    OrderPlaced,
    OrderShipped,
    Recorder,
    conserves,
    let_others_run,
    logged,
)

ROUNDS = 20
"""Where a handler that feeds itself gives up, so that the test ends."""


class RepairOrder(Command):
    pass


class Alarms:
    """Handles failures by failing too, after `react`; stops reacting after `ROUNDS`."""

    def __init__(self, bus: MessageBus) -> None:
        self.bus = bus
        self.calls = 0

    async def __call__(self, event: EventHandlerFailedEvent, context: Context) -> None:
        self.calls += 1
        if self.calls < ROUNDS:
            await self.react(context)

    async def react(self, context: Context) -> None:
        raise RuntimeError


async def fail(event: OrderEvent) -> None:
    raise ValueError(f"no stock for {event.number}")


# -- isolation -------------------------------------------------------------------------------


async def test_one_handlers_failure_never_touches_another() -> None:
    bus = MessageBus()
    before, after = Recorder(), Recorder()
    bus.subscribe(OrderPlaced, before, name="before")
    bus.subscribe(OrderPlaced, fail)
    bus.subscribe(OrderPlaced, after, name="after")

    async with bus:
        for number in range(5):
            await bus.publish(OrderPlaced(number=number))
        await bus.settled()

    assert before.numbers == after.numbers == [0, 1, 2, 3, 4]
    handlers = bus.stats().handlers
    assert (handlers["fail"].handled, handlers["fail"].failed) == (0, 5)
    assert (handlers["after"].handled, handlers["after"].failed) == (5, 0)
    conserves(bus)


async def test_a_failed_event_does_not_stop_the_lane() -> None:
    bus = MessageBus()
    handled: list[int] = []

    @bus.on(OrderPlaced)
    async def fail_on_odd(event: OrderPlaced) -> None:
        if event.number % 2:
            raise ValueError
        handled.append(event.number)

    async with bus:
        for number in range(6):
            await bus.publish(OrderPlaced(number=number))
        await bus.settled()

    assert handled == [0, 2, 4]
    assert bus.stats().handlers["fail_on_odd"].failed == 3
    conserves(bus)


async def test_a_failure_is_logged_once_without_secrets_or_payload(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MessageBus()

    @bus.on(OrderPlaced)
    async def connect(event: OrderPlaced) -> None:
        raise ConnectionError("cannot reach https://bob:hunter2@stock.example")

    order = OrderPlaced(number=4711)
    async with bus:
        await bus.publish(order)
        await bus.settled()

    (entry,) = logged(caplog, "handler_failed")
    assert entry["handler"] == "connect"
    assert entry["message_type"] == "OrderPlaced"
    assert entry["message_id"] == order.message_id
    assert "ConnectionError" in entry["error"]
    assert "hunter2" not in caplog.text
    assert "4711" not in caplog.text


async def test_an_exception_that_cannot_be_printed_is_still_just_a_failure() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    bus = MessageBus()

    @bus.on(OrderPlaced)
    async def break_badly(event: OrderPlaced) -> None:
        raise UnprintableError

    async with bus:
        await bus.publish(OrderPlaced())
        await bus.publish(OrderPlaced())
        await bus.settled()

    assert bus.stats().handlers["break_badly"].failed == 2


# -- time and cancellation ---------------------------------------------------------------------


async def test_a_handler_that_hangs_fails_by_its_timeout_and_the_lane_goes_on() -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock)
    failures: list[EventHandlerFailedEvent] = []
    handled: list[int] = []

    @bus.on(OrderPlaced, timeout=5)
    async def hang_on_first(event: OrderPlaced) -> None:
        if event.number == 0:
            await anyio.sleep_forever()
        handled.append(event.number)

    @bus.on(EventHandlerFailedEvent)
    async def note(event: EventHandlerFailedEvent) -> None:
        failures.append(event)

    async with bus:
        await bus.publish(OrderPlaced(number=0))
        await bus.publish(OrderPlaced(number=1))
        await clock.advance(4.9)
        assert handled == []
        await clock.advance(0.1)
        await bus.settled()

    assert handled == [1]
    assert [failure.error_type for failure in failures] == ["HandlerTimeoutError"]
    assert "hang_on_first" in failures[0].error
    conserves(bus)


async def test_a_cancellation_that_escapes_a_handler_fails_only_its_event() -> None:
    bus = MessageBus(BusConfig(drain_timeout=0))
    handled: list[int] = []

    @bus.on(OrderPlaced)
    async def let_it_escape(event: OrderPlaced) -> None:
        if event.number == 0:
            escaped: BaseException | None = None
            with anyio.CancelScope() as own_scope:
                own_scope.cancel()
                try:
                    await anyio.lowlevel.checkpoint()
                except anyio.get_cancelled_exc_class() as cancelled:
                    escaped = cancelled
            assert escaped is not None
            raise escaped
        handled.append(event.number)

    async with bus:
        for number in range(3):
            await bus.publish(OrderPlaced(number=number))
        await let_others_run()

        assert handled == [1, 2]
        assert bus.stats().handlers["let_it_escape"].failed == 1
        conserves(bus)


@pytest.mark.asyncio_only("trio's exception cannot be made by hand")
async def test_a_handler_that_raises_cancelled_error_fails_only_its_event() -> None:
    bus = MessageBus(BusConfig(drain_timeout=0))
    handled: list[int] = []

    @bus.on(OrderPlaced)
    async def give_up(event: OrderPlaced) -> None:
        if event.number == 0:
            raise asyncio.CancelledError
        handled.append(event.number)

    async with bus:
        for number in range(3):
            await bus.publish(OrderPlaced(number=number))
        await let_others_run()

        assert handled == [1, 2]
        assert bus.stats().handlers["give_up"].failed == 1


@pytest.mark.asyncio_only("a trio task cannot be cancelled but through its scopes")
async def test_a_handler_that_cancels_its_own_task_does_not_kill_its_lane() -> None:
    bus = MessageBus(BusConfig(drain_timeout=0))
    handled: list[int] = []

    @bus.on(OrderPlaced)
    async def cancel_oneself(event: OrderPlaced) -> None:
        if event.number == 0:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        handled.append(event.number)

    async with bus:
        for number in range(3):
            await bus.publish(OrderPlaced(number=number))
        await let_others_run()
        await bus.publish(OrderPlaced(number=3))
        await let_others_run()

        assert handled == [1, 2, 3]
        conserves(bus)


# -- told to who asks ----------------------------------------------------------------------------


async def test_a_failure_is_published_to_who_subscribes_by_name() -> None:
    bus = MessageBus()
    failures: list[EventHandlerFailedEvent] = []
    bus.subscribe(OrderPlaced, fail)

    @bus.on(EventHandlerFailedEvent)
    async def note(event: EventHandlerFailedEvent) -> None:
        failures.append(event)

    order = OrderPlaced(number=7)
    async with bus:
        await bus.publish(order)
        await bus.settled()

    (failure,) = failures
    assert failure.handler == "fail"
    assert failure.event_type == "OrderPlaced"
    assert failure.event_id == order.message_id
    assert failure.error_type == "ValueError"
    assert failure.error == "ValueError: no stock for 7"
    assert failure.causation_id == order.message_id
    conserves(bus)


async def test_lifecycle_events_are_built_only_when_somebody_wants_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[object] = []
    real_init = EventHandlerFailedEvent.__init__

    def spy(self: EventHandlerFailedEvent, /, **data: str) -> None:
        built.append(self)
        real_init(self, **data)

    monkeypatch.setattr(EventHandlerFailedEvent, "__init__", spy)
    bus = MessageBus()
    bus.subscribe(OrderPlaced, fail)

    async with bus:
        await bus.publish(OrderPlaced())
        await bus.settled()
        assert built == []

        @bus.on(EventHandlerFailedEvent)
        async def note(event: EventHandlerFailedEvent) -> None: ...

        await bus.publish(OrderPlaced())
        await bus.settled()

    assert len(built) == 1


async def test_a_failing_failure_handler_never_feeds_itself() -> None:
    bus = MessageBus()
    alarms = Alarms(bus)
    bus.subscribe(EventHandlerFailedEvent, alarms)
    bus.subscribe(OrderPlaced, fail)

    async with bus:
        await bus.publish(OrderPlaced())
        await bus.settled()

    assert alarms.calls == 1
    assert bus.stats().handlers["Alarms"].failed == 1
    conserves(bus)


class PublishingAlarms(Alarms):
    async def react(self, context: Context) -> None:
        await self.bus.publish(OrderShipped())


class EmittingAlarms(Alarms):
    async def react(self, context: Context) -> None:
        context.emit(OrderShipped())


class CommandingAlarms(Alarms):
    async def react(self, context: Context) -> None:
        await self.bus.execute(RepairOrder())


@pytest.mark.parametrize("kind", [PublishingAlarms, EmittingAlarms, CommandingAlarms])
async def test_a_failure_handler_never_feeds_itself_through_others(kind: type[Alarms]) -> None:
    bus = MessageBus()
    alarms = kind(bus)
    bus.subscribe(EventHandlerFailedEvent, alarms)
    bus.subscribe(OrderPlaced, fail, name="first")
    bus.subscribe(OrderShipped, fail, name="second")

    @bus.handles(RepairOrder)
    async def repair(command: RepairOrder, context: Context) -> None:
        await context.publish(OrderShipped())

    async with bus:
        await bus.publish(OrderPlaced())
        await bus.settled()

    assert alarms.calls == 1
    assert bus.stats().handlers["second"].failed == 1
    conserves(bus)


async def test_a_batch_failure_handler_never_feeds_itself_through_others() -> None:
    bus = MessageBus(BusConfig(queue=QueueConfig(batch_size=10)))
    calls = 0
    bus.subscribe(OrderPlaced, fail, name="first")
    bus.subscribe(OrderShipped, fail, name="second")

    @bus.on(EventHandlerFailedEvent, batch=True)
    async def alarm(events: list[EventHandlerFailedEvent]) -> None:
        nonlocal calls
        calls += 1
        if calls < ROUNDS:
            await bus.publish(OrderShipped())

    async with bus:
        await bus.publish(OrderPlaced())
        await bus.settled()

    assert calls == 1
    conserves(bus)
