"""The circuits of one bus: who has which, and telling of their changes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, final

from msgbus.errors import ConfigurationError
from msgbus.lifecycle import CircuitClosedEvent, CircuitHalfOpenedEvent, CircuitOpenedEvent
from msgbus.resilience.breaker import CircuitBreaker, CircuitChange, CircuitState
from msgbus.resilience.policies import CircuitBreakerConfig
from msgbus.telemetry.logging import log

if TYPE_CHECKING:
    from msgbus.core import BusCore
    from msgbus.registrations import Registration
    from msgbus.resilience.policy import Breaker


@final
class Circuits:
    """The circuits of the bus's own handlers, and those that were named."""

    def __init__(self, core: BusCore, default: Breaker | None) -> None:
        self._core = core
        self._default = default if isinstance(default, CircuitBreakerConfig) else None
        self.by_name: dict[str, CircuitBreaker] = {}
        self._of_handlers: set[str] = set()

    def named(self, name: str, config: CircuitBreakerConfig | None = None) -> CircuitBreaker:
        """The circuit of this name, made if there is none.

        Raises:
            ConfigurationError: There is one already, with another config.
        """
        circuit = self.by_name.get(name)
        if circuit is None:
            circuit = self.by_name[name] = self._make(name, config)
        elif config is not None and config != circuit.config:
            message = f"There is a circuit {name!r} already, with another config."
            raise ConfigurationError(message)
        return circuit

    def of(self, registration: Registration, breaker: Breaker, *, is_own: bool) -> CircuitBreaker:
        """The circuit that a handler is to use.

        Args:
            registration: The handler.
            breaker: What its policy says.
            is_own: Whether it belongs to a session: then a circuit that is not shared goes
                with the session, and is listed nowhere.
        """
        if isinstance(breaker, CircuitBreaker):
            if breaker.on_change is None:
                breaker.on_change = self._changed
            return self.by_name.setdefault(breaker.name, breaker)
        if isinstance(breaker, str):
            return self.named(breaker)
        name = registration.name
        if is_own:
            return self._make(name, breaker)
        if name in self.by_name:
            name = f"{name}[{registration.message_type.__name__}]"
        self._of_handlers.add(name)
        circuit = self.by_name[name] = self._make(name, breaker)
        return circuit

    def forget_handlers(self) -> None:
        """Forget the circuits that were made for one handler each: policies have changed."""
        for name in self._of_handlers:
            del self.by_name[name]
        self._of_handlers.clear()

    def _make(self, name: str, config: CircuitBreakerConfig | None) -> CircuitBreaker:
        return CircuitBreaker(
            config or self._default, name=name, clock=self._core.clock, on_change=self._changed
        )

    def _changed(self, change: CircuitChange) -> None:
        bus, tell = self._core.config.name, self._core.lifecycle.tell
        if change.new is CircuitState.OPEN:
            log.warning(
                "circuit_opened",
                bus=bus,
                circuit=change.name,
                reason=change.reason,
                retry_after=change.retry_after,
            )
            opened = partial(
                CircuitOpenedEvent,
                circuit=change.name,
                reason=change.reason,
                retry_after=change.retry_after,
            )
            tell(CircuitOpenedEvent, None, opened)
        elif change.new is CircuitState.HALF_OPEN:
            tell(CircuitHalfOpenedEvent, None, partial(CircuitHalfOpenedEvent, circuit=change.name))
        else:
            log.info("circuit_closed", bus=bus, circuit=change.name)
            closed = partial(CircuitClosedEvent, circuit=change.name, reason=change.reason)
            tell(CircuitClosedEvent, None, closed)
