"""`publish(event, wait=True)` returns when the handlers are done (issue 19, point b)."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from msgbus import (
    BackpressureStrategy,
    Command,
    Context,
    Event,
    HandlerOutcome,
    MessageBus,
    OutcomeStatus,
    PublishReceipt,
    PublishStatus,
)
from msgbus.errors import BusNotStartedError, BusStateError, InsideHandlerError
from msgbus.resilience import ResilientMessageBus, RetryConfig
from msgbus.testing import VirtualClock
from tests.fakes import FullLane, OrderPlaced, OrderShipped, SlowHandler, conserves, let_others_run


def outcomes(receipt: PublishReceipt) -> dict[str, OutcomeStatus]:
    return {one.handler: one.status for one in receipt.outcomes}


async def test_it_returns_when_all_handlers_are_done_with_this_event() -> None:
    slow = SlowHandler()
    receipts: list[PublishReceipt] = []

    async with MessageBus() as bus, anyio.create_task_group() as tasks:
        bus.subscribe(OrderPlaced, slow, name="slow")
        quick: list[int] = []
        bus.subscribe(
            OrderPlaced, lambda event: quick.append(event.number), name="quick", inline=True
        )

        async def publish() -> None:
            receipts.append(await bus.publish(OrderPlaced(number=1), wait=True))

        tasks.start_soon(publish)
        await slow.started.wait()
        await let_others_run()
        assert quick == [1]
        assert receipts == []
        slow.release.set()

    assert slow.ended == [1]
    assert receipts[0].status is PublishStatus.ACCEPTED
    assert outcomes(receipts[0]) == {"slow": OutcomeStatus.DONE, "quick": OutcomeStatus.DONE}
    conserves(bus)


async def test_each_handler_has_its_outcome_with_a_redacted_error() -> None:
    clock = VirtualClock()
    bus = MessageBus(clock=clock)

    @bus.on(OrderPlaced)
    async def good(event: OrderPlaced) -> None: ...

    @bus.on(OrderPlaced)
    async def bad(event: OrderPlaced) -> None:
        message = "cannot reach postgres://bob:hunter2@db/shop"
        raise ConnectionError(message)

    @bus.on(OrderPlaced, timeout=5)
    async def late(event: OrderPlaced) -> None:
        await anyio.sleep_forever()

    @bus.on(OrderPlaced, filter=lambda event: False)
    async def choosy(event: OrderPlaced) -> None: ...

    receipts: list[PublishReceipt] = []
    async with bus, anyio.create_task_group() as tasks:

        async def publish() -> None:
            receipts.append(await bus.publish(OrderPlaced(), wait=True))

        tasks.start_soon(publish)
        await clock.advance(6)

    (receipt,) = receipts
    assert outcomes(receipt) == {
        "good": OutcomeStatus.DONE,
        "bad": OutcomeStatus.FAILED,
        "late": OutcomeStatus.TIMED_OUT,
        "choosy": OutcomeStatus.FILTERED,
    }
    errors = {one.handler: one.error for one in receipt.outcomes}
    assert "cannot reach" in errors["bad"]
    assert "hunter2" not in errors["bad"]
    assert "within 5 s" in errors["late"]
    assert errors["good"] == errors["choosy"] == ""
    conserves(bus)


def not_one(event: Event) -> bool:
    return event != OrderPlaced(number=1)


async def test_outcomes_are_in_the_order_of_priority_and_batches_report_each_event() -> None:
    async with MessageBus() as bus:

        @bus.on(OrderPlaced, batch=True, filter=not_one)
        async def many(events: list[OrderPlaced]) -> None:
            if any(event.number == 2 for event in events):
                message = "two"
                raise ValueError(message)

        @bus.on(OrderPlaced, priority=5)
        async def first(event: OrderPlaced) -> None: ...

        found = [
            [
                (one.handler, one.status)
                for one in (await bus.publish(OrderPlaced(number=number), wait=True)).outcomes
            ]
            for number in range(3)
        ]

    done = ("first", OutcomeStatus.DONE)
    assert found == [
        [done, ("many", OutcomeStatus.DONE)],
        [done, ("many", OutcomeStatus.FILTERED)],
        [done, ("many", OutcomeStatus.FAILED)],
    ]
    conserves(bus)


async def test_an_event_without_handlers_or_turned_away_is_not_waited_for() -> None:
    async with MessageBus(filters=[lambda event: isinstance(event, OrderPlaced)]) as bus:
        alone = await bus.publish(OrderPlaced(), wait=True)
        filtered = await bus.publish(OrderShipped(), wait=True)

    assert (alone.status, alone.outcomes) == (PublishStatus.ACCEPTED, ())
    assert (filtered.status, filtered.outcomes) == (PublishStatus.FILTERED, ())


async def test_what_falls_out_of_a_full_queue_is_dropped() -> None:
    full = FullLane(1, BackpressureStrategy.DROP_OLDEST)
    receipts: list[PublishReceipt] = []

    async with full.bus as bus, anyio.create_task_group() as tasks:
        await full.fill()

        async def publish() -> None:
            receipts.append(await bus.publish(OrderPlaced(number=8), wait=True))

        tasks.start_soon(publish)
        await let_others_run()
        await bus.publish(OrderPlaced(number=9))
        await let_others_run()
        full.slow.release.set()

    assert receipts[0].status is PublishStatus.DROPPED
    assert receipts[0].outcomes == (HandlerOutcome("slow", OutcomeStatus.DROPPED),)
    conserves(bus)


async def test_a_stop_that_cuts_handlers_off_ends_the_wait() -> None:
    slow = SlowHandler()
    receipts: list[PublishReceipt] = []
    bus = MessageBus()
    bus.subscribe(OrderPlaced, slow, name="slow")
    await bus.start()

    async with anyio.create_task_group() as tasks:

        async def publish(number: int) -> None:
            receipts.append(await bus.publish(OrderPlaced(number=number), wait=True))

        for number in range(2):
            tasks.start_soon(publish, number)
        await slow.started.wait()
        assert (await bus.stop(0)).abandoned == 2

    assert [outcomes(one) for one in receipts] == [{"slow": OutcomeStatus.DROPPED}] * 2
    conserves(bus)


async def test_a_cancelled_wait_takes_nothing_back() -> None:
    slow = SlowHandler()
    async with MessageBus() as bus:
        bus.subscribe(OrderPlaced, slow)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: bus.publish(OrderPlaced(number=4), wait=True))
            await slow.started.wait()
            tasks.cancel_scope.cancel()
        slow.release.set()
        await bus.settled()

    assert slow.ended == [4]


async def test_retries_are_part_of_the_wait() -> None:
    clock = VirtualClock()
    bus = ResilientMessageBus(retry=RetryConfig(max_retries=2, jitter=False), clock=clock)
    attempts: list[int] = []

    @bus.on(OrderPlaced)
    async def flaky(event: OrderPlaced, context: Context) -> None:
        attempts.append(context.attempt)
        if len(attempts) < 3:
            raise ConnectionError

    receipts: list[PublishReceipt] = []
    async with bus, anyio.create_task_group() as tasks:

        async def publish() -> None:
            receipts.append(await bus.publish(OrderPlaced(), wait=True))

        tasks.start_soon(publish)
        await clock.advance(10)

    assert attempts == [1, 2, 3]
    assert outcomes(receipts[0]) == {"flaky": OutcomeStatus.DONE}


# -- where it would wait for itself ----------------------------------------------------------------


async def test_a_handler_of_the_same_event_is_refused() -> None:
    found: list[str] = []
    async with MessageBus() as bus:

        @bus.on(OrderPlaced)
        async def again(event: OrderPlaced) -> None:
            if event.number:
                try:
                    await bus.publish(OrderPlaced(), wait=True)
                except InsideHandlerError as error:
                    found.append(str(error))

        await bus.publish(OrderPlaced(number=1))
        await bus.settled()

    assert len(found) == 1
    assert "again cannot publish OrderPlaced with wait=True" in found[0]
    assert bus.stats().handlers["again"].handled == 1
    conserves(bus)


async def test_an_event_handler_may_wait_for_others() -> None:
    order: list[str] = []
    async with MessageBus() as bus:

        @bus.on(OrderPlaced)
        async def place(event: OrderPlaced, context: Context) -> None:
            receipt = await context.publish(OrderShipped(), wait=True)
            order.append(f"placed {receipt.outcomes[0].status.value}")

        @bus.on(OrderShipped)
        async def ship(event: OrderShipped) -> None:
            order.append("shipped")

        await bus.publish(OrderPlaced(), wait=True)

    assert order == ["shipped", "placed done"]
    conserves(bus)


async def test_handlers_that_wait_for_each_other_are_refused_also_across_buses() -> None:
    refused: list[str] = []
    async with MessageBus() as bus, MessageBus() as other:

        @bus.on(OrderPlaced)
        async def place(event: OrderPlaced) -> None:
            await other.publish(OrderShipped(number=event.number), wait=True)

        @other.on(OrderShipped)
        async def ship(event: OrderShipped) -> None:
            if event.number:
                try:
                    await bus.publish(OrderPlaced(), wait=True)
                except InsideHandlerError as error:
                    refused.append(str(error))

        with anyio.fail_after(5):
            await bus.publish(OrderPlaced(number=1), wait=True)

    assert len(refused) == 1
    assert refused[0].startswith("ship cannot publish OrderPlaced")


async def test_a_handler_that_lower_priorities_wait_for_is_refused_to_wait_for_them() -> None:
    refused: list[str] = []
    async with MessageBus() as bus:

        @bus.on(OrderPlaced, priority=1)
        async def high(event: OrderPlaced) -> None:
            await let_others_run()
            try:
                await bus.publish(OrderShipped(), wait=True)
            except InsideHandlerError as error:
                refused.append(str(error))

        async def low(event: OrderPlaced | OrderShipped) -> None: ...

        bus.subscribe(OrderPlaced | OrderShipped, low, name="low")
        await bus.publish(OrderPlaced())
        await bus.settled(5)

    assert len(refused) == 1
    assert "as low can only go on after it" in refused[0]
    assert bus.stats().handlers["low"].handled == 1
    conserves(bus)


async def test_a_command_handler_called_from_a_lane_is_on_that_lane() -> None:
    class Tell(Command[None]):
        pass

    async with MessageBus() as bus:
        failures: list[str | None] = []

        @bus.handles(Tell)
        async def tell(command: Tell) -> None:
            await bus.publish(OrderPlaced(), wait=True)

        @bus.on(OrderPlaced)
        async def ask(event: OrderPlaced) -> None:
            if event.number:
                failures.append((await bus.execute(Tell())).error)

        assert (await bus.execute(Tell())).success
        await bus.publish(OrderPlaced(number=1), wait=True)

    assert failures[0] is not None
    assert "would wait for itself" in failures[0]


async def test_before_the_start_and_with_a_delay_it_is_an_error() -> None:
    bus = MessageBus()
    with pytest.raises(BusNotStartedError):
        await bus.publish(OrderPlaced(), wait=True)
    async with bus:
        with pytest.raises(ValueError, match="wait=True"):
            await bus.publish(OrderPlaced(), wait=True, delay=1)

    assert not bus.stats().events


# -- other senders, and a journal ------------------------------------------------------------------


async def test_sessions_wait_for_their_own_handlers_too() -> None:
    async with MessageBus() as bus, bus.session("job") as session:

        @bus.on(OrderPlaced)
        async def of_bus(event: OrderPlaced) -> None: ...

        @session.on(OrderPlaced)
        async def of_session(event: OrderPlaced) -> None: ...

        inside = await session.publish(OrderPlaced(), wait=True)
        outside = await bus.publish(OrderPlaced(), wait=True)

    assert set(outcomes(inside)) == {"of_bus", "of_session"}
    assert set(outcomes(outside)) == {"of_bus"}


async def test_with_a_journal_it_waits_for_the_handlers_in_memory(tmp_path: Path) -> None:
    bus = MessageBus(journal=f"sqlite:///{tmp_path / 'shop.db'}")
    durable = SlowHandler()
    bus.subscribe(OrderPlaced, durable, name="durable")

    @bus.on(OrderPlaced, durable=False)
    async def here(event: OrderPlaced) -> None: ...

    event = OrderPlaced()
    async with bus:
        receipt = await bus.publish(event, wait=True)
        again = await bus.publish(event, wait=True)
        with pytest.raises(BusStateError, match=r"inside bus\.transaction"):
            async with bus.transaction():
                await bus.publish(OrderPlaced(), wait=True)
        durable.release.set()
        await bus.settled()

    assert receipt.status is PublishStatus.DURABLE
    assert receipt.handlers == 2
    assert outcomes(receipt) == {"here": OutcomeStatus.DONE}
    assert again.duplicate
    assert again.outcomes == ()
    assert durable.ended == [0]
