"""What to do when a handler fails: one policy for all, others for a type or a handler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict, cast, final

from msgbus.errors import ConfigurationError
from msgbus.handlers.signatures import handler_name
from msgbus.messages.message import Message, SystemEvent
from msgbus.resilience.breaker import CircuitBreaker
from msgbus.resilience.config import CircuitBreakerConfig, RateLimit, RetryConfig

if TYPE_CHECKING:
    from msgbus.handlers.registration import Registration

Breaker: TypeAlias = CircuitBreakerConfig | CircuitBreaker | str
"""A circuit of the handler's own, a circuit to share, or the name of one to share."""

Target: TypeAlias = type[Message] | Callable[..., Any] | str
"""A message class, a handler, or a handler's name."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """All that stands around one handler. `None` leaves a part out."""

    retry: RetryConfig | None = None
    """Whether and when to try again."""

    breaker: Breaker | None = None
    """When to stop calling it for a while."""

    timeout: float | None = None
    """Seconds that one try may take; the handler's own `timeout=` comes first."""

    bulkhead: int | None = None
    """How many calls of it may run at once; the rest waits in line."""

    rate_limit: RateLimit | float | None = None
    """How many calls of it may begin per second; the rest waits in line."""

    fallback: Any = None
    """What to answer when all else failed: a value, or a function of message and error."""

    dead_letters: bool = True
    """Whether what fails for good is kept."""

    def __post_init__(self) -> None:
        for name in ("timeout", "bulkhead"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                message = f"{name} must be more than 0, not {value}; None leaves it out."
                raise ConfigurationError(message)


class PolicyOptions(TypedDict, total=False):
    """Keywords of `bus.policy`: the parts of a `Policy` to change."""

    retry: RetryConfig | None
    breaker: Breaker | None
    timeout: float | None
    bulkhead: int | None
    rate_limit: RateLimit | float | None
    fallback: Any
    dead_letters: bool


PARTS: Final = tuple(field.name for field in fields(Policy))


@final
class PolicyBook:
    """The policy of every handler: the default, changed per type, then per handler."""

    def __init__(self, default: Policy) -> None:
        self.default = default
        self._default_of_listeners = replace(default, breaker=None)
        self._by_type: dict[type[Message], Mapping[str, Any]] = {}
        self._by_name: dict[str, Mapping[str, Any]] = {}
        self._by_handler: list[tuple[Callable[..., Any], Mapping[str, Any]]] = []

    def change(self, target: Target, changes: Mapping[str, Any]) -> None:
        """Note what is different for a message class and its subclasses, or for one handler.

        Raises:
            ConfigurationError: There is no such part, or its value is impossible.
        """
        unknown = sorted(set(changes) - set(PARTS))
        if unknown or not changes:
            what = f"has no {', '.join(unknown)}" if unknown else "was given nothing to change"
            message = f"bus.policy {what}. The parts of a policy are: {', '.join(PARTS)}."
            raise ConfigurationError(message)
        replace(self.default, **changes)  # says at once if a value is impossible
        if isinstance(target, str):
            self._by_name[target] = {**self._by_name.get(target, {}), **changes}
        elif isinstance(target, type) and issubclass(target, Message):
            self._by_type[target] = {**self._by_type.get(target, {}), **changes}
        else:
            # The function itself: two handlers may be called alike, or registered by a name.
            self._by_handler.append((cast("Callable[..., Any]", target), dict(changes)))

    def of(self, registration: Registration) -> Policy:
        """The policy of one handler."""
        changes: dict[str, Any] = {}
        # Of a handler of several classes the first has the last word.
        for message_type in reversed(registration.classes):
            for cls in reversed(message_type.__mro__):
                changes.update(self._by_type.get(cls, {}))
        changes.update(self._by_name.get(registration.name, {}))
        for handler, said in self._by_handler:
            if handler == registration.handler:
                changes.update(said)
        default = self.default
        shares = not isinstance(default.breaker, CircuitBreakerConfig)
        if shares and all(issubclass(cls, SystemEvent) for cls in registration.classes):
            # Else who is to hear that the circuit is open would wait until it is not.
            default = self._default_of_listeners
        return replace(default, **changes) if changes else default


def describe(policy: Policy, circuit: str | None) -> list[str]:
    """A policy in words, outermost part first."""
    lines = [f"fallback     {_fallback(policy.fallback)}", f"retry        {_retry(policy.retry)}"]
    lines.append(f"breaker      {_breaker(policy.breaker, circuit)}")
    lines.append(f"bulkhead     {_or_none(policy.bulkhead, '{} at once')}")
    lines.append(f"rate limit   {_rate(policy.rate_limit)}")
    lines.append(f"timeout      {_or_none(policy.timeout, '{:g} s per try')}")
    lines.append(f"dead letters {'kept' if policy.dead_letters else 'not kept'}")
    return lines


def _or_none(value: object, text: str) -> str:
    return "none" if value is None else text.format(value)


def _fallback(fallback: object) -> str:
    if fallback is None:
        return "none"
    return f"call {handler_name(fallback)}" if callable(fallback) else f"the value {fallback!r}"


def _names(types: tuple[type[Exception], ...]) -> str:
    return ", ".join(one.__name__ for one in types)


def _retry(retry: RetryConfig | None) -> str:
    if retry is None or (retry.max_retries == 0 and retry.stop is None):
        return "none"
    times = f"{retry.max_retries} times" if retry.stop is None else "as stop= says"
    pauses = (
        f"after {retry.initial_delay:g} s, then {retry.exponential_base:g} times longer each time, "
        f"{retry.max_delay:g} s at most{', give or take half' if retry.jitter else ''}"
    )
    text = f"{times}, {pauses if retry.wait is None else 'after what wait= says'}"
    if retry.retry is not None:
        return f"{text}; if retry= says so"
    text += f"; on {_names(retry.retry_on)}"
    return f"{text}, not on {_names(retry.give_up_on)}" if retry.give_up_on else text


def _breaker(breaker: Breaker | None, circuit: str | None) -> str:
    if breaker is None:
        return "none"
    config = breaker if isinstance(breaker, CircuitBreakerConfig) else None
    if isinstance(breaker, CircuitBreaker):
        config = breaker.config
    name = f"circuit {circuit!r}"
    if config is None:
        return f"{name}, shared"
    when = f"{config.failure_threshold} failures"
    if config.failure_rate is not None:
        when = f"{config.failure_rate:.0%} failures, of {config.minimum_calls} calls or more"
    where = " in a row"
    if config.window is not None:
        where = f" within {config.window:g} s"
    elif config.window_calls is not None or config.failure_rate is not None:
        where = f" among the last {config.window_calls or 100} calls"
    return f"{name} opens after {when}{where}, for {config.recovery_time:g} s at first"


def _rate(rate: RateLimit | float | None) -> str:
    if rate is None:
        return "none"
    limit = rate if isinstance(rate, RateLimit) else RateLimit(per_second=rate)
    burst = "" if limit.burst is None else f", {limit.burst:g} at once"
    return f"{limit.per_second:g} per second{burst}"
