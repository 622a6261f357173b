"""ADAPTIVE_RATE_LIMIT: publishers are slowed as a queue fills, and let go as it empties."""

from __future__ import annotations

from itertools import pairwise

import anyio
import pytest

from msgbus import BackpressureStrategy, BusClosedError, BusConfig, MessageBus
from msgbus.runtime.clock import VirtualClock
from tests.fakes import OrderPlaced, SlowHandler, conserves, let_others_run, queue

ADAPTIVE = BackpressureStrategy.ADAPTIVE_RATE_LIMIT
MAX_SIZE = 500


class Publisher:
    """Publishes one event after the other, and notes the virtual time of each admission."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.bus = MessageBus(
            BusConfig(queue=queue(MAX_SIZE, ADAPTIVE), drain_timeout=0), clock=self.clock
        )
        self.slow = SlowHandler()
        self.bus.subscribe(OrderPlaced, self.slow, name="slow")
        self.times: list[float] = []

    async def publish(self, count: int) -> None:
        self.times = [self.clock.now()]
        for _ in range(count):
            receipt = await self.bus.publish(OrderPlaced(number=len(self.times)))
            assert receipt.accepted
            self.times.append(self.clock.now())

    async def publish_while_time_passes(self, count: int) -> list[float]:
        """How long each publish took."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.publish, count)
            await let_others_run()
            while len(self.times) <= count:
                await self.clock.advance(0.1)
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def is_slowed(self) -> bool:
        return self.bus.stats().handlers["slow"].backpressure


async def test_a_queue_with_plenty_of_room_slows_nobody() -> None:
    publisher = Publisher()

    async with publisher.bus:
        delays = await publisher.publish_while_time_passes(MAX_SIZE // 2)
        assert set(delays) == {0.0}
        assert not publisher.is_slowed
        publisher.slow.release.set()
        await publisher.bus.settled()


async def test_publishers_are_slowed_more_and_more_as_the_queue_fills() -> None:
    publisher = Publisher()

    async with publisher.bus:
        delays = await publisher.publish_while_time_passes(MAX_SIZE)
        slowed = [delay for delay in delays if delay > 0]
        was_slowed = publisher.is_slowed
        publisher.slow.release.set()
        await publisher.bus.settled()

    # From four fifths of the queue on; and it is still not full, so nobody had to wait.
    assert len(slowed) == pytest.approx(MAX_SIZE / 5, abs=2)
    assert was_slowed
    assert all(later >= earlier - 1e-6 for earlier, later in pairwise(slowed))
    assert slowed[-1] > 50 * slowed[0]
    stats = publisher.bus.stats()
    assert stats.events["OrderPlaced"].admitted == stats.handlers["slow"].handled == MAX_SIZE
    assert stats.handlers["slow"].dropped == stats.events["OrderPlaced"].rejected == 0
    conserves(publisher.bus)


async def test_publishers_are_let_go_again_as_the_queue_empties() -> None:
    publisher = Publisher()

    async with publisher.bus:
        await publisher.publish_while_time_passes(MAX_SIZE)
        publisher.slow.release.set()
        await publisher.bus.settled()
        delays = await publisher.publish_while_time_passes(MAX_SIZE)
        await publisher.bus.settled()

    assert delays[0] > 0
    assert delays[-1] == 0
    assert not publisher.is_slowed
    assert publisher.slow.ended == [*range(1, MAX_SIZE + 1)] * 2
    conserves(publisher.bus)


async def test_a_full_adaptive_queue_waits_for_room_and_drops_nothing() -> None:
    publisher = Publisher()

    async with publisher.bus, anyio.create_task_group() as tasks:
        await publisher.publish_while_time_passes(MAX_SIZE + 1)
        tasks.start_soon(publisher.publish, 1)
        await publisher.clock.advance(3600)
        assert len(publisher.times) == 1
        publisher.slow.release.set()
        await let_others_run()
        await publisher.bus.settled()

    assert len(publisher.slow.ended) == MAX_SIZE + 2
    conserves(publisher.bus)


async def test_a_slowed_publish_that_is_cancelled_has_published_nothing() -> None:
    publisher = Publisher()

    async with publisher.bus:
        await publisher.publish_while_time_passes(MAX_SIZE)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher.bus.publish, OrderPlaced())
            await let_others_run()
            tasks.cancel_scope.cancel()
        publisher.slow.release.set()
        await publisher.bus.settled()

    events = publisher.bus.stats().events["OrderPlaced"]
    assert (events.admitted, events.rejected) == (MAX_SIZE, 1)
    assert len(publisher.slow.ended) == MAX_SIZE
    conserves(publisher.bus)


async def test_a_publish_that_is_being_slowed_when_the_bus_stops_is_refused() -> None:
    publisher = Publisher()
    refused: list[BusClosedError] = []

    async def publish() -> None:
        try:
            await publisher.bus.publish(OrderPlaced())
        except BusClosedError as error:
            refused.append(error)

    await publisher.bus.start()
    await publisher.publish_while_time_passes(MAX_SIZE)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publish)
        await let_others_run()
        publisher.slow.release.set()
        await publisher.bus.stop()
        await publisher.clock.advance(60)

    stats = publisher.bus.stats()
    assert stats.total("queued") == 0
    assert len(refused) == stats.events["OrderPlaced"].rejected == 1
    conserves(publisher.bus)
