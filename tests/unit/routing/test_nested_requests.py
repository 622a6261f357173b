"""Requests inside requests: no deadlock on the limit of deliveries."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from msgbus import Command, MessageBus
from msgbus.routing import Endpoint, EventEnvelope, MessageKind, MessageRouter
from msgbus.runtime.clock import VirtualClock
from tests.fakes import let_others_run


def shop(max_deliveries: int, **options: Any) -> MessageRouter:
    """Billing asks stock, stock asks the shelf, and all share one limit."""
    router = MessageRouter(max_deliveries=max_deliveries, **options)

    async def bill(envelope: EventEnvelope[Any]) -> str:
        return f"billed {await router.request('shop.stock', envelope.payload)}"

    async def reserve(envelope: EventEnvelope[Any]) -> str:
        return f"reserved {await router.request('shop.shelf', envelope.payload)}"

    async def look(envelope: EventEnvelope[Any]) -> Any:
        await anyio.lowlevel.checkpoint()
        return envelope.payload

    for name, send in {"billing": bill, "stock": reserve, "shelf": look}.items():
        router.endpoints.register(Endpoint(name, send))
        router.routes.register_route(f"shop.{name}", name)
    return router


async def test_one_place_is_enough_for_a_request_in_a_request() -> None:
    """Point 11."""
    clock = VirtualClock()
    router = shop(1, clock=clock)
    answers: list[Any] = []

    async def ask() -> None:
        answers.append(await router.request("shop.billing", 7))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await clock.advance(0)

    assert answers == ["billed reserved 7"]


@pytest.mark.parametrize("places", [1, 3, 10])
async def test_as_many_nested_requests_as_there_are_places_all_end(places: int) -> None:
    """Point 11: each held a place and waited for another, until all had run out of time."""
    router = shop(places)
    answers: list[str] = []

    async def ask(number: int) -> None:
        answers.append(await router.request("shop.billing", number, timeout=5))

    async with anyio.create_task_group() as tasks:
        for number in range(3 * places):
            tasks.start_soon(ask, number)

    assert sorted(answers) == sorted(f"billed reserved {number}" for number in range(3 * places))


async def test_a_nested_notification_in_tasks_of_its_own_needs_no_place_either() -> None:
    """Point 11."""
    router = MessageRouter(max_deliveries=1)
    got: list[str] = []

    async def tell(envelope: EventEnvelope[Any]) -> None:
        message = EventEnvelope("sold", topic="news", kind=MessageKind.NOTIFICATION)
        await router.route_message(message)

    def hear(name: str) -> Endpoint:
        async def listen(envelope: EventEnvelope[Any]) -> None:
            got.append(name)

        return Endpoint(name, listen)

    router.endpoints.register(Endpoint("teller", tell))
    router.routes.register_route("sell", "teller")
    for name in ("a", "b"):
        router.endpoints.register(hear(name))
        router.routes.register_route("news", name)

    await router.request("sell", 1, timeout=5)

    assert sorted(got) == ["a", "b"]


class Count(Command[int]):
    shelf: str


async def test_a_request_by_way_of_a_bus_is_nested_too() -> None:
    """Point 11."""
    router = MessageRouter(max_deliveries=1)
    async with MessageBus() as bus:

        @bus.handles(Count)
        async def count(command: Count) -> int:
            return int(await router.request("shop.shelf", command.shelf, timeout=5))

        async def ask_the_bus(envelope: EventEnvelope[Any]) -> int:
            return await bus.request(Count(shelf=envelope.payload))

        async def look(envelope: EventEnvelope[Any]) -> int:
            return len(envelope.payload)

        router.endpoints.register(Endpoint("bus", ask_the_bus))
        router.endpoints.register(Endpoint("shelf", look))
        router.routes.register_route("shop.count", "bus")
        router.routes.register_route("shop.shelf", "shelf")

        assert await router.request("shop.count", "abc", timeout=5) == 3


async def test_the_limit_holds_for_requests_from_outside() -> None:
    """Point 11: only what a delivery itself delivers is let through."""
    router = MessageRouter(max_deliveries=2)
    at_work: list[int] = []
    release = anyio.Event()

    async def work(envelope: EventEnvelope[Any]) -> None:
        at_work.append(envelope.payload)
        await release.wait()

    router.endpoints.register(Endpoint("worker", work))
    router.routes.register_route("work", "worker")

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(router.request, "work", number)
        await let_others_run()
        assert len(at_work) == 2
        release.set()

    assert len(at_work) == 5
