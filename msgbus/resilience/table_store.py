"""What stores of dead letters have in common that keep them in a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgbus.errors import ConfigurationError
from msgbus.resilience.claims import Claim
from msgbus.resilience.letter_room import Room, release, tell
from msgbus.resilience.letter_rows import LetterRows
from msgbus.resilience.letters import DeadLetterEntry
from msgbus.resilience.stores import (
    LetterFilter,
    LetterGroup,
    LetterPage,
    Notice,
    Overflow,
    Record,
)

T = TypeVar("T")


class TableStore(ABC):
    """Everything that is one question, or one step, on the rows of a table.

    Subclasses say where that runs, and how letters get there.

    Raises:
        ConfigurationError: `max_size` or `buffer` is not above 0.
    """

    def __init__(self, max_size: int | None, overflow: Overflow, buffer: int) -> None:
        for name, value in (("max_size", max_size), ("buffer", buffer)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} is {value}; it must be above 0.")
        self.max_size = max_size
        self.overflow = Overflow(overflow)
        self._room = Room(max_size, self.overflow)
        self._listeners: list[Callable[[Notice], None]] = []

    @property
    @abstractmethod
    def _place(self) -> object:
        """Where the letters are, for messages."""

    @abstractmethod
    async def _asked(self, question: Callable[[LetterRows], T]) -> T:
        """The answer to a question, after what was added is written."""

    @abstractmethod
    async def _written(self, work: Callable[[LetterRows], T]) -> T:
        """The value of `work`, once it is committed; it may be called again."""

    def listen(self, listener: Callable[[Notice], None]) -> None:
        """Tell about every letter that is dropped or refused, from whichever thread."""
        self._listeners.append(listener)

    async def get(self, letter_id: str) -> DeadLetterEntry | None:
        """One letter."""
        record = await self._asked(lambda rows: rows.get(letter_id))
        return None if record is None else record.letter

    async def page(
        self, which: LetterFilter, *, after: str | None = None, limit: int = 100
    ) -> LetterPage:
        """At most `limit` letters behind the cursor `after`."""
        return await self._asked(lambda rows: rows.page(which, after, limit))

    async def count(self, which: LetterFilter) -> int:
        """How many there are."""
        return await self._asked(lambda rows: rows.count(which))

    async def groups(self, which: LetterFilter) -> Sequence[LetterGroup]:
        """Letters by error type, handler and message type; the largest group first."""
        return await self._asked(lambda rows: rows.groups(which))

    async def head(self) -> str:
        """The place of the newest letter."""
        return str(await self._asked(LetterRows.head))

    async def change(
        self,
        letter_id: str,
        step: Callable[[Record], Record],
        *,
        successor: DeadLetterEntry | None = None,
    ) -> DeadLetterEntry | None:
        """Replace one record by what `step` makes of it; `None` if there is none."""
        letter, dropped = await self._written(
            lambda rows: self._room.change(rows, letter_id, step, successor)
        )
        tell(self._listeners, dropped)
        return letter

    async def release(self, is_void: Callable[[Claim], bool]) -> int:
        """Make every letter dead again whose claim is void; how many."""
        return await self._written(lambda rows: release(rows, is_void))

    async def put(self, letters: Sequence[DeadLetterEntry]) -> int:
        """Add those whose ids are new, all or none; how many were.

        Raises:
            DeadLetterStoreError: They do not fit.
        """
        number, dropped = await self._written(
            lambda rows: self._room.put(rows, letters, self._place)
        )
        tell(self._listeners, dropped)
        return number
