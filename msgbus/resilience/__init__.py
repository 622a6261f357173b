"""Resilience: retry, circuit breaker, dead letters and the bus that assembles them.

Names are loaded when they are first asked for: the policies stand below the bus, and the
resilient bus above it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from msgbus.errors import CircuitOpenError
    from msgbus.middleware.chaos import ChaosMiddleware
    from msgbus.resilience.breaker import CircuitBreaker, CircuitChange, CircuitState, Permit
    from msgbus.resilience.bus import ResilientMessageBus
    from msgbus.resilience.policies import (
        CircuitBreakerConfig,
        RateLimit,
        RetryAttempt,
        RetryConfig,
    )
    from msgbus.resilience.policy import Policy

__all__ = [
    "ChaosMiddleware",
    "CircuitBreaker",
    "CircuitBreakerConfig",
    "CircuitChange",
    "CircuitOpenError",
    "CircuitState",
    "Permit",
    "Policy",
    "RateLimit",
    "ResilientMessageBus",
    "RetryAttempt",
    "RetryConfig",
]

_HOME: Final = {
    "CircuitBreaker": "breaker",
    "CircuitBreakerConfig": "policies",
    "CircuitChange": "breaker",
    "CircuitState": "breaker",
    "Permit": "breaker",
    "Policy": "policy",
    "RateLimit": "policies",
    "ResilientMessageBus": "bus",
    "RetryAttempt": "policies",
    "RetryConfig": "policies",
}


def __getattr__(name: str) -> Any:
    if name == "CircuitOpenError":
        from msgbus.errors import CircuitOpenError

        return CircuitOpenError
    if name == "ChaosMiddleware":
        from msgbus.middleware.chaos import ChaosMiddleware

        return ChaosMiddleware
    home = _HOME.get(name)
    if home is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
