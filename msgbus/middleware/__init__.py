"""Middleware: what wraps every handler call, one class per file."""

from msgbus.middleware.concurrency import ConcurrencyLimitMiddleware
from msgbus.middleware.idempotency import IdempotencyMiddleware
from msgbus.middleware.logging import LoggingMiddleware
from msgbus.middleware.rate_limit import RateLimitMiddleware
from msgbus.middleware.timeout import TimeoutMiddleware
from msgbus.middleware.timing import Timing, TimingMiddleware
from msgbus.middleware.tracing import TracingMiddleware, current_trace_headers
from msgbus.middleware.validation import ValidationMiddleware

__all__ = [
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
