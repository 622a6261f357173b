"""The circuits of one bus: who has which, and telling of their changes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, final
from weakref import WeakMethod, WeakValueDictionary

from msgbus.errors import ConfigurationError
from msgbus.lifecycle import CircuitClosedEvent, CircuitHalfOpenedEvent, CircuitOpenedEvent
from msgbus.resilience.breaker import CircuitBreaker
from msgbus.resilience.policies import CircuitBreakerConfig
from msgbus.resilience.states import CircuitChange, CircuitState
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
        self._shared: dict[str, CircuitBreaker] = {}
        self._own: WeakValueDictionary[str, CircuitBreaker] = WeakValueDictionary()
        """Those of one handler each, which go with it."""

    @property
    def by_name(self) -> dict[str, CircuitBreaker]:
        """All of them, but for those of sessions."""
        return {**dict(self._own), **self._shared}

    def named(self, name: str, config: CircuitBreakerConfig | None = None) -> CircuitBreaker:
        """The circuit of this name, made if there is none.

        Raises:
            ConfigurationError: There is one already, with another config.
        """
        circuit = self.by_name.get(name)
        if circuit is None:
            circuit = self._shared[name] = self._make(name, config)
        elif config is not None and config != circuit.config:
            message = f"There is a circuit {name!r} already, with another config."
            raise ConfigurationError(message)
        return circuit

    def adopt(self, circuit: CircuitBreaker) -> None:
        """Take in a circuit that was made elsewhere, and tell of its changes too.

        Raises:
            ConfigurationError: There is another one of its name.
        """
        known = self._shared.get(circuit.name)
        if known is circuit:
            return
        if known is not None:
            message = (
                f"There is another circuit {circuit.name!r} on this bus already; "
                f"give one of them another name=."
            )
            raise ConfigurationError(message)
        self._shared[circuit.name] = circuit
        theirs, ours = circuit.on_change, WeakMethod(self._changed)

        def tell_both(change: CircuitChange) -> None:
            tell = ours()
            if tell is not None:
                tell(change)
            if theirs is not None:
                theirs(change)

        circuit.on_change = tell_both

    def of(self, registration: Registration, breaker: Breaker, *, is_own: bool) -> CircuitBreaker:
        """The circuit that a handler is to use.

        Args:
            registration: The handler.
            breaker: What its policy says.
            is_own: Whether it belongs to a session: then a circuit that is not shared goes
                with the session, and is listed nowhere.
        """
        if isinstance(breaker, CircuitBreaker):
            return breaker  # adopted when the policy was set
        if isinstance(breaker, str):
            return self.named(breaker)
        name = registration.name
        if is_own:
            return self._make(name, breaker)
        if name in self._shared or name in self._own:
            name = f"{name}[{registration.message_type.__name__}]"
        circuit = self._own[name] = self._make(name, breaker)
        return circuit

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
