"""Resilience: retry, circuit breaker, dead letters and the bus that assembles them.

Names are loaded when they are first asked for: the policies stand below the bus, and the
resilient bus above it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from msgbus.errors import CircuitOpenError
    from msgbus.journal.letters import JournalDeadLetterStore
    from msgbus.middleware.chaos import ChaosMiddleware
    from msgbus.resilience.breaker import CircuitBreaker, Permit
    from msgbus.resilience.bus import ResilientMessageBus
    from msgbus.resilience.config import (
        MESSAGE_ERRORS,
        CircuitBreakerConfig,
        RateLimit,
        RetryAttempt,
        RetryConfig,
    )
    from msgbus.resilience.dead_letters import DeadLetterQueue
    from msgbus.resilience.letter_files import ImportReport
    from msgbus.resilience.letters import DeadLetterEntry, LetterStatus
    from msgbus.resilience.memory_store import MemoryDeadLetterStore
    from msgbus.resilience.policy import Policy
    from msgbus.resilience.replay import LetterReplayReport, ReplayOutcome
    from msgbus.resilience.sqlite_store import SqliteDeadLetterStore
    from msgbus.resilience.states import CircuitChange, CircuitState
    from msgbus.resilience.stores import (
        DeadLetterStore,
        LetterFilter,
        LetterGroup,
        LetterPage,
        Overflow,
    )

__all__ = [
    "MESSAGE_ERRORS",
    "ChaosMiddleware",
    "CircuitBreaker",
    "CircuitBreakerConfig",
    "CircuitChange",
    "CircuitOpenError",
    "CircuitState",
    "DeadLetterEntry",
    "DeadLetterQueue",
    "DeadLetterStore",
    "ImportReport",
    "JournalDeadLetterStore",
    "LetterFilter",
    "LetterGroup",
    "LetterPage",
    "LetterReplayReport",
    "LetterStatus",
    "MemoryDeadLetterStore",
    "Overflow",
    "Permit",
    "Policy",
    "RateLimit",
    "ReplayOutcome",
    "ResilientMessageBus",
    "RetryAttempt",
    "RetryConfig",
    "SqliteDeadLetterStore",
]

_HOMES: Final = {
    "ChaosMiddleware": "msgbus.middleware.chaos",
    "CircuitOpenError": "msgbus.errors",
    "CircuitBreaker": "msgbus.resilience.breaker",
    "CircuitBreakerConfig": "msgbus.resilience.config",
    "CircuitChange": "msgbus.resilience.states",
    "CircuitState": "msgbus.resilience.states",
    "DeadLetterEntry": "msgbus.resilience.letters",
    "DeadLetterQueue": "msgbus.resilience.dead_letters",
    "DeadLetterStore": "msgbus.resilience.stores",
    "ImportReport": "msgbus.resilience.letter_files",
    "JournalDeadLetterStore": "msgbus.journal.letters",
    "MESSAGE_ERRORS": "msgbus.resilience.config",
    "LetterFilter": "msgbus.resilience.stores",
    "LetterGroup": "msgbus.resilience.stores",
    "LetterPage": "msgbus.resilience.stores",
    "LetterReplayReport": "msgbus.resilience.replay",
    "LetterStatus": "msgbus.resilience.letters",
    "MemoryDeadLetterStore": "msgbus.resilience.memory_store",
    "Overflow": "msgbus.resilience.stores",
    "Permit": "msgbus.resilience.breaker",
    "Policy": "msgbus.resilience.policy",
    "RateLimit": "msgbus.resilience.config",
    "ReplayOutcome": "msgbus.resilience.replay",
    "ResilientMessageBus": "msgbus.resilience.bus",
    "RetryAttempt": "msgbus.resilience.config",
    "RetryConfig": "msgbus.resilience.config",
    "SqliteDeadLetterStore": "msgbus.resilience.sqlite_store",
}

if not TYPE_CHECKING:  # type checkers would accept every name, misspelt ones too
    from importlib import import_module

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message)
        value: object = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
