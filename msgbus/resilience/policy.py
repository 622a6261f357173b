"""Policies for failing handlers: a default, and changes by message class or handler."""

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
"""Config of the handler's own circuit, a circuit to share, or the name of one to share."""

Target: TypeAlias = type[Message] | Callable[..., Any] | str
"""A message class, a handler, or a handler's name."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Resilience policy of one handler; `None` disables a part."""

    retry: RetryConfig | None = None
    """Whether and when to retry."""

    breaker: Breaker | None = None
    """When to stop calling the handler for a while."""

    timeout: float | None = None
    """Seconds that one attempt may take; the handler's own `timeout=` takes precedence."""

    bulkhead: int | None = None
    """Calls of the handler at once; excess calls wait in order."""

    rate_limit: RateLimit | float | None = None
    """Calls of the handler per second; excess calls wait in order."""

    fallback: Any = None
    """The result after a final failure: a value, or a function of message and error."""

    dead_letters: bool = True
    """Whether a message that fails finally is dead-lettered."""

    def __post_init__(self) -> None:
        for name in ("timeout", "bulkhead"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                message = f"{name} must be above 0, not {value}; None disables it."
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
class PolicyTable:
    """The policy of every handler: the default, changed by type, then by handler."""

    def __init__(self, default: Policy) -> None:
        self.default = default
        self._default_of_system_events = replace(default, breaker=None)
        self._by_type: dict[type[Message], Mapping[str, Any]] = {}
        self._by_name: dict[str, Mapping[str, Any]] = {}
        self._by_handler: list[tuple[Callable[..., Any], Mapping[str, Any]]] = []

    def change(self, target: Target, changes: Mapping[str, Any]) -> None:
        """Change parts for a message class and its subclasses, or for one handler.

        Raises:
            ConfigurationError: There is no such part, or its value is invalid.
        """
        unknown = sorted(set(changes) - set(PARTS))
        if unknown or not changes:
            what = f"has no {', '.join(unknown)}" if unknown else "was given nothing to change"
            message = f"bus.policy {what}. The parts of a policy are: {', '.join(PARTS)}."
            raise ConfigurationError(message)
        replace(self.default, **changes)  # raises if a value is invalid
        if isinstance(target, str):
            self._by_name[target] = {**self._by_name.get(target, {}), **changes}
        elif isinstance(target, type) and issubclass(target, Message):
            self._by_type[target] = {**self._by_type.get(target, {}), **changes}
        else:
            # By the function: handlers may share a name, or be registered under another.
            self._by_handler.append((cast("Callable[..., Any]", target), dict(changes)))

    def of(self, registration: Registration) -> Policy:
        """The policy of one handler."""
        changes: dict[str, Any] = {}
        # For a handler of several classes, the first takes precedence.
        for message_type in reversed(registration.classes):
            for cls in reversed(message_type.__mro__):
                changes.update(self._by_type.get(cls, {}))
        changes.update(self._by_name.get(registration.name, {}))
        for handler, changed in self._by_handler:
            if handler == registration.handler:
                changes.update(changed)
        default = self.default
        shares = not isinstance(default.breaker, CircuitBreakerConfig)
        if shares and all(issubclass(cls, SystemEvent) for cls in registration.classes):
            # A shared circuit would delay the event that it has opened until it has closed.
            default = self._default_of_system_events
        return replace(default, **changes) if changes else default


def describe(policy: Policy, circuit: str | None) -> list[str]:
    """Describe a policy, one line per part, outermost first."""
    lines = [f"fallback     {_fallback(policy.fallback)}", f"retry        {_retry(policy.retry)}"]
    lines.append(f"breaker      {_breaker(policy.breaker, circuit)}")
    lines.append(f"bulkhead     {_or_none(policy.bulkhead, '{} at once')}")
    lines.append(f"rate limit   {_rate(policy.rate_limit)}")
    lines.append(f"timeout      {_or_none(policy.timeout, '{:g} s per attempt')}")
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
    times = f"{retry.max_retries} times" if retry.stop is None else "as decided by stop="
    delays = (
        f"after {retry.initial_delay:g} s, then {retry.exponential_base:g} times longer each time, "
        f"at most {retry.max_delay:g} s{', with jitter' if retry.jitter else ''}"
    )
    text = f"{times}, {delays if retry.wait is None else 'after delays by wait='}"
    if retry.retry is not None:
        return f"{text}; if retry= allows it"
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
