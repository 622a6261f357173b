"""ConcurrencyLimitMiddleware: the slots that lists for batch handlers take."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
from anyio.lowlevel import checkpoint

from msgbus import Event, MessageBus
from msgbus.middleware import ConcurrencyLimitMiddleware


class Done(Event):
    tenant: str = "a"


async def let_all_run() -> None:
    for _ in range(20):
        await checkpoint()


async def test_a_list_takes_one_slot() -> None:
    bus = MessageBus(middleware=[ConcurrencyLimitMiddleware(1)])
    sizes: list[int] = []

    @bus.on(Done, batch=True)
    async def record(events: list[Done]) -> None:
        sizes.append(len(events))

    for _ in range(3):
        await bus.publish(Done())
    async with bus:
        await bus.settled()

    assert sizes == [3]


@dataclass(frozen=True)
class Clashing:
    """A key whose order in a set is the order in which it came."""

    name: str

    def __hash__(self) -> int:
        return 0


class Counter:
    """Hands lists to a limit of one per tenant; a list works until it is let go."""

    def __init__(self) -> None:
        self._middleware = ConcurrencyLimitMiddleware(
            1, key=lambda message: Clashing(message.tenant)
        )
        self._go_on: dict[str, anyio.Event] = {}
        self.began: list[str] = []
        self.done: list[str] = []

    def let_go(self, tenants: str) -> None:
        self._go_on.setdefault(tenants, anyio.Event()).set()

    async def hand_over(self, tenants: str) -> None:
        await self._middleware([Done(tenant=tenant) for tenant in tenants], self._work)

    async def _work(self, events: list[Done]) -> None:
        tenants = "".join(event.tenant for event in events)
        self.began.append(tenants)
        await self._go_on.setdefault(tenants, anyio.Event()).wait()
        self.done.append(tenants)


async def test_a_list_takes_a_slot_of_each_of_its_keys() -> None:
    counter = Counter()

    async with anyio.create_task_group() as group:
        for tenants in ("aab", "bc", "d"):
            group.start_soon(counter.hand_over, tenants)
            await let_all_run()
        assert counter.began == ["aab", "d"]
        for tenants in ("aab", "bc", "d"):
            counter.let_go(tenants)

    assert sorted(counter.done) == ["aab", "bc", "d"]


async def test_lists_with_the_same_keys_in_another_order_do_not_wait_for_each_other() -> None:
    counter = Counter()
    counter.let_go("ab")
    counter.let_go("ba")

    async with anyio.create_task_group() as group:
        for tenants in ("a", "b", "ab", "ba"):
            group.start_soon(counter.hand_over, tenants)
            await let_all_run()
        for tenants in ("a", "b"):
            counter.let_go(tenants)
            await let_all_run()

    assert sorted(counter.done) == ["a", "ab", "b", "ba"]
