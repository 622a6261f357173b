"""The bus for other threads: the same calls, blocking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

from msgbus.messages import Command, Event, R

if TYPE_CHECKING:
    from msgbus.bus import MessageBus
    from msgbus.receipts import PublishReceipt
    from msgbus.results import CommandResult
    from msgbus.runtime import Runtime


@final
class BusPortal:
    """Made by `bus.portal()`; may be used from any number of threads at once.

    Each call runs on the bus's event loop and blocks its thread until it is done.
    """

    def __init__(self, bus: MessageBus, runtime: Runtime) -> None:
        self._bus = bus
        self._runtime = runtime

    def execute(
        self,
        command: Command[R],
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> CommandResult[R]:
        """Execute a command and wait for its result."""
        return self._runtime.run_from_thread(
            lambda: self._bus.execute(command, timeout=timeout, headers=headers)
        )

    def call(self, command: Command[R], *, timeout: float | None = None) -> R:
        """Execute a command and give its value, or raise the handler's own exception."""
        return self._runtime.run_from_thread(lambda: self._bus.call(command, timeout=timeout))

    def publish(
        self, event: Event, *, headers: Mapping[str, str] | None = None, topic: str | None = None
    ) -> PublishReceipt:
        """Publish an event; waits for room as `bus.publish` does."""
        return self._runtime.run_from_thread(
            lambda: self._bus.publish(event, headers=headers, topic=topic)
        )
