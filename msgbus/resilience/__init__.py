"""Resilience: retry, circuit breaker, dead letters and the bus that assembles them."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msgbus.resilience.dead_letters import DeadLetterQueue
    from msgbus.resilience.letter_files import ImportReport
    from msgbus.resilience.letters import DeadLetterEntry, LetterStatus
    from msgbus.resilience.memory_store import MemoryDeadLetterStore
    from msgbus.resilience.replay import ReplayOutcome, ReplayReport
    from msgbus.resilience.sqlite_store import SqliteDeadLetterStore
    from msgbus.resilience.stores import (
        DeadLetterStore,
        LetterFilter,
        LetterGroup,
        LetterPage,
        Overflow,
    )

__all__ = [
    "DeadLetterEntry",
    "DeadLetterQueue",
    "DeadLetterStore",
    "ImportReport",
    "LetterFilter",
    "LetterGroup",
    "LetterPage",
    "LetterStatus",
    "MemoryDeadLetterStore",
    "Overflow",
    "ReplayOutcome",
    "ReplayReport",
    "SqliteDeadLetterStore",
]

_MODULES = {
    "DeadLetterEntry": "letters",
    "DeadLetterQueue": "dead_letters",
    "DeadLetterStore": "stores",
    "ImportReport": "letter_files",
    "LetterFilter": "stores",
    "LetterGroup": "stores",
    "LetterPage": "stores",
    "LetterStatus": "letters",
    "MemoryDeadLetterStore": "memory_store",
    "Overflow": "stores",
    "ReplayOutcome": "replay",
    "ReplayReport": "replay",
    "SqliteDeadLetterStore": "sqlite_store",
}


def __getattr__(name: str) -> object:
    # Only on first use, as in msgbus.middleware: most programs use few of these.
    module = _MODULES.get(name)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value: object = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
