"""ResilientMessageBus: a message bus that only assembles more around each handler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypedDict, cast
from weakref import WeakKeyDictionary, WeakMethod, WeakValueDictionary

from typing_extensions import Unpack

from msgbus.bus import MessageBus
from msgbus.config import BusConfig
from msgbus.core import Phase
from msgbus.errors import BusStateError, ConfigurationError, Refusal
from msgbus.lifecycle import (
    CircuitClosedEvent,
    CircuitHalfOpenedEvent,
    CircuitOpenedEvent,
    RetryScheduledEvent,
)
from msgbus.messages import Message, first_message, metadata_of
from msgbus.middleware.concurrency import ConcurrencyLimitMiddleware
from msgbus.middleware.rate_limit import RateLimitMiddleware
from msgbus.resilience.breaker import CircuitBreaker, CircuitChange, CircuitState
from msgbus.resilience.guard import Guard, marking
from msgbus.resilience.policies import CircuitBreakerConfig, RateLimit, RetryAttempt, RetryConfig
from msgbus.resilience.policy import Breaker, Policy, PolicyBook, PolicyOptions, Target, describe
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.stats import BusStats
from msgbus.timeouts import with_timeout

if TYPE_CHECKING:
    from msgbus.clock import Clock
    from msgbus.filters import FilterLike
    from msgbus.injection import Call, Resolver
    from msgbus.middleware.chain import Middleware
    from msgbus.registrations import Registration
    from msgbus.registry import HandlerRegistry, IRegistry
    from msgbus.session import BusSession


DEFAULT_RETRY: Final = RetryConfig()
DEFAULT_BREAKER: Final = CircuitBreakerConfig()


class BusOptions(TypedDict, total=False):
    """What a resilient bus takes as every bus does."""

    registry: IRegistry | None
    registries: Sequence[HandlerRegistry]
    middleware: Sequence[Middleware]
    filters: Sequence[FilterLike]
    provide: Mapping[Any, object] | None
    resolver: Resolver | None
    journal: str | object | None
    clock: Clock | None


class ResilientMessageBus(MessageBus):
    """A `MessageBus` whose handlers are retried, guarded and, in the end, not forgotten.

    One stated order around each handler, outermost first: middleware per message, fallback,
    retry, breaker, bulkhead, rate limit, timeout, middleware per attempt, the handler.

    An open circuit fails commands at once, with `CircuitOpenError`; a lane waits for it, so
    that an outage does not burn its backlog. A `Refusal` passes through untouched: nothing
    broke. Everything else is as on a plain bus.

    Args:
        config: Sizes and times.
        retry: Whether and when to try again; `None` for never.
        breaker: When to stop calling a handler for a while; each handler has its own
            circuit unless a `CircuitBreaker` or a name is given to share. `None` for never.
        timeout: Seconds that one try may take.
        bulkhead: How many calls of one handler may run at once.
        rate_limit: How many calls of one handler may begin per second.
        fallback: What to answer when all else failed: a value, or a function of message
            and error.
        options: As for `MessageBus`.
    """

    def __init__(
        self,
        config: BusConfig | None = None,
        *,
        retry: RetryConfig | None = DEFAULT_RETRY,
        breaker: Breaker | None = DEFAULT_BREAKER,
        timeout: float | None = None,
        bulkhead: int | None = None,
        rate_limit: RateLimit | float | None = None,
        fallback: Any = None,
        **options: Unpack[BusOptions],
    ) -> None:
        default = Policy(
            retry=retry,
            breaker=breaker,
            timeout=timeout,
            bulkhead=bulkhead,
            rate_limit=rate_limit,
            fallback=fallback,
        )
        self._policies = PolicyBook(default)
        self._circuits: dict[str, CircuitBreaker] = {}
        """Those that are shared."""
        self._own_circuits: WeakValueDictionary[str, CircuitBreaker] = WeakValueDictionary()
        """Those of one handler each, which go with it."""
        if isinstance(breaker, CircuitBreaker):
            self._adopt(breaker)
        self._guards: WeakKeyDictionary[Registration, Guard] = WeakKeyDictionary()
        super().__init__(config, **options)

    # -- policies ----------------------------------------------------------------------------

    def policy(self, target: Target, **changes: Unpack[PolicyOptions]) -> None:
        """Say what is different for a message class and its subclasses, or for one handler.

        Parts that are not named stay as they are; `None` leaves a part out. What is said of a
        handler comes before what is said of its message class, and that before the default.

        Raises:
            ConfigurationError: There is no such part, or its value is impossible.
            BusStateError: The bus has started; what is around a handler is built once.
        """
        if self._core.phase is not Phase.NEW:
            message = "Policies must be set before the bus is started."
            raise BusStateError(message)
        breaker = changes.get("breaker")
        if isinstance(breaker, CircuitBreaker):
            self._adopt(breaker)
        self._policies.change(target, cast("Mapping[str, Any]", changes))
        self._guards.clear()
        for session in self._core.sessions.values():
            session.attachments.clear()
        for lane in self._core.lanes.values():
            lane.is_retried = self.is_retried(lane.registration)
        self._core.refresh()

    def describe(self, message_type: type[Message]) -> str:
        """What stands around each handler of `message_type`, in words, outermost first."""
        registry = self._core.registry
        handlers = list(registry.event_handlers(message_type, None))
        command = registry.command_handler(message_type, None)
        if command is not None:
            handlers.append(command)
        if not handlers:
            return f"{message_type.__name__} has no handler on this bus."
        texts: list[str] = []
        for registration in handlers:
            guard = self._guard(registration, None)
            circuit = None if guard.breaker is None else guard.breaker.name
            policy = guard.policy
            if registration.timeout is not None:
                policy = replace(policy, timeout=registration.timeout)
            lines = "\n".join(f"  {line}" for line in describe(policy, circuit))
            texts.append(f"{message_type.__name__} in {registration.name}:\n{lines}")
        return "\n".join(texts)

    # -- circuits ----------------------------------------------------------------------------

    @property
    def circuits(self) -> Mapping[str, CircuitBreaker]:
        """The circuits of the bus's handlers, and those that were named, by name."""
        return MappingProxyType({**dict(self._own_circuits), **self._circuits})

    def circuit(self, name: str, config: CircuitBreakerConfig | None = None) -> CircuitBreaker:
        """The circuit of this name, made if there is none: to share, to watch or to open.

        A handler's own circuit has the handler's name.

        Raises:
            ConfigurationError: There is one already, with another config.
        """
        circuit = self._circuits.get(name) or self._handlers_own(name)
        if circuit is None:
            circuit = self._circuits[name] = self._make_circuit(name, config)
        elif config is not None and config != circuit.config:
            message = f"There is a circuit {name!r} already, with another config."
            raise ConfigurationError(message)
        return circuit

    def _make_circuit(self, name: str, config: CircuitBreakerConfig | None) -> CircuitBreaker:
        default = self._policies.default.breaker
        if config is None and isinstance(default, CircuitBreakerConfig):
            config = default
        return CircuitBreaker(
            config, name=name, clock=self._core.clock, on_change=self._circuit_changed
        )

    def _handlers_own(self, name: str) -> CircuitBreaker | None:
        for session_id, registration in self._core.registry.registrations():
            if session_id is None and registration.name == name:
                breaker = self._policies.of(registration).breaker
                if isinstance(breaker, CircuitBreakerConfig):
                    self._guard(registration, None)  # made now, if it was not called yet
        return self._own_circuits.get(name)

    def _adopt(self, circuit: CircuitBreaker) -> None:
        """Take in a circuit that was made elsewhere, and tell of its changes too."""
        known = self._circuits.get(circuit.name)
        if known is circuit:
            return
        if known is not None:
            message = (
                f"There is another circuit {circuit.name!r} on this bus already; "
                f"give one of them another name=."
            )
            raise ConfigurationError(message)
        self._circuits[circuit.name] = circuit
        theirs, ours = circuit.on_change, WeakMethod(self._circuit_changed)

        def tell_both(change: CircuitChange) -> None:
            tell = ours()
            if tell is not None:
                tell(change)
            if theirs is not None:
                theirs(change)

        circuit.on_change = tell_both

    def _circuit_of(self, registration: Registration, breaker: Breaker) -> CircuitBreaker:
        """The circuit that a handler on the bus itself is to use."""
        if isinstance(breaker, CircuitBreaker):
            return breaker  # adopted when the policy was set
        if isinstance(breaker, str):
            return self.circuit(breaker)
        name = registration.name
        if name in self._circuits or name in self._own_circuits:
            name = f"{name}[{registration.message_type.__name__}]"
        circuit = self._own_circuits[name] = self._make_circuit(name, breaker)
        return circuit

    def _circuit_changed(self, change: CircuitChange) -> None:
        if change.new is CircuitState.OPEN:
            log.warning(
                "circuit_opened",
                bus=self.config.name,
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
            self._core.lifecycle.tell(CircuitOpenedEvent, None, opened)
        elif change.new is CircuitState.HALF_OPEN:
            half_opened = partial(CircuitHalfOpenedEvent, circuit=change.name)
            self._core.lifecycle.tell(CircuitHalfOpenedEvent, None, half_opened)
        else:
            log.info("circuit_closed", bus=self.config.name, circuit=change.name)
            closed = partial(CircuitClosedEvent, circuit=change.name, reason=change.reason)
            self._core.lifecycle.tell(CircuitClosedEvent, None, closed)

    # -- around each handler -------------------------------------------------------------------

    def assemble(
        self, registration: Registration, call: Call, session: BusSession | None = None
    ) -> Call:
        """Put a bound handler inside everything that belongs around it; see the class."""
        core = self._core
        guard = self._guard(registration, session)
        call = core.limit_time(registration, core.wrap(registration, call, "attempt"))
        if registration.timeout is None and guard.policy.timeout is not None:
            call = with_timeout(call, guard.policy.timeout, registration.name, core.clock)
        for limit in guard.limits:
            call = _inside(limit, call)
        if registration.batch:
            call = _on_a_copy(call)
        call = guard.around(call)
        if any(entry.per == "message" for entry in core.middleware):
            call = marking(call)
        return core.wrap(registration, call, "message")

    def is_retried(self, registration: Registration) -> bool:
        """Whether a failed list is tried again by its policy, and not by its worker."""
        return self._policies.of(registration).retry is not None

    def _guard(self, registration: Registration, session: BusSession | None) -> Guard:
        """The handler's guard, which stays while chains are built anew around it."""
        guards: Any = self._guards if session is None else session.attachments
        guard: Guard | None = guards.get(registration)
        if guard is None:
            guard = guards[registration] = self._make_guard(registration, session)
        return guard

    def _make_guard(self, registration: Registration, session: BusSession | None) -> Guard:
        policy = self._policies.of(registration)
        circuit: CircuitBreaker | None = None
        if policy.breaker is not None:
            if session is None or not isinstance(policy.breaker, CircuitBreakerConfig):
                circuit = self._circuit_of(registration, policy.breaker)
            else:  # a session's handler has a circuit that goes with the session
                circuit = self._make_circuit(registration.name, policy.breaker)
        limits: list[Middleware] = []
        if policy.rate_limit is not None:
            rate = policy.rate_limit
            rate = rate if isinstance(rate, RateLimit) else RateLimit(per_second=rate)
            limits.append(RateLimitMiddleware(rate.per_second, burst=rate.burst))
        if policy.bulkhead is not None:
            limits.append(ConcurrencyLimitMiddleware(policy.bulkhead))
        return Guard(
            registration.name,
            policy,
            circuit,
            self._core.clock,
            limits=limits,
            waits=not registration.is_command,
            on_retry=self._retry_scheduled,
        )

    def _retry_scheduled(self, retry: RetryAttempt) -> None:
        message = first_message(retry.message)
        text = redact_exception(retry.error)
        log.info(
            "retry_scheduled",
            bus=self.config.name,
            handler=retry.handler,
            message_type=type(message).__name__,
            message_id=metadata_of(message).message_id,
            attempt=retry.attempt,
            delay=retry.delay,
            error=text,
        )
        self._core.lifecycle.tell(
            RetryScheduledEvent,
            message,
            lambda: RetryScheduledEvent(
                handler=retry.handler,
                message_type=type(message).__name__,
                failed_id=metadata_of(message).message_id,
                attempt=retry.attempt,
                delay=retry.delay,
                error=text,
            ),
        )

    def stats(self) -> BusStats:
        """All counters at this moment."""
        circuits = {name: circuit.state.value for name, circuit in self.circuits.items()}
        return replace(super().stats(), circuits=circuits)


def _inside(limit: Middleware, call: Call) -> Call:
    return lambda message: limit(message, call)


def _on_a_copy(call: Call) -> Call:
    # A handler that works its list off must not leave the next try without events.
    return lambda events: call(events.copy())


def is_worth_keeping(error: BaseException) -> bool:
    """Whether a message that ended so is kept as a dead letter."""
    return isinstance(error, Exception) and not isinstance(error, Refusal)
