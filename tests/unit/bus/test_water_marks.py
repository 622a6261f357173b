"""Point g: a queue says when it has filled up to a mark, and when it has emptied again."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from pydantic import ValidationError

from msgbus import BackpressureStrategy, BusConfig, MessageBus, QueueConfig, QueueLevel
from msgbus.runtime.clock import VirtualClock
from tests.fakes import OrderPlaced, SlowHandler, conserves, let_others_run, logged


class Marks:
    """Notes each crossing, as `high 4` and `low 1`."""

    def __init__(self) -> None:
        self.crossed: list[str] = []
        self.handlers: set[str] = set()

    def config(self, high: int = 4, low: int | None = 1, **options: Any) -> QueueConfig:
        return QueueConfig(
            high_water=high,
            low_water=low,
            on_high=lambda level: self.note("high", level),
            on_low=lambda level: self.note("low", level),
            **options,
        )

    def note(self, mark: str, level: QueueLevel) -> None:
        self.crossed.append(f"{mark} {level.queued}")
        self.handlers.add(level.handler)


class Stepper:
    """A handler that ends one event each time it is told to."""

    def __init__(self) -> None:
        self.turns = anyio.Semaphore(0)

    async def __call__(self, event: OrderPlaced) -> None:
        await self.turns.acquire()

    async def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.turns.release()
        await let_others_run()


async def publish(bus: MessageBus, count: int) -> None:
    for number in range(count):
        await bus.publish(OrderPlaced(number=number))
    await let_others_run()


async def test_each_mark_is_told_once_for_each_crossing() -> None:
    """Point g."""
    marks, handler = Marks(), Stepper()
    bus = MessageBus(BusConfig(queue=marks.config()))
    bus.subscribe(OrderPlaced, handler, name="slow")

    async with bus:
        await publish(bus, 1)  # in hand, none queued
        await publish(bus, 3)
        assert marks.crossed == []
        await publish(bus, 1)
        assert marks.crossed == ["high 4"]
        await publish(bus, 5)
        assert marks.crossed == ["high 4"]
        await handler.step(7)
        assert marks.crossed == ["high 4"]  # two are left
        await handler.step()
        assert marks.crossed == ["high 4", "low 1"]
        await publish(bus, 2)
        await handler.step()
        assert marks.crossed == ["high 4", "low 1"]
        await publish(bus, 2)
        assert marks.crossed == ["high 4", "low 1", "high 4"]
        await handler.step(20)
        await bus.settled()

    assert marks.crossed == ["high 4", "low 1", "high 4", "low 1"]
    assert marks.handlers == {"slow"}
    conserves(bus)


async def test_without_a_low_mark_it_is_half_of_the_high_one() -> None:
    """Point g."""
    marks, handler = Marks(), Stepper()
    bus = MessageBus()
    bus.subscribe(OrderPlaced, handler, queue=marks.config(6, None))

    async with bus:
        await publish(bus, 7)
        await handler.step(3)
        assert marks.crossed == ["high 6", "low 3"]
        await handler.step(10)


@pytest.mark.parametrize("strategy", list(BackpressureStrategy))
async def test_marks_work_with_every_strategy_up_to_a_full_queue(
    strategy: BackpressureStrategy,
) -> None:
    """Point g."""
    marks, slow, clock = Marks(), SlowHandler(), VirtualClock()
    bus = MessageBus(clock=clock)
    bus.subscribe(OrderPlaced, slow, queue=marks.config(4, 0, max_size=4, strategy=strategy))

    async with bus:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish, bus, 8)
            await clock.advance(1)
            assert marks.crossed == ["high 4"]
            slow.release.set()
            await clock.advance(1)
        await bus.settled()

    assert marks.crossed == ["high 4", "low 0"]
    conserves(bus)


async def test_batch_handlers_and_publish_many_cross_marks_too() -> None:
    """Point g."""
    marks = Marks()
    lists: list[int] = []
    bus = MessageBus()

    @bus.on(OrderPlaced, batch=True, queue=marks.config(50, 10, batch_size=20))
    async def handle(events: list[OrderPlaced]) -> None:
        lists.append(len(events))

    async with bus:
        await bus.publish_many(OrderPlaced(number=number) for number in range(100))
        await bus.settled()

    assert lists == [20] * 5
    assert marks.crossed == ["high 50", "low 0"]


async def test_events_published_before_the_start_cross_marks_too() -> None:
    """Point g."""
    marks = Marks()
    bus = MessageBus(BusConfig(queue=marks.config(3, 0)))
    bus.subscribe(OrderPlaced, lambda event: None, inline=True)
    await publish(bus, 5)
    assert marks.crossed == ["high 3"]

    async with bus:
        await bus.settled()

    assert marks.crossed == ["high 3", "low 0"]


async def test_handlers_of_several_priorities_have_marks_of_their_own() -> None:
    """Point g."""
    first, second, handler = Marks(), Marks(), Stepper()
    bus = MessageBus()
    bus.subscribe(OrderPlaced, handler, name="a", priority=1, queue=first.config())
    bus.subscribe(OrderPlaced, lambda event: None, name="b", inline=True, queue=second.config())

    async with bus:
        await publish(bus, 6)
        await handler.step(6)
        await bus.settled()

    assert first.crossed == ["high 4", "low 1"]
    assert second.crossed == ["high 4", "low 1"]


async def test_a_queue_that_is_given_up_is_low() -> None:
    """Point g: whoever stopped at the high mark goes on."""
    marks, slow = Marks(), SlowHandler()
    bus = MessageBus(BusConfig(session_timeout=0))

    async with bus, bus.session() as session:
        session.subscribe(OrderPlaced, slow, queue=marks.config())
        for number in range(6):
            await session.publish(OrderPlaced(number=number))
        assert marks.crossed == ["high 4"]

    assert marks.crossed == ["high 4", "low 0"]


async def test_a_callback_that_fails_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Point g."""

    def broken(level: QueueLevel) -> None:
        message = f"password=hunter2 {level.queued}"
        raise ValueError(message)

    handled: list[int] = []
    bus = MessageBus(BusConfig(queue=QueueConfig(high_water=2, on_high=broken, on_low=broken)))

    @bus.on(OrderPlaced)
    async def handle(event: OrderPlaced) -> None:
        handled.append(event.number)

    async with bus:
        for number in range(5):
            await bus.publish(OrderPlaced(number=number))
        await bus.settled()

    assert handled == list(range(5))
    rows = logged(caplog, "queue_callback_failed")
    assert [row["handler"] for row in rows] == ["handle"] * 2
    assert "hunter2" not in str(rows)


async def hear_later(level: QueueLevel) -> None:
    pass


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"high_water": 0, "on_high": print}, "high_water"),
        ({"high_water": 20_000, "on_high": print}, "max_size"),
        ({"high_water": 5, "low_water": 5, "on_high": print}, "low_water"),
        ({"low_water": 5}, "high_water"),
        ({"on_low": print}, "high_water"),
        ({"high_water": 5}, "on_high"),
        ({"high_water": 5, "on_high": hear_later}, "not an async one"),
    ],
)
def test_marks_that_make_no_sense_are_refused(options: dict[str, Any], reason: str) -> None:
    """Point g."""
    with pytest.raises(ValidationError, match=reason):
        QueueConfig(**options)
