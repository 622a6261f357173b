"""Sync event handlers: in worker threads, or inline."""

from __future__ import annotations

import threading

import anyio.to_thread

from msgbus import BusConfig, Context, MessageBus, QueueConfig, current_context
from msgbus.runtime.clock import VirtualClock
from tests.fakes import OrderPlaced, OrderShipped, Recorder, conserves


class ThreadedHandler:
    """A sync handler that counts how many of it run at once, and waits to be released."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = threading.Semaphore(0)
        self.release = threading.Event()
        self.running = 0
        self.most = 0

    def __call__(self, event: OrderPlaced) -> None:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self._began.release()
        self.release.wait(10)
        with self._lock:
            self.running -= 1

    async def began(self) -> None:
        """Return once one more has begun."""
        await anyio.to_thread.run_sync(self._began.acquire)


async def test_a_sync_handler_runs_in_another_thread() -> None:
    bus = MessageBus()
    threads: list[int] = []

    @bus.on(OrderPlaced)
    def note(event: OrderPlaced) -> None:
        threads.append(threading.get_ident())

    async with bus:
        await bus.publish(OrderPlaced())
        await bus.settled()

    assert len(threads) == 1
    assert threads != [threading.get_ident()]
    conserves(bus)


async def test_an_inline_sync_handler_runs_on_the_loops_own_thread() -> None:
    bus = MessageBus()
    threads: list[int] = []

    @bus.on(OrderPlaced, inline=True)
    def note(event: OrderPlaced) -> None:
        threads.append(threading.get_ident())

    async with bus:
        await bus.publish(OrderPlaced())
        await bus.settled()

    assert threads == [threading.get_ident()]
    conserves(bus)


async def test_sync_handlers_share_a_bounded_number_of_threads() -> None:
    bus = MessageBus(BusConfig(max_threads=2))
    handler = ThreadedHandler()
    for name in ("first", "second", "third", "fourth"):
        bus.subscribe(OrderPlaced, handler, name=name, concurrency=2)

    async with bus:
        for number in range(3):
            await bus.publish(OrderPlaced(number=number))
        await handler.began()
        await handler.began()
        assert handler.running == 2
        handler.release.set()
        await bus.settled()

    assert handler.most == 2
    assert bus.stats().total("handled") == 12
    conserves(bus)


async def test_a_thread_that_outlives_its_timeout_still_counts_against_the_bound() -> None:
    clock = VirtualClock()
    bus = MessageBus(BusConfig(max_threads=1), clock=clock)
    stuck = ThreadedHandler()
    bus.subscribe(OrderPlaced, stuck, timeout=1)

    async with bus:
        for number in range(3):
            await bus.publish(OrderPlaced(number=number))
        await stuck.began()
        for failed in (1, 2, 3):
            await clock.advance(1)
            assert bus.stats().handlers["ThreadedHandler"].failed == failed
            # A thread that was let through is seen to begin before this one comes back.
            for _ in range(5):
                await anyio.to_thread.run_sync(int)
        stuck.release.set()

    assert stuck.most == 1
    conserves(bus)


async def test_the_current_context_and_emit_work_in_a_thread() -> None:
    bus = MessageBus()
    shipped = Recorder()
    bus.subscribe(OrderShipped, shipped)
    seen: list[str] = []

    @bus.on(OrderPlaced)
    def ship(event: OrderPlaced) -> None:
        context = current_context()
        assert context is not None
        seen.append(context.handler)
        assert context.message is event
        context.emit(OrderShipped(number=event.number + 1))

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await bus.settled()

    assert seen == ["ship"]
    assert shipped.numbers == [2]
    conserves(bus)


async def test_what_a_failing_sync_handler_emitted_is_forgotten() -> None:
    bus = MessageBus()
    shipped = Recorder()
    bus.subscribe(OrderShipped, shipped)

    @bus.on(OrderPlaced)
    def ship(event: OrderPlaced, context: Context) -> None:
        context.emit(OrderShipped())
        raise ValueError

    async with bus:
        await bus.publish(OrderPlaced())
        await bus.settled()

    assert shipped.numbers == []
    conserves(bus)


async def test_a_sync_handler_may_publish_to_its_own_full_queue_through_the_portal() -> None:
    bus = MessageBus()

    async with bus:
        portal = bus.portal()

        @bus.on(OrderPlaced, queue=QueueConfig(max_size=1))
        def again(event: OrderPlaced) -> None:
            if event.number == 0:
                for number in (2, 3):
                    portal.publish(OrderPlaced(number=number))

        await bus.publish(OrderPlaced(number=0))
        await bus.publish(OrderPlaced(number=1))
        await bus.settled()

    stats = bus.stats().handlers["again"]
    assert (stats.handled, stats.failed) == (4, 0)
    assert stats.overflowed > 0
    conserves(bus)


async def test_stop_counts_a_thread_that_still_runs_as_abandoned() -> None:
    bus = MessageBus()
    handler = ThreadedHandler()
    bus.subscribe(OrderPlaced, handler)
    await bus.start()
    await bus.publish(OrderPlaced())
    await handler.began()

    report = await bus.stop(timeout=0)

    handler.release.set()
    assert report.abandoned == 1
    assert bus.stats().handlers["ThreadedHandler"].abandoned == 1
    conserves(bus)
