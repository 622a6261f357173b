"""Helpers of the conformance tests of journals: records, and a journal to write them to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
from uuid_utils import uuid7

from msgbus.journal.port import Journal
from msgbus.journal.records import (
    Kind,
    Record,
)
from msgbus.runtime.clock import VirtualClock

TIME: Final = 1_700_000_000.0


def make_record(number: int = 0, **changes: Any) -> Record:
    """Make a record with an id of its own; `changes` are fields of `Record`."""
    message_id = changes.pop("message_id", None) or str(uuid7())
    fields: dict[str, Any] = {
        "message_id": message_id,
        "name": "shop.OrderPlaced",
        "version": 1,
        "topic": "shop.orders",
        "key": None,
        "kind": Kind.EVENT,
        "time": TIME + number,
        "correlation_id": message_id,
        "causation_id": None,
        "root_id": message_id,
        "depth": 0,
        "session_id": None,
        "headers": {},
        "payload": b'{"number":%d}' % number,
    }
    return Record(**{**fields, **changes})


def numbers(records: Iterable[Record]) -> list[int]:
    """Get the numbers that records were made with."""
    return [record.json()["number"] for record in records]


async def read_all(journal: Journal, **options: Any) -> list[Record]:
    """Read everything in the journal, page by page."""
    records: list[Record] = []
    start = 0
    while page := await journal.read(start, 7, **options):
        records += page
        start = page.next
    return records


class expected:  # noqa: N801 (reads as a phrase)
    """Assert that a block raises: `with expected(SomeError):`. Needs no test framework."""

    def __init__(self, kind: type[BaseException]) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> bool:
        assert kind is not None, f"{self._kind.__name__} was not raised"
        return issubclass(kind, self._kind)


class Suite(ABC):
    """Base of the tests: how to get a journal."""

    @abstractmethod
    def make(self, clock: VirtualClock) -> Journal:
        """Make a new, empty journal on `clock`."""

    @asynccontextmanager
    async def opened(self, clock: VirtualClock | None = None) -> AsyncGenerator[Journal]:
        """Open a journal, and close it at the end."""
        journal = self.make(clock or VirtualClock())
        try:
            yield journal
        finally:
            with anyio.CancelScope(shield=True):
                await journal.close()
