"""The circuit breakers of one bus.

A circuit belongs to a function, not to a registration: a service that is down is down for
every session whose handler calls it. Functions are identified by where they are defined, so
that closures made anew for each session, and instances of one class, share one circuit;
handlers that were given different names have one each.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast, final
from weakref import WeakMethod, WeakValueDictionary

from msgbus.errors import ConfigurationError
from msgbus.messages.system_events import (
    CircuitClosedEvent,
    CircuitHalfOpenedEvent,
    CircuitOpenedEvent,
)
from msgbus.resilience.breaker import CircuitBreaker, CircuitChange, CircuitState
from msgbus.resilience.config import CircuitBreakerConfig
from msgbus.telemetry.logging import log

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusState
    from msgbus.handlers.registration import Registration
    from msgbus.resilience.policy import Breaker

CIRCUITS_KEPT: Final = 1_000
"""Circuits with failures that are kept after the last session with the handler has ended."""


class FunctionKey(NamedTuple):
    """Identity of a handler's function, however often it is made and registered."""

    module: str
    qualname: str
    line: int
    """Distinguishes lambdas, and functions of one name."""
    name: str
    """The name it was registered with, if one was given."""


@final
class Circuits:
    """The circuits of one bus, by function or by name."""

    def __init__(self, core: BusState, default: Breaker | None) -> None:
        self._core = core
        self._default = default if isinstance(default, CircuitBreakerConfig) else None
        self._shared: dict[str, CircuitBreaker] = {}
        self._own: WeakValueDictionary[str, CircuitBreaker] = WeakValueDictionary()
        """Circuits of functions, by name; dropped with the last handler, unless kept."""
        self._by_function: WeakValueDictionary[Hashable, CircuitBreaker] = WeakValueDictionary()
        """The same by function and config: policies may give one function several."""
        self._kept: dict[CircuitBreaker, None] = {}
        """Circuits with failures, the latest last, kept for the next session."""

    @property
    def by_name(self) -> dict[str, CircuitBreaker]:
        """All circuits: those in use, and those of ended sessions with failures."""
        self._forget_healthy()
        return {**dict(self._own), **self._shared}

    def named(self, name: str, config: CircuitBreakerConfig | None = None) -> CircuitBreaker:
        """Get or make the circuit of this name.

        Raises:
            ConfigurationError: It exists with another config.
        """
        circuit = self.by_name.get(name)
        if circuit is None:
            circuit = self._shared[name] = self._make(name, config)
        elif config is not None and config != circuit.config:
            message = f"There is a circuit {name!r} already, with another config."
            raise ConfigurationError(message)
        return circuit

    def adopt(self, circuit: CircuitBreaker) -> None:
        """Add a circuit that was made elsewhere, and publish its changes too.

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
        given, own = circuit.on_change, WeakMethod(self._changed)

        def call_both(change: CircuitChange) -> None:
            changed = own()
            if changed is not None:
                changed(change)
            if given is not None:
                given(change)

        circuit.on_change = call_both

    def of(self, registration: Registration, breaker: Breaker) -> CircuitBreaker:
        """Get or make the circuit of a handler, as its policy says."""
        if isinstance(breaker, CircuitBreaker):
            return breaker  # adopted when the policy was set
        if isinstance(breaker, str):
            return self.named(breaker)
        circuit = self.known(registration, breaker)
        if circuit is None:
            function = function_key(registration)
            name = self._free_name(registration, function)
            circuit = self._own[name] = self._make(name, breaker)
            self._by_function[function, _config_key(breaker)] = circuit
        return circuit

    def name_of(self, registration: Registration, breaker: Breaker | None) -> str | None:
        """The name of a handler's circuit, or the one it would get first."""
        if isinstance(breaker, CircuitBreakerConfig):
            known = self.known(registration, breaker)
            return registration.name if known is None else known.name
        return breaker.name if isinstance(breaker, CircuitBreaker) else breaker

    def known(
        self, registration: Registration, config: CircuitBreakerConfig
    ) -> CircuitBreaker | None:
        """The circuit of a handler's function, if there is one."""
        return self._by_function.get((function_key(registration), _config_key(config)))

    def forget_unused(self) -> None:
        """Drop circuits without a handler: the policies have changed."""
        self._kept.clear()

    def keep(self, circuit: CircuitBreaker) -> None:
        """Keep a circuit with failures when its session ends, for the next session."""
        self._kept.pop(circuit, None)
        self._kept[circuit] = None
        if len(self._kept) > CIRCUITS_KEPT:
            self._forget_healthy()
        if len(self._kept) > CIRCUITS_KEPT:
            del self._kept[next(iter(self._kept))]

    def _forget_healthy(self) -> None:
        """Drop kept circuits without failures."""
        for one in [one for one in self._kept if one.is_closed and not one.failures]:
            del self._kept[one]

    def _free_name(self, registration: Registration, function: FunctionKey) -> str:
        name, path = registration.name, f"{function.module}.{function.qualname}"
        choice = (name, f"{name}[{registration.message_type.__name__}]", path)
        names = chain(choice, (f"{path} ({number})" for number in count(2)))
        return next(one for one in names if one not in self._shared and one not in self._own)

    def _make(self, name: str, config: CircuitBreakerConfig | None) -> CircuitBreaker:
        return CircuitBreaker(
            config or self._default, name=name, clock=self._core.clock, on_change=self._changed
        )

    def _changed(self, change: CircuitChange) -> None:
        bus, tell = self._core.config.name, self._core.system_events.publish
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


def function_key(registration: Registration) -> FunctionKey:
    """Identify the function of a handler."""
    function: Any = registration.handler
    while isinstance(function, partial):
        function = cast("Any", function).func
    if not hasattr(function, "__qualname__"):
        function = cast("Any", type(function))  # an instance with `__call__`
    line = getattr(getattr(function, "__code__", None), "co_firstlineno", 0)
    name = registration.name if registration.named else ""
    return FunctionKey(function.__module__, function.__qualname__, line, name)


def _config_key(config: CircuitBreakerConfig) -> Hashable:
    try:
        hash(config)
    except TypeError:  # a function in `ignore` that cannot be hashed
        return id(config)
    return cast("Hashable", config)
