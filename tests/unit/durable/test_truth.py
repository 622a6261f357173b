"""`settled()`, `caught_up()` and `lag` tell the truth, whatever holds a handler up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from msgbus import BusConfig, Event, MessageBus
from msgbus.errors import CircuitOpenError, ConfigurationError, SettleTimeoutError
from msgbus.handlers.delivery import Delivery, Mode
from msgbus.resilience.config import RetryConfig
from msgbus.subscriptions import Poison, SubscriptionTuning
from tests.fakes import OrderEvent, Recorder, SlowHandler, let_others_run, logged
from tests.unit.durable.conftest import Site
from tests.unit.durable.places import OrderPlaced, OrderShipped, orders

MODES = list(Mode)
DELIVERIES = list(Delivery)

every_mode = pytest.mark.parametrize("mode", MODES)
every_delivery = pytest.mark.parametrize("delivery", DELIVERIES)


def lag(bus: MessageBus, name: str = "own") -> int:
    return bus.stats().subscriptions[name].lag


class Settling:
    """A task that waits until a bus is settled."""

    def __init__(self, bus: MessageBus, timeout: float | None = None) -> None:
        self.is_done = False
        self.busy: Sequence[str] = ()
        self._bus = bus
        self._timeout = timeout

    async def run(self) -> None:
        try:
            await self._bus.settled(self._timeout)
        except SettleTimeoutError as error:
            self.busy = error.busy
        self.is_done = True


# -- a rate limit ----------------------------------------------------------------------------


@every_mode
@every_delivery
async def test_settled_waits_for_what_a_rate_limit_holds_back(
    site: Site, mode: Mode, delivery: Delivery
) -> None:
    bus, handler = site.bus(), Recorder()
    bus.subscribe(OrderPlaced, handler, durable="own", mode=mode, delivery=delivery, rate_limit=0.1)
    async with bus, anyio.create_task_group() as tasks:
        await bus.publish_many(orders(5))
        settling = Settling(bus)
        tasks.start_soon(settling.run)
        for _ in range(20):
            await site.clock.advance(5)
            await let_others_run()
            left = 5 - len(handler.numbers)
            assert lag(bus) == left or (lag(bus) == left + 1 and not settling.is_done)
            assert not settling.is_done or not left
        with anyio.fail_after(10):
            while not settling.is_done:
                await anyio.sleep(0.01)
                await site.clock.advance(0.3)

    assert sorted(handler.numbers) == [0, 1, 2, 3, 4]


@every_mode
async def test_what_is_acknowledged_first_is_behind_until_it_is_handled(
    site: Site, mode: Mode
) -> None:
    bus, handler = site.bus(BusConfig(drain_timeout=0)), SlowHandler()
    bus.subscribe(OrderPlaced, handler, durable="own", mode=mode, delivery=Delivery.AT_MOST_ONCE)
    async with bus:
        await bus.publish_many(orders(5))
        await handler.started.wait()
        stats = bus.stats().subscriptions["own"]

        assert (stats.lag, stats.last_acked) == (5, 0)
        handler.release.set()
        await bus.settled()
        stats = bus.stats().subscriptions["own"]
        assert (stats.lag, stats.last_acked) == (0, 5)


# -- a pause ---------------------------------------------------------------------------------


async def paused_bus(bus: MessageBus, **options: Any) -> Recorder:
    handler = Recorder()
    subscription = bus.subscribe(OrderPlaced, handler, name="own", **options)
    if bus.journal is not None:
        await bus.start()
    subscription.pause()
    await bus.publish_many(orders(3))
    return handler


async def assert_told(bus: MessageBus) -> None:
    """Without a timeout at once, with one when it is over; the paused handler is named."""
    with anyio.fail_after(10), pytest.raises(SettleTimeoutError) as at_once:
        await bus.settled()
    with anyio.fail_after(10), pytest.raises(SettleTimeoutError) as later:
        await bus.settled(timeout=0.05)
    assert at_once.value.seconds is None
    assert str(at_once.value).startswith("Not settled, and nothing goes on by itself: own ")
    for raised in (at_once, later):
        (busy,) = raised.value.busy
        assert busy.startswith("own ")
        assert "paused" in busy
        assert "3" in busy


@every_mode
@every_delivery
async def test_a_bus_with_a_paused_handler_is_not_settled(
    site: Site, mode: Mode, delivery: Delivery
) -> None:
    bus = site.bus()
    handler = await paused_bus(bus, durable="own", mode=mode, delivery=delivery)
    async with bus:
        assert lag(bus) == 3
        await assert_told(bus)
    assert handler.numbers == []


async def test_without_a_journal_a_bus_with_a_paused_handler_is_not_settled() -> None:
    bus = MessageBus()
    handler = await paused_bus(bus)
    async with bus:
        await assert_told(bus)
    assert handler.numbers == []


async def test_a_pause_while_somebody_waits_is_told(memory: Site) -> None:
    for bus in (MessageBus(clock=memory.clock), memory.bus()):
        handler = SlowHandler()
        options: dict[str, Any] = {"durable": "own"} if bus.journal is not None else {}
        subscription = bus.subscribe(OrderPlaced, handler, name="own", **options)
        async with bus, anyio.create_task_group() as tasks:
            await bus.publish_many(orders(2))
            await handler.started.wait()
            settling = Settling(bus)
            tasks.start_soon(settling.run)
            await let_others_run()
            subscription.pause()
            handler.release.set()
            await memory.clock.advance(1)
            await let_others_run()

            assert settling.is_done
            assert "paused" in settling.busy[0]


@pytest.mark.parametrize("is_durable", [False, True])
async def test_with_a_timeout_settled_waits_for_the_resume(site: Site, is_durable: bool) -> None:
    bus = site.bus() if is_durable else MessageBus(clock=site.clock)
    handler = Recorder()
    options: dict[str, Any] = {"durable": "own"} if is_durable else {}
    subscription = bus.subscribe(OrderPlaced, handler, name="own", **options)
    settling = Settling(bus, timeout=30)
    async with bus, anyio.create_task_group() as tasks:
        subscription.pause()
        await bus.publish_many(orders(3))
        tasks.start_soon(settling.run)
        await let_others_run()
        subscription.resume()
        with anyio.fail_after(10):
            while not settling.is_done:
                await anyio.sleep(0.01)
                await site.clock.advance(0.3)

    assert handler.numbers == [0, 1, 2]
    assert settling.busy == ()


@pytest.mark.parametrize("is_durable", [False, True])
async def test_a_stop_does_not_wait_for_a_paused_handler(site: Site, is_durable: bool) -> None:
    bus = site.bus() if is_durable else MessageBus(clock=site.clock)
    other = SlowHandler()
    bus.subscribe(OrderPlaced, other, name="other", durable=False)
    await paused_bus(bus, **({"durable": "own"} if is_durable else {}))
    if not is_durable:
        await bus.start()
    other.release.set()
    with anyio.fail_after(5):
        report = await bus.stop(timeout=1000)

    assert other.ended == [0, 1, 2]
    assert (report.persisted, report.abandoned) == ((3, 0) if is_durable else (0, 3))


async def test_a_paused_handler_with_nothing_left_is_settled(site: Site) -> None:
    bus, handler = site.bus(), Recorder()
    subscription = bus.subscribe(OrderPlaced, handler, durable="own")
    async with bus:
        await bus.publish_many(orders(3))
        await bus.settled()
        subscription.pause()
        await bus.publish(OrderShipped(number=9))
        with anyio.fail_after(10):
            await bus.settled()
            assert await subscription.caught_up() == 4
        assert lag(bus) == 0


async def test_caught_up_of_a_paused_handler_says_so_at_once(site: Site) -> None:
    bus = site.bus()
    paused = bus.subscribe(OrderPlaced, Recorder(), name="own", durable="own")
    other = bus.subscribe(OrderPlaced, Recorder(), name="other", durable="other")
    async with bus:
        paused.pause()
        await bus.publish_many(orders(3))
        with anyio.fail_after(10):
            assert await other.caught_up() == 3
            with pytest.raises(SettleTimeoutError, match="paused"):
                await paused.caught_up()


@every_mode
async def test_a_blocked_handler_is_not_settled(memory: Site, mode: Mode) -> None:
    bus = memory.bus()
    retry = RetryConfig(max_retries=0)

    async def fail(event: OrderPlaced) -> None:
        raise ConnectionError(str(event.number))

    subscription = bus.subscribe(
        OrderPlaced, fail, durable="own", mode=mode, retry=retry, on_poison=Poison.BLOCK
    )
    async with bus:
        await bus.publish_many(orders(2))
        await let_others_run()
        with anyio.fail_after(10), pytest.raises(SettleTimeoutError, match="blocked by offset"):
            await bus.settled()
        with anyio.fail_after(10), pytest.raises(SettleTimeoutError, match="blocked by offset"):
            await subscription.caught_up()
        assert lag(bus) == 2


async def test_while_the_circuit_is_open_a_message_waits_in_the_journal(memory: Site) -> None:
    bus, tried = memory.bus(), list[float]()

    async def refused(event: OrderPlaced) -> None:
        tried.append(memory.clock.now())
        if len(tried) == 1:
            raise CircuitOpenError("mail", retry_after=40.0)
        del event

    bus.subscribe(OrderPlaced, refused, durable="own")
    async with bus:
        await bus.publish_many(orders(1))
        await bus.settled()
        stats = bus.stats().subscriptions["own"]
        assert (len(tried), stats.lag, stats.scheduled) == (1, 0, 1)
        await memory.clock.advance(40)
        await bus.settled()
        assert len(tried) == 2


# -- several processes -----------------------------------------------------------------------


async def test_a_standby_waits_for_the_process_that_has_the_messages(site: Site) -> None:
    first, second, handler = site.bus(), site.bus(), SlowHandler()
    for bus in (first, second):
        bus.subscribe(OrderPlaced, handler, name="own", durable="own")
    async with first, second, anyio.create_task_group() as tasks:
        await first.publish_many(orders(2))
        await handler.started.wait()
        settling = Settling(second)
        tasks.start_soon(settling.run)
        await site.clock.advance(1)
        await let_others_run()
        assert not settling.is_done
        assert second.stats().subscriptions["own"].standing == "standby"
        with anyio.fail_after(10), pytest.raises(SettleTimeoutError, match="delivers it"):
            await second.settled(timeout=0.05)
        handler.release.set()
        with anyio.fail_after(10):
            while not settling.is_done:
                await anyio.sleep(0.01)
                await site.clock.advance(0.3)

    assert handler.ended == [0, 1]


async def test_a_standby_counts_what_is_meant_for_it(memory: Site) -> None:
    first, second, handler = memory.bus(), memory.bus(), SlowHandler()
    for bus in (first, second):
        bus.subscribe(OrderPlaced, handler, name="own", durable="own")
    async with first, second:
        await first.publish_many(orders(2))
        await first.publish_many([OrderShipped(number=n) for n in range(50)])
        await memory.clock.advance(2)
        assert (lag(first), lag(second)) == (2, 2)
        handler.release.set()
        await first.settled()
        await memory.clock.advance(2)
        assert (lag(first), lag(second)) == (0, 0)


@every_mode
async def test_a_pause_here_does_not_hold_up_what_others_own(memory: Site, mode: Mode) -> None:
    if mode is Mode.EXCLUSIVE:
        return
    first, second, handler = memory.bus(), memory.bus(), Recorder()
    subscription = first.subscribe(OrderPlaced, handler, name="own", durable="own", mode=mode)
    second.subscribe(OrderPlaced, handler, name="own", durable="own", mode=mode)
    async with first, second:
        await memory.clock.advance(2)
        subscription.pause()
        await memory.clock.advance(1)
        with anyio.fail_after(10):
            await first.settled()


# -- messages of others ----------------------------------------------------------------------


class Noted(Event, name="truth.Noted", topic="truth.noted.*"):
    number: int


@every_mode
@pytest.mark.parametrize("target", ["class", "topic"])
async def test_lag_counts_only_messages_for_the_handler(
    site: Site, mode: Mode, target: str
) -> None:
    bus, handler = site.bus(), Recorder()
    wanted = OrderPlaced if target == "class" else "places.OrderPlaced"
    tuning = SubscriptionTuning(buffer=4)
    subscription = bus.subscribe(
        wanted, handler, name="own", durable="own", mode=mode, tuning=tuning
    )
    bus.subscribe(OrderShipped, Recorder(), durable="shipped")
    async with bus:
        subscription.pause()
        for number in range(10):
            await bus.publish_many(OrderShipped(number=n) for n in range(30))
            await bus.publish(OrderPlaced(number=number))
        await site.clock.advance(2)
        await let_others_run()
        with anyio.fail_after(10):
            while lag(bus) != 10:
                await anyio.sleep(0.01)
                await site.clock.advance(0.5)
        with pytest.raises(SettleTimeoutError, match="at most 10 left"):
            await bus.settled()

        subscription.resume()
        await bus.settled()
        assert lag(bus) == 0
        assert len(handler.numbers) == 10


async def test_lag_is_an_upper_bound_until_messages_of_others_are_counted(memory: Site) -> None:
    bus = memory.bus()
    subscription = bus.subscribe(OrderPlaced, SlowHandler(), durable="own")
    async with bus:
        subscription.pause()
        await bus.publish_many(orders(100))
        await bus.publish_many([OrderShipped(number=n) for n in range(30_000)])
        found = [lag(bus)]
        for _ in range(8):
            await memory.clock.advance(1.0)
            found.append(lag(bus))

    assert all(100 <= one <= 30_100 for one in found)
    assert found == sorted(found, reverse=True)
    assert found[-1] == 100


async def test_the_reads_that_count_do_not_grow_with_the_log(
    memory: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = memory.bus()
    subscription = bus.subscribe(OrderPlaced, SlowHandler(), durable="own")
    async with bus:
        subscription.pause()
        await bus.publish_many([OrderShipped(number=n) for n in range(60_000)])
        reads: list[int] = []
        journal: Any = bus.journal
        read = journal.read

        async def counted(after: int, *arguments: Any) -> Any:
            reads.append(after)
            return await read(after, *arguments)

        monkeypatch.setattr(journal, "read", counted)
        await memory.clock.advance(0.25)
        assert len(reads) <= 12
        await memory.clock.advance(30)
        reads.clear()
        for _ in range(100):
            bus.stats()
        await memory.clock.advance(10)
        assert reads == []


# -- the end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [4, 1_000_000_000])
async def test_caught_up_refuses_an_offset_beyond_the_head(site: Site, offset: int) -> None:
    bus = site.bus()
    subscription = bus.subscribe(OrderPlaced, Recorder(), durable="own")
    async with bus:
        await bus.publish_many(orders(3))
        assert await subscription.caught_up(3) == 3
        with anyio.fail_after(10), pytest.raises(ConfigurationError, match="beyond the head"):
            await subscription.caught_up(offset)


async def test_delayed_events_are_not_behind_until_they_are_due(site: Site) -> None:
    bus, handler = site.bus(), Recorder()
    bus.subscribe(OrderPlaced, handler, durable="own")
    async with bus:
        await bus.publish(OrderPlaced(number=1), delay=60)
        await bus.settled()
        assert (lag(bus), handler.numbers) == (0, [])
        await site.clock.advance(60)
        await bus.settled()
        assert (lag(bus), handler.numbers) == (0, [1])


async def test_a_parked_key_and_its_letter_are_no_lag(memory: Site) -> None:
    bus = memory.bus()

    async def fail(event: OrderEvent) -> None:
        raise ConnectionError(str(event.number))

    bus.subscribe(OrderPlaced, fail, durable="own", retry=RetryConfig(max_retries=0), park_key=True)
    async with bus:
        await bus.publish_many(orders(3))
        await bus.settled()
        stats = bus.stats().subscriptions["own"]
        assert (stats.lag, stats.dead_lettered) == (0, 1)


@every_mode
async def test_a_stop_tells_what_stays_for_each_handler(
    site: Site, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    bus = site.bus()
    tuning = SubscriptionTuning(buffer=2)
    options: dict[str, Any] = {"mode": mode, "tuning": tuning}
    mail = bus.subscribe(OrderPlaced, Recorder(), name="mail", durable="mail", **options)
    bus.subscribe(OrderPlaced, Recorder(), name="print", durable="print", **options)
    done = Recorder()
    bus.subscribe(OrderShipped, done, name="done", durable="done", mode=mode)
    await bus.start()
    mail.pause()
    await bus.publish_many(OrderShipped(number=n) for n in range(70))
    await bus.publish_many(orders(7))
    await bus.publish(OrderPlaced(number=8), delay=3600)
    report = await bus.stop()

    assert report.persisted_by == {"mail": 7, "msgbus.delayed": 1}
    assert (report.persisted, report.abandoned, len(done.numbers)) == (8, 0, 70)
    (entry,) = logged(caplog, "messages_stay_in_journal")
    assert (entry["persisted"], entry["handlers"]) == (8, {"mail": 7, "msgbus.delayed": 1})


async def test_a_stop_with_nothing_left_says_nothing(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    bus = site.bus()
    bus.subscribe(OrderPlaced, Recorder(), durable="own")
    await bus.start()
    await bus.publish_many(orders(3))
    report = await bus.stop()

    assert (report.persisted, report.persisted_by) == (0, {})
    assert logged(caplog, "messages_stay_in_journal") == []
