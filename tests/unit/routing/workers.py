"""Workers behind endpoints, for the tests of delivery and health."""

from __future__ import annotations

from typing import Any

import anyio

from msgbus.routing import Endpoint, EndpointRegistry, EventEnvelope, HealthMonitor
from msgbus.routing.endpoints.delivery import EndpointPool


class Worker:
    """Notes what it gets; can be killed, hung, and brought back."""

    def __init__(self, name: str, **options: Any) -> None:
        self.got: list[Any] = []
        self.error: Exception | None = None
        self.is_hanging = False
        self.is_well: Any = True
        self.checks = 0
        self.release = anyio.Event()
        self.endpoint = Endpoint(name, self.send, check=self.check, **options)

    async def send(self, envelope: EventEnvelope[Any]) -> str:
        if self.is_hanging:
            await self.release.wait()
        if self.error is not None:
            raise self.error
        self.got.append(envelope.payload)
        return f"{self.endpoint.endpoint_id} did {envelope.payload}"

    async def check(self) -> Any:
        self.checks += 1
        if isinstance(self.is_well, Exception):
            raise self.is_well
        if self.is_well is None:
            await anyio.sleep_forever()
        return self.is_well


class Crew:
    """Three workers behind the name `crew`."""

    def __init__(
        self,
        *,
        weights: tuple[int, ...] = (1, 1, 1),
        monitor: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.events: list[Any] = []
        self.endpoints = EndpointRegistry()
        self.workers = [
            Worker(f"w{number}", group="crew", weight=weight)
            for number, weight in enumerate(weights)
        ]
        for worker in self.workers:
            self.endpoints.register(worker.endpoint)
        self.monitor = HealthMonitor(
            self.endpoints,
            on_event=self.events.append,
            clock=options.get("clock"),
            chance=lambda: 0.0,
            **(monitor or {}),
        )
        self.pool = EndpointPool(self.endpoints, monitor=self.monitor, **options)

    async def send(self, *payloads: Any) -> list[Any]:
        return [await self.pool.deliver("crew", EventEnvelope(one)) for one in payloads]

    @property
    def counts(self) -> list[int]:
        return [len(worker.got) for worker in self.workers]
