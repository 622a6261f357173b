"""`bus.request`: a command whose reply is matched by its id, and that always ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast, final

from typing_extensions import override

from msgbus.bus.protocols import SendingMethods
from msgbus.errors import MissingHandlerError, NoReplierError
from msgbus.messages.frame import current_frame
from msgbus.messages.message import Command, R, require_command
from msgbus.routing.endpoints.correlation import CorrelationManager, RequestTransport
from msgbus.runtime.arguments import check_seconds

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusState


@final
class LocalTransport:
    """Transport of requests to handlers of the same bus."""

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
        """Execute the command, and reply with its value or its exception."""
        try:
            result = await self._bus.execute(command, timeout=timeout, headers=headers)
        except MissingHandlerError as error:
            raise NoReplierError(f"Nobody answers {type(command).__name__}. {error}") from error
        if result.exception is None:
            correlations.reply(correlation_id, result.value)
        else:
            correlations.fail(correlation_id, result.exception)


@final
class Requests:
    """The open requests of a bus, and their transport."""

    def __init__(self, bus: SendingMethods, state: BusState) -> None:
        self._clock = state.clock
        self._correlations: CorrelationManager | None = None
        self.transport: RequestTransport = LocalTransport(bus)

    @property
    def correlations(self) -> CorrelationManager:
        """The open requests; made at first use."""
        if self._correlations is None:
            self._correlations = CorrelationManager(clock=self._clock)
        return self._correlations

    @property
    def has_transport(self) -> bool:
        """Whether requests go elsewhere than to the bus's own handlers."""
        return not isinstance(self.transport, LocalTransport)


class RequestMethods(SendingMethods):
    """`request`, as part of `MessageBus`."""

    _state: BusState

    @property
    def correlations(self) -> CorrelationManager:
        """The open requests of this bus."""
        return self._state.requests.correlations

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
        self._state.require_open("request anything on", outer)
        correlations = self.correlations
        check_seconds("timeout", timeout)
        seconds = correlations.timeout if timeout is None else timeout
        if outer is not None and outer.deadline is not None:
            seconds = min(seconds, outer.deadline - self._state.clock.now())
        transport = self._state.requests.transport

        async def send(request_id: str) -> None:
            await transport.send(
                command, request_id, correlations, timeout=seconds, headers=headers
            )

        name = type(command).__name__
        return cast("R", await correlations.request(send, timeout=seconds, what=name))
