"""Which dead letters are meant, and how they come: all at once, or page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast, final

from typing_extensions import TypedDict

from msgbus.errors import DeadLetterError
from msgbus.messages.message import Message
from msgbus.resilience.dead_letters.entry import (
    DeadLetterEntry,
    LetterStatus,
    moment,
    wire_names,
)

if TYPE_CHECKING:
    from msgbus.resilience.dead_letters.store import DeadLetterStore

_PAGE: Final = 100

MessageTypes: TypeAlias = "type[Message] | str | Iterable[type[Message] | str] | None"
"""A class (those below it are meant as well), a wire name, several of them, or all."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Which letters are meant: those that fit everything given here."""

    message_types: frozenset[str] | None = None
    """Wire names."""

    handler: str | None = None
    error_type: str | None = None
    session_id: str | None = None
    since: datetime | None = None
    """Dead-lettered at this moment or later (`last_attempt`)."""

    until: datetime | None = None
    """Dead-lettered before this moment."""

    status: LetterStatus | None = LetterStatus.DEAD
    answered: bool | None = None
    upto: str | None = None
    """Only letters that were there when the store's `head` was this."""

    def fits(self, letter: DeadLetterEntry) -> bool:
        """Tell whether the letter is meant, `upto` left aside."""
        return (
            (self.message_types is None or letter.message_type in self.message_types)
            and self.handler in (None, letter.handler)
            and self.error_type in (None, letter.error_type)
            and self.session_id in (None, letter.session_id)
            and (self.since is None or letter.last_attempt >= moment(self.since))
            and (self.until is None or letter.last_attempt < moment(self.until))
            and self.status in (None, letter.status)
            and self.answered in (None, letter.answered)
        )


ANY: Final = LetterFilter(status=None)
"""Every letter there is."""


class ReplayFilters(TypedDict, total=False):
    """Which dead letters are meant."""

    handler: str | None
    error_type: str | None
    session_id: str | None
    since: datetime | None
    until: datetime | None


class LetterFilters(ReplayFilters, total=False):
    """Which letters are meant; only those that are dead unless `status` says otherwise."""

    status: LetterStatus | None
    answered: bool | None


@final
class LetterQuery:
    """Letters that were asked for: `await` them as a list, or go through with `async for`.

    `async for` fetches page by page. Letters may be discarded, edited or replayed on the way:
    each is met once.
    """

    def __init__(self, store: DeadLetterStore, which: LetterFilter, limit: int | None) -> None:
        self._store = store
        self._which = which
        self._limit = limit

    def __await__(self) -> Generator[Any, Any, list[DeadLetterEntry]]:
        return self._all().__await__()

    async def _all(self) -> list[DeadLetterEntry]:
        return [letter async for letter in self]

    async def __aiter__(self) -> AsyncIterator[DeadLetterEntry]:
        left = self._limit
        cursor: str | None = None
        # A letter of a durable handler moves to the end when it is dealt with.
        which = replace(self._which, upto=await self._store.head())
        while left is None or left > 0:
            limit = _PAGE if left is None else min(left, _PAGE)
            page = (await self._store.page(which, after=cursor, limit=limit)).whole()
            for letter in page.letters:
                yield letter
            left = None if left is None else left - len(page.letters)
            cursor = page.cursor
            if cursor is None:
                return


def letters_meant(
    message_type: MessageTypes, filters: LetterFilters | ReplayFilters
) -> LetterFilter:
    """Make the filter of what was asked for."""
    # Said again, as type checkers take the smaller of the two for open-ended.
    chosen = cast("LetterFilters", filters)
    if message_type is None:
        return LetterFilter(**chosen)
    given = (message_type,) if isinstance(message_type, (str, type)) else message_type
    names = frozenset(name for one in given for name in wire_names(one))
    return LetterFilter(message_types=names, **chosen)


def checked_limit(limit: int | None) -> int | None:
    """Return the limit itself.

    Raises:
        DeadLetterError: It is not above 0.
    """
    if limit is not None and limit < 1:
        raise DeadLetterError(f"limit is {limit}; it must be above 0.")
    return limit


def position(cursor: str) -> int:
    """Return a cursor of msgbus's own stores as the number it is.

    Raises:
        DeadLetterError: It is none.
    """
    if not cursor.isdecimal():
        raise DeadLetterError(f"{cursor!r} is no cursor. Use the one of the page before.")
    return int(cursor)
