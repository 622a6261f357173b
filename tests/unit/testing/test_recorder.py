"""`record(bus)` sees all that goes through a bus, and changes none of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import anyio
import anyio.to_thread
import pytest

from msgbus import (
    BackpressureStrategy,
    BusClosedError,
    BusConfig,
    CallNext,
    Command,
    Context,
    Event,
    HandlerRegistry,
    HandlerTimeoutError,
    InsideHandlerError,
    Message,
    MessageBus,
    MissingHandlerError,
    PublishStatus,
    QueueConfig,
    QueueFullError,
    SessionEndEvent,
    TypeFilter,
    WrongMessageTypeError,
)
from msgbus.testing import Recorder, VirtualClock, record
from msgbus.testing.tap import Tap
from tests.fakes import OrderEvent, OrderPlaced, SlowHandler, let_others_run, logged


class PlaceOrder(Command[int]):
    number: int = 1


class ChargeCard(Command):
    number: int = 1


class CardCharged(OrderEvent):
    pass


class ReceiptSent(OrderEvent):
    pass


handlers = HandlerRegistry()


@handlers.handles(PlaceOrder)
async def place_order(command: PlaceOrder, context: Context) -> int:
    await context.call(ChargeCard(number=command.number))
    context.emit(OrderPlaced(number=command.number))
    return command.number


@handlers.handles(ChargeCard)
async def charge_card(command: ChargeCard, context: Context) -> None:
    await context.publish(CardCharged(number=command.number))


@handlers.on(OrderPlaced)
async def send_receipt(event: OrderPlaced, context: Context) -> None:
    await context.bus.publish(ReceiptSent(number=event.number))


async def fail(message: object) -> None:
    raise ValueError("boom")


async def ignore(message: object) -> None:
    pass


def handled(recorder: Recorder) -> list[tuple[str, str]]:
    """The names of what was handled, and by whom."""
    return [(type(one.message).__name__, one.handler) for one in recorder.handled()]


def kinds(messages: Sequence[Message]) -> list[str]:
    return [type(message).__name__ for message in messages]


# -- what it sees ------------------------------------------------------------------------------


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


# -- failures ----------------------------------------------------------------------------------


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


# -- what the bus turns away -------------------------------------------------------------------


async def test_the_status_tells_which_events_were_turned_away() -> None:
    bus = MessageBus(filters=[~TypeFilter(CardCharged)])
    slow = SlowHandler()
    bus.register_event_handler(
        OrderPlaced,
        slow,
        queue=QueueConfig(max_size=1, strategy=BackpressureStrategy.REJECT_NEW),
    )

    async with record(bus) as recorder:
        await recorder.publish(OrderPlaced(number=1))
        await slow.started.wait()
        await recorder.publish(OrderPlaced(number=2))
        await recorder.publish(OrderPlaced(number=3))
        await recorder.publish(CardCharged())
        slow.release.set()
        await recorder.settled()

    assert len(recorder.published()) == 4
    assert recorder.published(status=PublishStatus.REJECTED) == [OrderPlaced(number=3)]
    assert recorder.published(CardCharged, status=PublishStatus.FILTERED) == [CardCharged()]
    assert len(recorder.published(OrderPlaced, status=PublishStatus.ACCEPTED)) == 2


async def test_an_event_whose_publish_raised_was_not_published() -> None:
    bus = MessageBus(
        BusConfig(queue=QueueConfig(max_size=1, max_overflow=0)), filters=[TypeFilter(OrderEvent)]
    )

    @bus.on(OrderPlaced)
    async def publish_two(event: OrderPlaced, context: Context) -> None:
        await context.publish(ReceiptSent(number=1))
        await context.publish(ReceiptSent(number=2))

    bus.register_event_handler(ReceiptSent, ignore)

    async with record(bus) as recorder:
        await recorder.publish(OrderPlaced())
        await recorder.settled()

    assert recorder.published(ReceiptSent) == [ReceiptSent(number=1)]
    assert "ReceiptSent: not published: QueueFullError" in recorder.causation_tree()


async def test_a_publish_that_was_cancelled_while_it_waited_is_not_recorded() -> None:
    bus = MessageBus(BusConfig(queue=QueueConfig(max_size=1)))
    slow = SlowHandler()
    bus.register_event_handler(OrderPlaced, slow, name="slow")

    async with record(bus) as recorder:
        await recorder.publish(OrderPlaced(number=1))
        await slow.started.wait()
        await recorder.publish(OrderPlaced(number=2))
        with anyio.move_on_after(0):
            await recorder.publish(OrderPlaced(number=3))
        slow.release.set()
        await recorder.settled()

    assert [event.number for event in recorder.published(OrderPlaced)] == [1, 2]
    assert recorder.causation_tree().splitlines() == ["OrderPlaced: handled by slow"] * 2


async def test_an_event_that_waits_for_room_is_published_once_it_has_it() -> None:
    bus = MessageBus(BusConfig(queue=QueueConfig(max_size=1)))
    slow = SlowHandler()
    bus.register_event_handler(OrderPlaced, slow, name="slow")
    before: list[object] = []

    async with record(bus) as recorder:
        async with anyio.create_task_group() as tasks:
            await recorder.publish(OrderPlaced(number=1))
            await slow.started.wait()
            await recorder.publish(OrderPlaced(number=2))
            tasks.start_soon(recorder.publish, OrderPlaced(number=3))
            await let_others_run()
            before += [len(recorder.published()), recorder.causation_tree().splitlines()[-1]]
            slow.release.set()
        await recorder.settled()

    assert before == [2, "OrderPlaced: being published"]
    assert [event.number for event in recorder.published(OrderPlaced)] == [1, 2, 3]


async def test_what_is_no_event_is_not_recorded() -> None:
    async with record(MessageBus(registries=[handlers])) as recorder:
        with pytest.raises(WrongMessageTypeError):
            await recorder.publish(PlaceOrder())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    assert recorder.published() == []
    assert recorder.causation_tree() == ""


# -- delayed events ----------------------------------------------------------------------------


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


async def test_a_delayed_event_is_published_when_its_time_has_come(clock: VirtualClock) -> None:
    async with record(MessageBus(clock=clock)) as recorder:
        await recorder.publish(OrderPlaced(number=1), delay=10)
        at = datetime.fromtimestamp(clock.time(), UTC) + timedelta(seconds=20)
        await recorder.publish(OrderPlaced(number=2), at=at)
        before = recorder.published()
        await clock.advance(10)
        after = recorder.published(OrderPlaced)
        await clock.advance(5)

    await clock.advance(100)
    assert before == []
    assert after == recorder.published() == [OrderPlaced(number=1)]


async def test_a_delayed_event_that_was_taken_back_is_never_published(clock: VirtualClock) -> None:
    async with record(MessageBus(clock=clock)) as recorder:
        receipt = await recorder.publish(OrderPlaced(), delay=10)
        assert receipt.cancel is not None
        taken_back = (receipt.cancel(), receipt.cancel())
        await clock.advance(20)

    assert taken_back == (True, False)
    assert recorder.published() == []
    assert recorder.causation_tree() == "OrderPlaced: cancelled before its time"


# -- beginning and end -------------------------------------------------------------------------


async def test_a_new_bus_is_started_and_stopped() -> None:
    bus = MessageBus()

    async with record(bus):
        running = bus.is_running

    assert running
    assert bus.stats().state == "stopped"


async def test_the_end_of_the_block_waits_for_what_is_queued() -> None:
    bus = MessageBus()
    bus.register_event_handler(OrderPlaced, ignore, concurrency=1)

    async with record(bus) as recorder:
        await recorder.publish_many(OrderPlaced() for _ in range(500))

    assert len(recorder.published()) == 500
    assert len(recorder.handled()) == 500


async def test_a_running_bus_goes_on_running_and_is_itself_again() -> None:
    async with MessageBus(registries=[handlers]) as bus:
        await bus.call(PlaceOrder())
        await bus.settled()
        async with record(bus) as recorder:
            await bus.publish(OrderPlaced(number=2))
            await bus.call(ChargeCard(number=2))
            await bus.settled()
        await bus.publish(OrderPlaced(number=3))
        await bus.call(PlaceOrder(number=3))
        await bus.settled()

        assert bus.is_running
        assert bus.stats().handlers["send_receipt"].handled == 4
    assert recorder.executed() == [ChargeCard(number=2)]
    assert kinds(recorder.published()) == ["OrderPlaced", "CardCharged", "ReceiptSent"]
    assert handled(recorder) == [("ChargeCard", "charge_card"), ("OrderPlaced", "send_receipt")]


async def test_a_stopped_bus_cannot_be_recorded() -> None:
    async with MessageBus() as bus:
        pass

    with pytest.raises(BusClosedError):
        async with record(bus):
            pytest.fail("entered")


async def test_a_handler_cannot_record_its_own_running_bus() -> None:
    bus = MessageBus()

    @bus.handles(ChargeCard)
    async def charge(command: ChargeCard) -> None:
        async with record(bus):
            pytest.fail("entered")

    async with bus:
        result = await bus.execute(ChargeCard())

    assert isinstance(result.exception, InsideHandlerError)


async def test_recording_a_busy_bus_begins_once_its_handlers_have_finished_their_turn() -> None:
    slow = SlowHandler()
    entered = anyio.Event()

    async def use(bus: MessageBus) -> None:
        async with record(bus) as recorder:
            entered.set()
            await recorder.publish(OrderPlaced(number=3))
            await recorder.settled()
        assert [one.message.number for one in recorder.handled(OrderPlaced)] == [3]

    async with MessageBus() as bus, anyio.create_task_group() as tasks:
        bus.register_event_handler(OrderPlaced, slow)
        await bus.publish_many([OrderPlaced(number=1), OrderPlaced(number=2)])
        await slow.started.wait()
        tasks.start_soon(use, bus)
        await let_others_run()
        assert not entered.is_set()
        slow.release.set()

    assert slow.ended == [1, 2, 3]


async def test_a_paused_handler_does_not_hold_the_recording_up() -> None:
    async with MessageBus() as bus:
        paused = bus.register_event_handler(OrderPlaced, ignore)
        await bus.publish(OrderPlaced(number=1))
        await bus.settled()
        paused.pause()
        await bus.publish(OrderPlaced(number=2))
        await let_others_run()
        async with record(bus) as recorder:
            await recorder.publish(OrderPlaced(number=3))
            paused.resume()
            await recorder.settled()

    assert [event.number for event in recorder.published(OrderPlaced)] == [3]
    assert [one.message.number for one in recorder.handled(OrderPlaced)] == [2, 3]


async def test_a_block_that_raises_does_not_wait_for_handlers_at_work() -> None:
    bus = MessageBus()
    slow = SlowHandler()
    bus.register_event_handler(OrderPlaced, slow, name="slow")

    recording = record(bus)
    recorder = await recording.__aenter__()
    await recorder.publish_many([OrderPlaced(number=1), OrderPlaced(number=2)])
    await slow.started.wait()
    problem = ZeroDivisionError()
    swallowed = await recording.__aexit__(ZeroDivisionError, problem, None)

    assert not swallowed
    assert recorder.causation_tree().splitlines() == [
        "OrderPlaced: cancelled in slow",
        "OrderPlaced: given up for slow",
    ]


async def test_two_recordings_of_one_bus_may_overlap_in_any_order() -> None:
    async with MessageBus(registries=[handlers]) as bus:
        one, two = record(bus), record(bus)
        first = await one.__aenter__()
        await bus.publish(OrderPlaced(number=1))
        second = await two.__aenter__()
        await bus.publish(OrderPlaced(number=2))
        await bus.settled()
        await one.__aexit__(None, None, None)
        await bus.publish(OrderPlaced(number=3))
        await bus.settled()
        await two.__aexit__(None, None, None)
        await bus.publish(OrderPlaced(number=4))
        await bus.settled()

    assert [event.number for event in first.published(OrderPlaced)] == [1, 2]
    assert [event.number for event in second.published(OrderPlaced)] == [2, 3]
    assert [one.message.number for one in second.handled(OrderPlaced)] == [1, 2, 3]


async def test_a_method_that_the_test_has_replaced_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = MessageBus()
    original = bus.publish
    sent: list[Event] = []

    async def spy(event: Event, **options: object) -> object:
        sent.append(event)
        return await original(event)

    monkeypatch.setattr(bus, "publish", spy)
    async with bus:
        async with record(bus) as recorder:
            await recorder.publish(OrderPlaced())

        assert bus.publish is spy
    assert recorder.published() == sent == [OrderPlaced()]


async def test_after_the_block_only_the_recorder_holds_what_was_recorded() -> None:
    async with MessageBus(registries=[handlers]) as bus:
        async with record(bus) as recorder:
            await recorder.publish(OrderPlaced())
            await recorder.settled()
        of_recorder = weakref.ref(recorder)
        of_message = weakref.ref(recorder.handled()[0].message)
        del recorder
        # A worker keeps the frame of its last event until the next one.
        await bus.publish(OrderPlaced())
        await bus.settled()
        gc.collect()

        assert of_recorder() is None
        assert of_message() is None
        assert [one for one in gc.get_objects() if isinstance(one, Tap)] == []
