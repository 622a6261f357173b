"""Questions about dead letters: which are meant, and how they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterable
from datetime import datetime
from typing import Any, Final, TypeAlias, cast, final

from typing_extensions import TypedDict

from msgbus.errors import DeadLetterError
from msgbus.messages.message import Message
from msgbus.resilience.letters import DeadLetterEntry, LetterStatus, wire_names
from msgbus.resilience.stores import DeadLetterStore, LetterFilter

_PAGE: Final = 100

MessageTypes: TypeAlias = "type[Message] | str | Iterable[type[Message] | str] | None"
"""A class (those below it are meant as well), a wire name, several of them, or all."""


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
        while left is None or left > 0:
            limit = _PAGE if left is None else min(left, _PAGE)
            page = (await self._store.page(self._which, after=cursor, limit=limit)).whole()
            for letter in page.letters:
                yield letter
            left = None if left is None else left - len(page.letters)
            cursor = page.cursor
            if cursor is None:
                return


def letters_meant(
    message_type: MessageTypes, filters: LetterFilters | ReplayFilters
) -> LetterFilter:
    """What was asked for, as stores understand it."""
    # Said again, as type checkers take the smaller of the two for open-ended.
    chosen = cast("LetterFilters", filters)
    if message_type is None:
        return LetterFilter(**chosen)
    given = (message_type,) if isinstance(message_type, (str, type)) else message_type
    names = frozenset(name for one in given for name in wire_names(one))
    return LetterFilter(message_types=names, **chosen)


def checked_limit(limit: int | None) -> int | None:
    """The limit itself.

    Raises:
        DeadLetterError: It is not above 0.
    """
    if limit is not None and limit < 1:
        raise DeadLetterError(f"limit is {limit}; it must be above 0.")
    return limit
