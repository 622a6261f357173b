"""`bus.request`: a command whose answer may come from another process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast, final

from typing_extensions import override

from msgbus.bus.context import current_frame
from msgbus.bus.protocols import SendingMethods
from msgbus.errors import MissingHandlerError, NoReplierError
from msgbus.messages.message import Command, R, require_command
from msgbus.routing.endpoints.correlation import CorrelationManager, RequestTransport
from msgbus.runtime.arguments import check_seconds

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusCore


@final
class LocalTransport:
    """Requests that are answered by handlers of the same bus."""

    def __init__(self, bus: SendingMethods) -> None:
        self._bus = bus

    async def send(
        self,
        command: Command[Any],
        correlation_id: str,
        correlations: CorrelationManager,
        *,
        timeout: float,
        headers: Mapping[str, str] | None,
    ) -> None:
        """Have the command handled, and answer with its value or its exception."""
        try:
            result = await self._bus.execute(command, timeout=timeout, headers=headers)
        except MissingHandlerError as error:
            raise NoReplierError(f"Nobody answers {type(command).__name__}. {error}") from error
        if result.exception is None:
            correlations.reply(correlation_id, result.value)
        else:
            correlations.fail(correlation_id, result.exception)


class RequestSide(SendingMethods):
    """`request`, as part of `MessageBus`."""

    _core: BusCore
    _correlations: CorrelationManager | None = None
    _transport: RequestTransport | None = None

    @property
    def correlations(self) -> CorrelationManager:
        """The open requests of this bus."""
        if self._correlations is None:
            self._correlations = CorrelationManager(clock=self._core.clock)
        return self._correlations

    @property
    def has_transport(self) -> bool:
        """Whether requests go another way than to the bus's own handlers."""
        return self._transport is not None and not isinstance(self._transport, LocalTransport)

    def use_transport(self, transport: RequestTransport | None) -> None:
        """Send requests this way from now on; `None` for the bus's own handlers."""
        self._transport = transport

    @override
    async def request(
        self,
        command: Command[R],
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> R:
        require_command(command)
        outer = current_frame.get()
        self._core.require_open("request anything on", outer)
        correlations = self.correlations
        check_seconds("timeout", timeout)
        seconds = correlations.timeout if timeout is None else timeout
        if outer is not None and outer.deadline is not None:
            seconds = min(seconds, outer.deadline - self._core.clock.now())
        transport = self._transport
        if transport is None:
            self._transport = transport = LocalTransport(self)

        async def send(request_id: str) -> None:
            await transport.send(
                command, request_id, correlations, timeout=seconds, headers=headers
            )

        name = type(command).__name__
        return cast("R", await correlations.request(send, timeout=seconds, what=name))
