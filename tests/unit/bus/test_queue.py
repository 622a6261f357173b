"""The parts of a queue by themselves: room, gates, and publishers in line."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from msgbus import BackpressureStrategy, QueueConfig, QueueFullError
from msgbus.bus.lanes.queue import (
    BoundedEventQueue,
    Gate,
    Waiter,
    admit,
    check_overflow,
    gate_by_priority,
    must_wait,
    refusing,
)
from msgbus.runtime.clock import VirtualClock
from tests.fakes import OrderPlaced, let_others_run

WAIT = BackpressureStrategy.WAIT
REJECT_NEW = BackpressureStrategy.REJECT_NEW
DROP_OLDEST = BackpressureStrategy.DROP_OLDEST
ADAPTIVE = BackpressureStrategy.ADAPTIVE_RATE_LIMIT


class CountingWaker:
    """A sleeping worker that counts how often it is woken."""

    def __init__(self) -> None:
        self.woken = 0

    async def wait(self) -> None: ...

    def wake(self) -> None:
        self.woken += 1


def make_queue(
    max_size: int = 2,
    strategy: BackpressureStrategy = WAIT,
    *,
    filled: int = 0,
    max_overflow: int = 100,
    name: str = "handler",
) -> BoundedEventQueue:
    config = QueueConfig(max_size=max_size, strategy=strategy, max_overflow=max_overflow)
    queue = BoundedEventQueue(name, config, VirtualClock())
    for number in range(filled):
        queue.push(OrderPlaced(number=number))
    return queue


# -- room ------------------------------------------------------------------------------------


def test_a_queue_has_room_up_to_its_size() -> None:
    queue = make_queue(2)

    assert queue.has_room
    queue.push(OrderPlaced())
    assert queue.has_room
    queue.push(OrderPlaced())
    assert not queue.has_room


@pytest.mark.parametrize(
    ("strategy", "blocks"),
    [(WAIT, True), (ADAPTIVE, True), (REJECT_NEW, False), (DROP_OLDEST, False)],
)
def test_only_waiting_strategies_block_when_full(
    strategy: BackpressureStrategy, blocks: bool
) -> None:
    assert not make_queue(2, strategy, filled=1).must_block
    assert make_queue(2, strategy, filled=2).must_block is blocks


def test_a_new_item_wakes_one_sleeper_before_it_asks_for_a_worker() -> None:
    queue = make_queue()
    first, second = CountingWaker(), CountingWaker()
    queue.sleepers += [first, second]
    asked: list[str] = []
    queue.on_work = lambda: asked.append("worker")

    for _ in range(3):
        queue.push(OrderPlaced())

    assert (first.woken, second.woken) == (1, 1)
    assert asked == ["worker"]
    assert queue.sleepers == []


def test_an_item_may_be_pushed_while_nobody_works() -> None:
    queue = make_queue()

    queue.push(OrderPlaced(number=1))

    assert list(queue.items) == [OrderPlaced(number=1)]


def test_the_oldest_item_falls_out_and_is_counted() -> None:
    queue = make_queue(3, DROP_OLDEST, filled=3)

    undelivered = queue.drop_oldest()

    assert (undelivered.event, undelivered.handler) == (OrderPlaced(number=0), "handler")
    assert [item.number for item in queue.items] == [1, 2]
    assert queue.counts.dropped == 1


def test_what_falls_out_opens_its_gate() -> None:
    queue = make_queue(1, DROP_OLDEST)
    high, low = gate_by_priority(OrderPlaced(), [1, 0])
    queue.push(high)

    undelivered = queue.drop_oldest()

    assert undelivered.event == OrderPlaced()
    assert low.gate is not None
    assert low.gate.remaining == 0


# -- admission -------------------------------------------------------------------------------


def test_the_first_full_refusing_queue_refuses() -> None:
    waiting = make_queue(1, WAIT, filled=1)
    roomy = make_queue(2, REJECT_NEW, filled=1)
    full = make_queue(1, REJECT_NEW, filled=1)

    assert refusing([waiting, roomy]) is None
    assert refusing([waiting, roomy, full]) is full


def test_an_event_must_wait_for_a_full_queue_or_behind_others() -> None:
    full, roomy = make_queue(1, filled=1), make_queue(1)

    assert must_wait([roomy]) is False
    assert must_wait([roomy, full])
    Waiter([roomy, full])
    assert must_wait([roomy])


def test_a_full_queue_overflows_or_drops_on_admission() -> None:
    waiting, dropping = make_queue(1, filled=1), make_queue(1, DROP_OLDEST, filled=1)
    event = OrderPlaced(number=9)

    dropped = admit([waiting, dropping], [event, event])

    assert [item.number for item in waiting.items] == [0, 9]
    assert waiting.counts.overflowed == 1
    assert [item.number for item in dropping.items] == [9]
    assert [one.event for one in dropped] == [OrderPlaced(number=0)]
    assert dropping.counts.overflowed == 0


def test_the_overflow_has_a_bound() -> None:
    queue = make_queue(2, max_overflow=3, filled=4)

    check_overflow([queue])
    queue.push(OrderPlaced())

    with pytest.raises(QueueFullError) as caught:
        check_overflow([make_queue(), queue])
    assert (caught.value.handler, caught.value.max_size) == ("handler", 2)


def test_a_queue_that_drops_never_overflows() -> None:
    check_overflow([make_queue(1, DROP_OLDEST, max_overflow=0, filled=1)])


# -- gates -----------------------------------------------------------------------------------


async def test_a_gate_opens_for_all_once_everybody_is_done() -> None:
    gate = Gate(2)
    passed: list[str] = []

    async def walk(name: str) -> None:
        await gate.wait()
        passed.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(walk, "a")
        tasks.start_soon(walk, "b")
        await let_others_run()
        gate.count_down()
        await let_others_run()
        assert passed == []
        gate.count_down()

    assert sorted(passed) == ["a", "b"]


async def test_an_open_gate_lets_everybody_through() -> None:
    gate = Gate(1)
    gate.count_down()

    await gate.wait()

    assert gate.remaining == 0


@pytest.mark.parametrize(
    ("priorities", "remaining"),
    [
        ([0], [None]),
        ([5, 5], [None, None]),
        ([1, 0], [None, 1]),
        ([2, 2, 1, 0, 0], [None, None, 2, 3, 3]),
    ],
)
def test_a_gate_counts_every_handler_of_higher_priority(
    priorities: Sequence[int], remaining: list[int | None]
) -> None:
    items = gate_by_priority(OrderPlaced(), priorities)

    assert [item.gate and item.gate.remaining for item in items] == remaining


def test_each_handler_opens_all_gates_below_it_by_one() -> None:
    top, middle, bottom = gate_by_priority(OrderPlaced(), [2, 1, 0])
    assert middle.gate is not None
    assert bottom.gate is not None

    top.done()
    assert (middle.gate.remaining, bottom.gate.remaining) == (0, 1)
    bottom.done()
    assert (middle.gate.remaining, bottom.gate.remaining) == (0, 1)
    middle.done()
    assert bottom.gate.remaining == 0


# -- publishers in line ----------------------------------------------------------------------


class Line:
    """Publishers that wait by name, and note when they have gone."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.waiters: dict[str, Waiter] = {}

    async def join(self, name: str, queues: Sequence[BoundedEventQueue]) -> None:
        waiter = self.waiters[name] = Waiter(queues)
        try:
            await waiter.wait()
            for queue in queues:
                queue.push(OrderPlaced())
            self.gone.append(name)
        finally:
            waiter.leave()


def take(queue: BoundedEventQueue) -> None:
    """What a worker does when it takes an item."""
    queue.items.popleft()
    queue.made_room()


async def test_waiters_go_one_by_one_in_order_of_arrival() -> None:
    queue, line = make_queue(1, filled=1), Line()

    async with anyio.create_task_group() as tasks:
        for name in "abc":
            tasks.start_soon(line.join, name, [queue])
            await let_others_run()
        assert queue.is_backpressured
        for gone in (["a"], ["a", "b"], ["a", "b", "c"]):
            take(queue)
            await let_others_run()
            assert line.gone == gone

    assert not queue.is_backpressured


async def test_a_waiter_needs_room_in_all_its_queues_at_once() -> None:
    left, right, line = make_queue(1, filled=1), make_queue(1, filled=1), Line()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(line.join, "both", [left, right])
        await let_others_run()
        take(left)
        await let_others_run()
        assert line.gone == []
        take(right)
        await let_others_run()

    assert line.gone == ["both"]
    assert (len(left.items), len(right.items)) == (1, 1)


async def test_waiters_for_overlapping_queues_never_wait_for_each_other() -> None:
    first, second, third = (make_queue(1, filled=1) for _ in range(3))
    line = Line()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(line.join, "12", [first, second])
        await let_others_run()
        tasks.start_soon(line.join, "23", [second, third])
        await let_others_run()
        tasks.start_soon(line.join, "31", [third, first])
        await let_others_run()
        for _ in range(3):
            for queue in (third, second, first):
                if queue.items:
                    take(queue)
                await let_others_run()

    assert line.gone == ["12", "23", "31"]


async def test_a_waiter_that_is_cancelled_steps_out_of_every_line() -> None:
    left, right, line = make_queue(1, filled=1), make_queue(1), Line()

    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as cancelled:
                cancelled.start_soon(line.join, "first", [left, right])
                await let_others_run()
                tasks.start_soon(line.join, "second", [right])
                await let_others_run()
                assert line.gone == []
                scope.cancel()
        await let_others_run()

    assert line.gone == ["second"]
    assert not left.waiting
    assert not right.waiting


async def test_a_waiter_whose_queue_goes_away_is_sent_out_of_every_line() -> None:
    left, right, line = make_queue(1, filled=1), make_queue(1), Line()
    first = Waiter([left, right])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.wait)
        tasks.start_soon(line.join, "second", [right])
        await let_others_run()
        assert line.gone == []
        first.cancel()

    assert not left.waiting
    assert line.gone == ["second"]
