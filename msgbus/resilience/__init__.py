"""Resilience: retry, circuit breaker, policies, dead letters, and the bus that assembles them.

Names are imported at their first use: the policies are below the bus, `ResilientMessageBus` and
the dead letters are above it.
"""

from typing import TYPE_CHECKING

from msgbus.runtime.lazy import lazy_names

if TYPE_CHECKING:
    from msgbus.errors import CircuitOpenError as CircuitOpenError
    from msgbus.middleware.chaos import ChaosMiddleware as ChaosMiddleware
    from msgbus.resilience.breaker import (
        CircuitBreaker as CircuitBreaker,
        CircuitChange as CircuitChange,
        CircuitState as CircuitState,
        Permit as Permit,
    )
    from msgbus.resilience.bus import ResilientMessageBus as ResilientMessageBus
    from msgbus.resilience.config import (
        MESSAGE_ERRORS as MESSAGE_ERRORS,
        CircuitBreakerConfig as CircuitBreakerConfig,
        RateLimit as RateLimit,
        RetryAttempt as RetryAttempt,
        RetryConfig as RetryConfig,
    )
    from msgbus.resilience.dead_letters.entry import (
        DeadLetterEntry as DeadLetterEntry,
        LetterStatus as LetterStatus,
    )
    from msgbus.resilience.dead_letters.files import ImportReport as ImportReport
    from msgbus.resilience.dead_letters.filters import LetterFilter as LetterFilter
    from msgbus.resilience.dead_letters.journal_store import (
        JournalDeadLetterStore as JournalDeadLetterStore,
    )
    from msgbus.resilience.dead_letters.memory import (
        MemoryDeadLetterStore as MemoryDeadLetterStore,
    )
    from msgbus.resilience.dead_letters.queue import DeadLetterQueue as DeadLetterQueue
    from msgbus.resilience.dead_letters.replay import (
        LetterReplayReport as LetterReplayReport,
        ReplayOutcome as ReplayOutcome,
    )
    from msgbus.resilience.dead_letters.sqlite import (
        SqliteDeadLetterStore as SqliteDeadLetterStore,
    )
    from msgbus.resilience.dead_letters.store import (
        DeadLetterStore as DeadLetterStore,
        LetterGroup as LetterGroup,
        LetterPage as LetterPage,
        Overflow as Overflow,
    )
    from msgbus.resilience.policy import Policy as Policy
else:
    __getattr__, __dir__ = lazy_names(__name__)
