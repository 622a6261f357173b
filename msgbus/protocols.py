"""What a bus is to those who only use one."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from msgbus.messages import Command, Event, R

if TYPE_CHECKING:
    from datetime import datetime

    from msgbus.receipts import DrainReport, PublishReceipt, PublishSummary
    from msgbus.results import CommandResult
    from msgbus.telemetry.stats import BusStats


@runtime_checkable
class IMessageBus(Protocol):
    """The calls that application code makes. `MessageBus` satisfies it."""

    async def start(self) -> None:
        """Begin to deliver."""
        ...

    async def stop(self, timeout: float | None = 30.0) -> DrainReport:
        """Finish what is queued and stop."""
        ...

    async def execute(
        self,
        command: Command[R],
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> CommandResult[R]:
        """Have a command handled, and give its result."""
        ...

    async def call(self, command: Command[R], *, timeout: float | None = None) -> R:
        """Have a command handled, and give its value or raise."""
        ...

    async def publish(
        self,
        event: Event,
        *,
        headers: Mapping[str, str] | None = None,
        topic: str | None = None,
        delay: float | None = None,
        at: datetime | None = None,
    ) -> PublishReceipt:
        """Hand an event to its handlers."""
        ...

    async def publish_many(
        self, events: Iterable[Event] | AsyncIterable[Event], *, chunk: int = 1000
    ) -> PublishSummary:
        """Hand many events to their handlers."""
        ...

    def register_command_handler(self, command_type: Any, handler: Any) -> None:
        """Make `handler` the one handler of a command."""
        ...

    def register_event_handler(self, event_type: Any, handler: Any) -> Any:
        """Have `handler` called for every such event."""
        ...

    async def settled(self, timeout: float | None = None) -> None:
        """Wait until nothing is left to do."""
        ...

    def stats(self) -> BusStats:
        """All counters at this moment."""
        ...
