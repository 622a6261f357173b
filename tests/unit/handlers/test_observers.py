"""The observer port: a bus tells its observers, and costs nothing where there is none."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Literal

import anyio
from typing_extensions import override

from msgbus import CallNext, Command, Context, MessageBus, PublishReceipt, PublishStatus
from msgbus.bus.bus_state import BusState
from msgbus.handlers.observers import BusObserver, CallBegan, CallEnded
from msgbus.handlers.registration import Registration
from msgbus.messages.message import Event, Message
from msgbus.resilience import ResilientMessageBus, RetryConfig
from tests.fakes import OrderPlaced, let_others_run


class Count(Command[int]):
    pass


class Log(BusObserver):
    """Writes down all that it is told."""

    def __init__(self, *, only_watches: bool = False) -> None:
        self.only_watches = only_watches
        self.lines: list[str] = []

    @override
    def watch(
        self, registration: Registration, scope: str | None, per: Literal["attempt", "message"]
    ) -> CallBegan | None:
        def began(message: Any) -> CallEnded:
            self.lines.append(f"{per} began")

            def ended(error: BaseException | None) -> None:
                self.lines.append(f"{per} ended: {type(error).__name__}")

            return ended

        return began

    @override
    def failed(
        self, registration: Registration, scope: str | None, message: Message, error: BaseException
    ) -> None:
        self.lines.append(f"{registration.name} of {scope} failed: {type(error).__name__}")

    @override
    def publishing(self, event: Event, *, is_due: bool = False) -> None:
        self.lines.append("due" if is_due else "publishing")

    @override
    def published(self, event: Event, receipt: PublishReceipt) -> None:
        self.lines.append(receipt.status.value)

    @override
    def not_published(self, event: Event, error: BaseException) -> None:
        self.lines.append(f"not published: {type(error).__name__}")

    @override
    def scheduled(self, event: Event) -> None:
        self.lines.append("scheduled")

    @override
    def unscheduled(self, message_id: str) -> None:
        self.lines.append("unscheduled")


def state_of(bus: MessageBus) -> BusState:
    return bus._state  # pyright: ignore[reportPrivateUsage]


async def test_each_attempt_is_told_inside_of_the_message() -> None:
    retry = RetryConfig(max_retries=1, initial_delay=0, jitter=False)
    bus, log, calls = ResilientMessageBus(retry=retry), Log(), [1]
    state_of(bus).observe(log)

    @bus.handles(Count)
    async def count(command: Count) -> int:
        if calls:
            raise OSError(calls.pop())
        return 1

    assert await bus.call(Count()) == 1
    assert log.lines == [
        "message began",
        "attempt began",
        "attempt ended: OSError",
        "attempt began",
        "attempt ended: NoneType",
        "message ended: NoneType",
    ]


async def test_middleware_per_attempt_is_inside_of_what_is_told_of_an_attempt() -> None:
    async def forgive(message: object, call_next: CallNext) -> object:
        try:
            return await call_next(message)
        except ValueError:
            return 1

    bus, log = MessageBus(middleware=[forgive]), Log()
    state_of(bus).observe(log)

    @bus.handles(Count)
    async def count(command: Count) -> int:
        raise ValueError

    assert await bus.call(Count()) == 1
    assert "attempt ended: NoneType" in log.lines


async def test_a_failure_for_good_is_told_with_handler_and_session() -> None:
    bus, log = MessageBus(), Log()
    state_of(bus).observe(log)

    async def fail(message: object) -> int:
        raise ValueError

    async with bus, bus.session("job") as session:
        session.register_command_handler(Count, fail)
        session.register_event_handler(OrderPlaced, fail, name="listen")
        result = await session.execute(Count())
        await session.publish(OrderPlaced())
        await bus.settled()

    assert not result.success
    ends = [line for line in log.lines if "failed" in line]
    assert ends == ["fail of job failed: ValueError", "listen of job failed: ValueError"]


async def test_every_publish_is_told_on_whatever_way_it_goes() -> None:
    bus, log = MessageBus(filters=[lambda event: not event.causation_id]), Log()
    state_of(bus).observe(log)

    @bus.on(OrderPlaced)
    async def listen(event: OrderPlaced, context: Context) -> None:
        if event.number == 9:
            context.emit(OrderPlaced(number=1))

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await bus.publish_many([OrderPlaced(number=2), OrderPlaced(number=3)])
        delayed = OrderPlaced(number=4)
        await bus.publish(delayed, delay=60)
        assert await bus.unschedule(delayed)
        await bus.publish(OrderPlaced(number=9))
        await bus.settled()

    told = [line for line in log.lines if "message" not in line and "attempt" not in line]
    assert told == [
        *["publishing", "accepted"] * 3,
        *["publishing", "scheduled", "unscheduled"],
        *["publishing", "accepted"],
        *["publishing", "filtered"],
    ]


async def test_an_observer_may_come_and_go_while_the_bus_runs() -> None:
    bus, log = MessageBus(), Log()

    @bus.on(OrderPlaced)
    async def listen(event: OrderPlaced) -> None: ...

    async with bus:
        lengths: list[int] = []
        for change in (None, state_of(bus).observe, state_of(bus).stop_observing):
            if change is not None:
                change(log)
            await bus.publish(OrderPlaced())
            await bus.settled()
            lengths.append(len(log.lines))
        receipt = await bus.publish(OrderPlaced())

    assert lengths == [0, 6, 6]
    assert receipt.status is PublishStatus.ACCEPTED


async def test_without_observers_nothing_stands_around_a_handler() -> None:
    bus, log = MessageBus(), Log()
    state = state_of(bus)

    @bus.handles(Count, inline=True)
    def count(command: Count) -> int:
        return 1

    registration = state.registry.command_handler(Count, None)
    assert registration is not None

    async def call(message: object) -> object:
        return message

    assert state.observed(registration, call, None, "attempt") is call
    state.observe(log)
    assert state.observed(registration, call, None, "attempt") is not call
    state.stop_observing(log)
    assert state.observed(registration, call, None, "attempt") is call


async def test_one_that_only_watches_leaves_publishing_as_it_is() -> None:
    bus, log = MessageBus(), Log(only_watches=True)
    state_of(bus).observe(log)

    @bus.on(OrderPlaced)
    async def listen(event: OrderPlaced) -> None:
        raise ValueError

    async with bus:
        await bus.publish(OrderPlaced())
        await bus.settled()

    assert log.lines == [
        "message began",
        "attempt began",
        "attempt ended: ValueError",
        "message ended: ValueError",
    ]


async def test_an_observer_may_let_the_caller_of_a_handler_wait() -> None:
    began, room = anyio.Event(), anyio.Event()
    waits: list[str] = []

    class Full(BusObserver):
        @override
        def watch(
            self, registration: Registration, scope: str | None, per: Literal["attempt", "message"]
        ) -> CallBegan | None:
            def ended(error: BaseException | None) -> Awaitable[None]:
                waits.append(type(error).__name__)
                return room.wait()

            return None if per == "attempt" else lambda _: ended

    bus = MessageBus()

    @bus.handles(Count)
    async def count(command: Count) -> int:
        began.set()
        return 1

    state_of(bus).observe(Full())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bus.execute, Count())
        await began.wait()
        await let_others_run()
        assert bus.stats().commands["count"].running == 1
        room.set()
    assert waits == ["NoneType"]
