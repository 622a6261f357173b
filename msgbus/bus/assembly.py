"""The call chain around each handler, and hooks for failures.

`ResilientMessageBus` replaces this part of a bus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusState
    from msgbus.bus.lanes.lane import Lane
    from msgbus.bus.session import SessionState
    from msgbus.handlers.injection import Call
    from msgbus.handlers.registration import Registration
    from msgbus.messages.message import Event
    from msgbus.messages.results import CommandResult, FailedResult
    from msgbus.resilience.config import RetryConfig


class Assembly:
    """Call chains of a plain bus: middleware and timeouts, no policy."""

    def __init__(self, state: BusState) -> None:
        self._state = state

    def assemble(
        self, registration: Registration, call: Call, session: SessionState | None
    ) -> Call:
        """Wrap a bound handler in its middleware and its timeout.

        The order, outermost first: middleware per message, the handler's timeout, middleware
        per attempt, the handler.
        """
        state = self._state
        call = state.limit_time(registration, state.wrap(registration, call, "attempt"))
        call = state.observed(registration, call, session, "attempt")
        return state.wrap(registration, call, "message")

    def is_retried(self, registration: Registration) -> bool:  # noqa: ARG002 (for subclasses, as below)
        """Whether the call chain of a handler retries."""
        return False

    def describe(self, registration: Registration) -> str | None:  # noqa: ARG002
        """Describe the policy around a handler, outermost first, if there is one."""
        return None

    def durable_retry(self, registration: Registration) -> RetryConfig:  # noqa: ARG002
        """Get the retries of a durable handler without `retry=`, or of an enqueued command."""
        from msgbus.resilience.config import DURABLE_RETRY

        return DURABLE_RETRY

    def writes_names(self) -> bool:
        """Whether wire names leave this process, and so must be unique.

        A journal refuses two classes of one name by itself, at registration.
        """
        return self._state.requests.has_transport

    def command_failed(self, frame: CommandResult[Any], result: FailedResult[Any]) -> None:
        """Handle the final failure of a command."""

    def command_unobserved(self, result: FailedResult[Any]) -> None:
        """Handle a failed result that was never looked at. Called in any thread."""

    def event_failed(self, lane: Lane, event: Event, error: BaseException) -> None:
        """Handle the final failure of a handler on `event`, which is logged already."""
