"""`MemoryDeadLetterStore`: dead letters in memory, bounded, and gone with the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import final

from msgbus.errors import DeadLetterStoreError
from msgbus.resilience.dead_letters.entry import DONE, DeadLetterEntry, LetterStatus
from msgbus.resilience.dead_letters.filters import LetterFilter, position
from msgbus.resilience.dead_letters.store import (
    BoundedStore,
    LetterGroup,
    LetterPage,
    Notice,
    Overflow,
    Step,
    added,
)


@final
class MemoryDeadLetterStore(BoundedStore):
    """Keeps dead letters in memory, at most `max_size` of them. Nothing here waits.

    Args:
        max_size: Letters to keep; `None` for no bound.
        overflow: What a full store does with one more.

    Raises:
        ConfigurationError: `max_size` is not above 0.
    """

    def __init__(
        self, max_size: int | None = 10_000, overflow: Overflow = Overflow.DROP_OLDEST
    ) -> None:
        super().__init__(max_size, overflow)
        self._lock = threading.Lock()
        self._letters: dict[str, tuple[int, DeadLetterEntry]] = {}
        """By id, with their numbers; in the order in which they came."""
        self._done: dict[str, None] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._letters)

    def add(self, letter: DeadLetterEntry) -> str | None:
        """Take a letter, or update the one of its id; return why not, if there is no room."""
        with self._lock:
            _, known = self._letters.get(letter.letter_id, (0, None))
            dropped = self._make_room(known is None)
            if dropped is None:
                return self.is_full
            self._store(letter if known is None else added(known, letter))
        if dropped:
            self.tell(dropped)
        return None

    async def open(self) -> None:
        """Do nothing: there is nothing to open."""

    async def flush(self) -> None:
        """Do nothing: everything is kept at once."""

    async def close(self) -> None:
        """Do nothing: the letters stay, as long as the store does."""

    async def get(self, letter_id: str) -> DeadLetterEntry | None:
        """Return one letter."""
        return self._letters.get(letter_id, (0, None))[1]

    async def page(
        self, which: LetterFilter, *, after: str | None = None, limit: int = 100
    ) -> LetterPage:
        """Return at most `limit` letters behind the cursor `after`."""
        behind = 0 if after is None else position(after)
        letters: list[DeadLetterEntry] = []
        last = behind
        for number, letter in self._fitting(which, behind):
            if len(letters) == limit:
                return LetterPage(tuple(letters), str(last))
            letters.append(letter)
            last = number
        return LetterPage(tuple(letters), None)

    async def count(self, which: LetterFilter) -> int:
        """Return the number of letters."""
        return sum(1 for _ in self._fitting(which))

    def size(self) -> int:
        """Return the number of dead letters."""
        return sum(1 for _ in self._fitting(LetterFilter()))

    async def groups(self, which: LetterFilter) -> Sequence[LetterGroup]:
        """Group letters by error type, handler and message type; the largest group first."""
        found: dict[tuple[str, str, str], list[DeadLetterEntry]] = {}
        for _, letter in self._fitting(which):
            group = (letter.error_type, letter.handler, letter.message_type)
            found.setdefault(group, []).append(letter)
        groups = [
            LetterGroup(
                error_type=error_type,
                handler=handler,
                message_type=message_type,
                count=len(letters),
                first=min(letter.first_attempt for letter in letters),
                last=max(letter.last_attempt for letter in letters),
                sample=letters[-1].error,
            )
            for (error_type, handler, message_type), letters in found.items()
        ]
        return sorted(groups, key=lambda one: (-one.count, one.error_type, one.handler))

    async def head(self) -> str:
        """Return the cursor of the newest letter."""
        return str(self._last)

    async def change(
        self, letter_id: str, step: Step, *, successor: DeadLetterEntry | None = None
    ) -> DeadLetterEntry | None:
        """Replace one letter by what `step` makes of it; `None` if there is none."""
        dropped: list[Notice] = []
        with self._lock:
            _, known = self._letters.get(letter_id, (0, None))
            if known is None:
                return None
            changed = step(known)
            self._store(changed)
            if successor is not None:
                # The letter it stands in for is done: there is room, or nothing is lost.
                dropped = self._make_room(1) or []
                self._store(successor)
        self.tell(dropped)
        return changed

    async def release(self) -> int:
        """Return 0: what this process replays ends with it, and so do the letters."""
        return 0

    async def put(self, letters: Sequence[DeadLetterEntry]) -> int:
        """Add those whose ids are new, all or none; return how many were.

        Raises:
            DeadLetterStoreError: They do not fit.
        """
        with self._lock:
            new = {one.letter_id: one for one in letters if one.letter_id not in self._letters}
            dropped = self._make_room(len(new))
            if dropped is None:
                raise DeadLetterStoreError(
                    f"{len(new)} letters do not fit: the store holds {len(self)} and takes at "
                    f"most {self.max_size}. Make max_size larger, or discard some."
                )
            for letter in new.values():
                self._store(letter)
        self.tell(dropped)
        return len(new)

    def _fitting(
        self, which: LetterFilter, behind: int = 0
    ) -> Iterator[tuple[int, DeadLetterEntry]]:
        upto = self._last if which.upto is None else position(which.upto)
        # A copy, as others may add while a caller looks.
        for number, letter in list(self._letters.values()):
            if behind < number <= upto and which.fits(letter):
                yield number, letter

    def _store(self, letter: DeadLetterEntry) -> None:
        number, _ = self._letters.get(letter.letter_id, (0, None))
        if not number:
            number = self._last = self._last + 1
        self._letters[letter.letter_id] = (number, letter)
        if letter.status in DONE:
            self._done[letter.letter_id] = None
        else:
            self._done.pop(letter.letter_id, None)

    def _make_room(self, number: int) -> list[Notice] | None:
        """Make room for so many; return what was dropped for it, or `None` if there is none."""
        missing = 0 if self.max_size is None else len(self._letters) + number - self.max_size
        if missing <= 0 or not number:
            return []
        victims = list(islice(self._done, missing))
        missing -= len(victims)
        notices: list[Notice] = []
        if missing > 0:
            found = (one for _, one in self._letters.values() if one.status is LetterStatus.DEAD)
            dead = list(islice(found, missing))
            if self.overflow is Overflow.REJECT or len(dead) < missing:
                return None
            notices = [Notice("dropped", one, self.is_full) for one in dead]
        for letter_id in (*victims, *(notice.letter.letter_id for notice in notices)):
            del self._letters[letter_id]
            self._done.pop(letter_id, None)
        return notices
