"""Search among the letters of dead rows: an optional port, and the values it takes and returns."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

from msgbus.journal.records import Letter, Pending, Record


class LetterSelection(NamedTuple):
    """Which letters are wanted: those that fit everything given here."""

    message_ids: Collection[str] | None = None
    names: Collection[str] | None = None
    """Wire names of messages."""
    handler: str | None = None
    error_type: str | None = None
    session_id: str | None = None
    """Session of the message."""
    since: float | None = None
    """`last_attempt` at this time or later; seconds since the epoch."""
    until: float | None = None
    """`last_attempt` before this time."""
    statuses: Collection[str] | None = None
    answered: bool | None = None
    upto: int | None = None
    """Highest number."""


class StoredLetter(NamedTuple):
    """A letter, its row and its message; `None` in place of what is damaged."""

    number: int
    """Place in the order in which letters came; never used again."""
    row: Pending
    letter: Letter | None
    record: Record | None


class LetterTotal(NamedTuple):
    """Number of letters with the same type of error, handler and name of message."""

    error_type: str
    handler: str
    name: str
    size: int
    first: float
    """The earliest first attempt; seconds since the epoch."""
    last: float
    """The latest last attempt."""
    error: str | None
    """Text of the error of the newest of them."""


class Letters(Protocol):
    """Letters of dead rows, in the order in which they came. Each is found by an index."""

    async def find_letters(
        self, which: LetterSelection, *, after: int = 0, limit: int = 100
    ) -> list[StoredLetter]:
        """Return at most `limit` letters behind the number `after`."""
        ...

    async def count_letters(self, which: LetterSelection) -> int:
        """Return their number."""
        ...

    async def total_letters(self, which: LetterSelection) -> list[LetterTotal]:
        """Count them by type of error, handler and name of message; the most first."""
        ...

    def count_dead(self) -> int:
        """Return the number of dead letters, at once and from any thread: for metrics.

        Raises:
            JournalClosedError: The journal is closed.
        """
        ...

    async def last_letter(self) -> int:
        """Return the highest number of a letter that ever was."""
        ...


def handler_of(row: Pending, letter: Letter) -> str:
    """Return the name of a letter's handler: that of the subscription, if it names none."""
    return letter.handler or row.subscription
