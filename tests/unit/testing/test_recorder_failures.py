"""A recorder knows what failed, in which handler, and with what."""

from __future__ import annotations

import gc

import anyio
import pytest

from msgbus import (
    BusConfig,
    CallNext,
    Context,
    Event,
    HandlerTimeoutError,
    MessageBus,
    MissingHandlerError,
    QueueConfig,
    QueueFullError,
)
from msgbus.testing import VirtualClock, record
from tests.fakes import OrderEvent, OrderPlaced, SlowHandler, let_others_run, logged
from tests.unit.testing.shop import (
    CardCharged,
    ChargeCard,
    PlaceOrder,
    ReceiptSent,
    fail,
    handled,
    ignore,
)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


async def test_a_failed_command_is_recorded_with_its_handler_and_its_own_exception() -> None:
    bus = MessageBus()
    bus.register_command_handler(ChargeCard, fail)

    async with record(bus) as recorder:
        result = await recorder.execute(ChargeCard())

    (failure,) = recorder.failed()
    assert (failure.message, failure.handler) == (ChargeCard(), "fail")
    assert failure.error is result.exception
    assert recorder.executed() == [ChargeCard()]
    assert recorder.handled() == []


async def test_a_failed_event_is_recorded_for_the_handler_that_failed_alone() -> None:
    bus = MessageBus()
    bus.register_event_handler(OrderPlaced, fail)
    bus.register_event_handler(OrderPlaced, ignore)

    async with record(bus) as recorder:
        await recorder.publish(OrderPlaced())
        await recorder.settled()

    (failure,) = recorder.failed(OrderPlaced)
    assert failure.handler == "fail"
    assert isinstance(failure.error, ValueError)
    assert handled(recorder) == [("OrderPlaced", "ignore")]


async def test_a_failure_belongs_to_its_handler_whoever_else_is_at_work() -> None:
    bus = MessageBus()
    slow = SlowHandler()

    @bus.on(OrderPlaced)
    async def fail_later(event: OrderPlaced) -> None:
        await slow.started.wait()
        raise ValueError

    bus.register_event_handler(OrderPlaced, slow, name="slow")

    async with record(bus) as recorder:
        await recorder.publish(OrderPlaced())
        await let_others_run()
        slow.release.set()
        await recorder.settled()

    assert [one.handler for one in recorder.failed()] == ["fail_later"]
    assert handled(recorder) == [("OrderPlaced", "slow")]


async def test_a_failure_belongs_to_its_command_whatever_else_was_executed_on_the_way() -> None:
    bus = MessageBus()
    execute = bus.execute
    bus.register_command_handler(ChargeCard, ignore)

    @bus.handles(PlaceOrder)
    async def place_order(command: PlaceOrder) -> int:
        await execute(ChargeCard())
        raise ValueError

    async with record(bus) as recorder:
        result = await recorder.execute(PlaceOrder())

    assert not result.success
    assert [one.handler for one in recorder.failed()] == ["place_order"]
    assert handled(recorder) == [("ChargeCard", "ignore")]


async def test_a_command_that_ran_out_of_time_has_failed(clock: VirtualClock) -> None:
    bus = MessageBus(clock=clock)

    @bus.handles(ChargeCard)
    async def slow(command: ChargeCard) -> None:
        await clock.sleep(60)

    async with record(bus) as recorder, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: recorder.execute(ChargeCard(), timeout=1))
        await clock.advance(2)

    (failure,) = recorder.failed()
    assert failure.handler == "slow"
    assert isinstance(failure.error, HandlerTimeoutError)


async def test_a_cancelled_command_was_executed_but_neither_handled_nor_failed() -> None:
    bus = MessageBus()
    started = anyio.Event()

    @bus.handles(ChargeCard)
    async def endless(command: ChargeCard) -> None:
        started.set()
        await anyio.sleep_forever()

    async with record(bus) as recorder, anyio.create_task_group() as tasks:
        tasks.start_soon(recorder.execute, ChargeCard())
        await started.wait()
        tasks.cancel_scope.cancel()

    assert recorder.executed() == [ChargeCard()]
    assert [*recorder.handled(), *recorder.failed()] == []
    assert recorder.causation_tree() == "ChargeCard: cancelled in endless"


async def test_a_command_cancelled_while_its_events_wait_for_room_was_not_handled() -> None:
    bus = MessageBus(BusConfig(queue=QueueConfig(max_size=1)))
    slow = SlowHandler()
    bus.register_event_handler(OrderPlaced, slow, name="slow")

    @bus.handles(ChargeCard)
    async def emit(command: ChargeCard, context: Context) -> None:
        context.emit(OrderPlaced())

    async with record(bus) as recorder:
        await recorder.publish(OrderPlaced())
        await slow.started.wait()
        await recorder.publish(OrderPlaced())
        with anyio.move_on_after(0):
            await recorder.execute(ChargeCard())
        slow.release.set()

    assert recorder.executed() == [ChargeCard()]
    assert recorder.handled(ChargeCard) == []
    assert recorder.causation_tree().splitlines()[-1] == "ChargeCard: cancelled in emit"


async def test_a_command_without_handler_is_not_executed() -> None:
    async with record(MessageBus()) as recorder:
        with pytest.raises(MissingHandlerError):
            await recorder.execute(ChargeCard())

    assert recorder.executed() == []


async def test_middleware_has_the_last_word_on_success() -> None:
    async def forgive(message: object, call_next: CallNext) -> object:
        try:
            return await call_next(message)
        except ValueError:
            return None

    async def refuse(message: object, call_next: CallNext) -> object:
        raise PermissionError

    bus = MessageBus()
    bus.add_middleware(forgive, types=OrderPlaced, per="message")
    bus.add_middleware(refuse, types=CardCharged)
    bus.register_event_handler(OrderPlaced, fail)
    bus.register_event_handler(CardCharged, ignore)

    async with record(bus) as recorder:
        await recorder.publish(OrderPlaced())
        await recorder.publish(CardCharged())
        await recorder.settled()

    assert handled(recorder) == [("OrderPlaced", "fail")]
    (failure,) = recorder.failed()
    assert (failure.handler, type(failure.error)) == ("ignore", PermissionError)


async def test_a_handler_whose_own_filter_fails_has_failed() -> None:
    def broken(event: Event) -> bool:
        raise ZeroDivisionError

    bus = MessageBus()
    bus.register_event_handler(OrderPlaced, ignore, filter=broken)

    async with record(bus) as recorder:
        await recorder.publish(OrderPlaced())
        await recorder.settled()

    (failure,) = recorder.failed()
    assert (failure.handler, type(failure.error)) == ("ignore", ZeroDivisionError)
    assert recorder.published() == [OrderPlaced()]


async def test_a_handler_whose_emitted_event_is_refused_has_failed() -> None:
    bus = MessageBus()
    slow = SlowHandler()
    bus.register_event_handler(
        ReceiptSent, slow, name="slow", queue=QueueConfig(max_size=1, max_overflow=0)
    )

    @bus.on(OrderPlaced)
    async def emit_two(event: OrderPlaced, context: Context) -> None:
        context.emit(ReceiptSent(number=1))
        context.emit(ReceiptSent(number=2))

    async with record(bus) as recorder:
        await recorder.publish(OrderPlaced())
        await let_others_run()
        slow.release.set()
        await recorder.settled()

    (failure,) = recorder.failed()
    assert failure.handler == "emit_two"
    assert isinstance(failure.error, QueueFullError)
    assert recorder.published(ReceiptSent) == [ReceiptSent(number=1)]


async def test_a_list_that_is_tried_again_is_recorded_once_for_each_event() -> None:
    bus = MessageBus()

    seen: list[str] = []

    @bus.on(OrderPlaced, batch=True)
    async def no_threes(events: list[OrderPlaced]) -> None:
        seen.append(recorder.causation_tree().splitlines()[0])
        if any(event.number == 3 for event in events):
            raise ValueError("three")

    bus.register_event_handler(OrderEvent, ignore, name="all")

    async with record(bus) as recorder:
        await recorder.publish_many(OrderPlaced(number=number) for number in range(5))
        await recorder.settled()

    by_lists = [one for one in recorder.handled(OrderPlaced) if one.handler == "no_threes"]
    assert [one.message.number for one in by_lists] == [0, 1, 2, 4]
    assert len(recorder.handled()) == 9
    assert [one.message.number for one in recorder.failed(OrderPlaced)] == [3]
    assert [line.count("running in no_threes") for line in seen[:3]] == [1, 1, 1]
    assert sorted(recorder.causation_tree().splitlines()) == [
        *["OrderPlaced: handled by all, no_threes"] * 4,
        "OrderPlaced: handled by all; failed in no_threes: ValueError: three",
    ]


async def test_recording_a_failure_is_no_look_at_the_result(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MessageBus(BusConfig(name="recorded"))
    bus.register_command_handler(ChargeCard, fail)

    async with record(bus) as recorder:
        await recorder.execute(ChargeCard())
    del recorder
    gc.collect()

    # By name: the collection may also find results of tests that ran before.
    entries = logged(caplog, "command_failed_unobserved")
    assert [entry["handler"] for entry in entries if entry["bus"] == "recorded"] == ["fail"]
