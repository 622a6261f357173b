"""IdempotencyMiddleware: what batch handlers get of lists with duplicates."""

from __future__ import annotations

from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from msgbus import (
    Event,
    MessageBus,
)
from msgbus.middleware import IdempotencyMiddleware


class Paid(Event):
    order: str = "o-1"


def by_order(message: Any) -> str | None:
    order: str = message.order
    return order or None


async def let_all_run() -> None:
    for _ in range(10):
        await checkpoint()


async def test_a_list_is_thinned_to_what_is_new() -> None:
    bus = MessageBus(middleware=[IdempotencyMiddleware(key=by_order)])
    lists: list[list[str]] = []

    @bus.on(Paid, batch=True)
    async def record(events: list[Paid]) -> None:
        lists.append([event.order for event in events])

    for order in ("a", "b", "a", "", ""):
        await bus.publish(Paid(order=order))
    async with bus:
        await bus.settled()
        for order in ("b", "c", ""):
            await bus.publish(Paid(order=order))
        await bus.settled()

    assert lists[0] == ["a", "b", "", ""]
    assert [order for events in lists[1:] for order in events] == ["c", ""]


async def test_a_batch_handler_is_not_called_for_duplicates_alone() -> None:
    bus = MessageBus(middleware=[IdempotencyMiddleware()])
    lists: list[list[Paid]] = []
    bus.register_event_handler(Paid, lists.append, batch=True, inline=True)
    event = Paid()

    async with bus:
        for _ in range(3):
            await bus.publish(event)
            await bus.settled()

    assert lists == [[event]]


async def test_a_failed_list_is_retried_but_for_what_succeeded() -> None:
    bus = MessageBus(middleware=[IdempotencyMiddleware(key=by_order)])
    lists: list[list[str]] = []

    @bus.on(Paid, batch=True)
    async def fail_on_bad(events: list[Paid]) -> None:
        lists.append([event.order for event in events])
        if "bad" in lists[-1]:
            raise ValueError("bad order")

    for order in ("a", "bad"):
        await bus.publish(Paid(order=order))
    async with bus:
        await bus.settled()
        await bus.publish(Paid(order="a"))
        await bus.settled()

    assert lists == [["a", "bad"], ["a", "bad"], ["a"], ["bad"]]


async def lists_side_by_side(
    second: str, *, first_fails: bool = False, max_size: int = 100
) -> list[list[str]]:
    """What a handler gets of the list [a, b] and of one that comes while that is at work."""
    middleware = IdempotencyMiddleware(key=by_order, max_size=max_size)
    lists: list[list[str]] = []
    go_on = anyio.Event()

    async def record(events: list[Paid]) -> None:
        lists.append([event.order for event in events])
        if len(lists) == 1:
            await go_on.wait()
            if first_fails:
                raise ConnectionError

    async def hand_over(orders: str) -> None:
        try:
            await middleware([Paid(order=order) for order in orders], record)
        except ConnectionError:
            lists.append(["failed"])

    async with anyio.create_task_group() as group:
        group.start_soon(hand_over, "ab")
        await let_all_run()
        group.start_soon(hand_over, second)
        await let_all_run()
        go_on.set()
    return lists


async def test_a_list_waits_for_what_another_list_has_in_hand() -> None:
    assert await lists_side_by_side("bc") == [["a", "b"], ["c"]]


async def test_a_list_takes_over_what_another_list_failed_on() -> None:
    lists = await lists_side_by_side("bc", first_fails=True)

    assert sorted(lists) == [["a", "b"], ["b"], ["c"], ["failed"]]


async def test_what_another_list_has_done_is_done_even_if_it_is_forgotten_at_once() -> None:
    assert await lists_side_by_side("ac", max_size=1) == [["a", "b"], ["c"]]
