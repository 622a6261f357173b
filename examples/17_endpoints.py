"""Endpoints: three workers behind one name, and failover when one is lost."""

import asyncio
from collections import Counter
from typing import Any

from msgbus.routing import (
    Endpoint,
    EndpointRegistry,
    EventEnvelope,
    HealthMonitor,
    MessageKind,
    MessageRouter,
)

dead: set[str] = set()


def worker(name: str) -> Endpoint:
    async def work(envelope: EventEnvelope[Any]) -> str:
        if name in dead:
            raise ConnectionError(envelope.topic)
        return name

    return Endpoint(name, work, group="printers")


def show(event: object) -> None:
    print("event:", type(event).__name__)


async def main() -> None:
    endpoints = EndpointRegistry()
    router = MessageRouter(endpoints=endpoints, monitor=HealthMonitor(endpoints, on_event=show))
    for name in ("ann", "bob", "cid"):
        endpoints.register(worker(name))
    router.routes.register_route("office.print.*", "printers")

    pages = [await router.request("office.print.page", number) for number in range(30)]
    print(Counter(pages))

    dead.add("bob")
    pages = [await router.request("office.print.page", number) for number in range(30)]
    print(Counter(pages))
    print("bob:", router.monitor.report()["bob"].reason)

    note = EventEnvelope("paper!", topic="office.print.note", kind=MessageKind.NOTIFICATION)
    report = await router.route_message(note)
    print("notified:", report.delivered)


asyncio.run(main())
# Output:
# > Counter({'ann': 10, 'bob': 10, 'cid': 10})
# > event: EndpointUnhealthyEvent
# > Counter({'ann': 15, 'cid': 15})
# > bob: its circuit is open
# > notified: 1
