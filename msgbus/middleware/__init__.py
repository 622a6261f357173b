"""Middleware: the chain around every handler, and one class per file.

Names are imported at their first use. May import `handlers` and what is below it; the bus and
what is above it may import this.
"""

from typing import TYPE_CHECKING

from msgbus.runtime.lazy import lazy_names

if TYPE_CHECKING:
    from msgbus.middleware.chaos import (
        ChaosCounts as ChaosCounts,
        ChaosError as ChaosError,
        ChaosMiddleware as ChaosMiddleware,
    )
    from msgbus.middleware.concurrency import (
        ConcurrencyLimitMiddleware as ConcurrencyLimitMiddleware,
    )
    from msgbus.middleware.idempotency import IdempotencyMiddleware as IdempotencyMiddleware
    from msgbus.middleware.logging import LoggingMiddleware as LoggingMiddleware
    from msgbus.middleware.rate_limit import RateLimitMiddleware as RateLimitMiddleware
    from msgbus.middleware.timeout import TimeoutMiddleware as TimeoutMiddleware
    from msgbus.middleware.timing import Timing as Timing, TimingMiddleware as TimingMiddleware
    from msgbus.middleware.tracing import (
        TracingMiddleware as TracingMiddleware,
        current_trace_headers as current_trace_headers,
    )
    from msgbus.middleware.validation import ValidationMiddleware as ValidationMiddleware
else:
    __getattr__, __dir__ = lazy_names(__name__)
