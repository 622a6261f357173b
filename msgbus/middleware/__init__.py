"""Middleware: what wraps every handler call, one class per file."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msgbus.middleware.chaos import ChaosCounts, ChaosError, ChaosMiddleware
    from msgbus.middleware.concurrency import ConcurrencyLimitMiddleware
    from msgbus.middleware.idempotency import IdempotencyMiddleware
    from msgbus.middleware.logging import LoggingMiddleware
    from msgbus.middleware.rate_limit import RateLimitMiddleware
    from msgbus.middleware.timeout import TimeoutMiddleware
    from msgbus.middleware.timing import Timing, TimingMiddleware
    from msgbus.middleware.tracing import TracingMiddleware, current_trace_headers
    from msgbus.middleware.validation import ValidationMiddleware

__all__ = [
    "ChaosCounts",
    "ChaosError",
    "ChaosMiddleware",
    "ConcurrencyLimitMiddleware",
    "IdempotencyMiddleware",
    "LoggingMiddleware",
    "RateLimitMiddleware",
    "TimeoutMiddleware",
    "Timing",
    "TimingMiddleware",
    "TracingMiddleware",
    "ValidationMiddleware",
    "current_trace_headers",
]

_MODULES = {
    "ChaosCounts": "chaos",
    "ChaosError": "chaos",
    "ChaosMiddleware": "chaos",
    "ConcurrencyLimitMiddleware": "concurrency",
    "IdempotencyMiddleware": "idempotency",
    "LoggingMiddleware": "logging",
    "RateLimitMiddleware": "rate_limit",
    "TimeoutMiddleware": "timeout",
    "Timing": "timing",
    "TimingMiddleware": "timing",
    "TracingMiddleware": "tracing",
    "ValidationMiddleware": "validation",
    "current_trace_headers": "tracing",
}

if not TYPE_CHECKING:  # type checkers would accept every name, misspelt ones too
    from importlib import import_module

    def __getattr__(name: str) -> object:
        # Only on first use: the bus imports this package for its chain, and most programs use
        # few of these.
        module = _MODULES.get(name)
        if module is None:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message)
        value: object = getattr(import_module(f"{__name__}.{module}"), name)
        globals()[name] = value
        return value
