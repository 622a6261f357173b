"""Dead letters in memory: bounded, and gone with the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import final

from msgbus.errors import ConfigurationError, DeadLetterStoreError
from msgbus.resilience.claims import Claim
from msgbus.resilience.letters import DeadLetterEntry, LetterStatus
from msgbus.resilience.stores import (
    LetterFilter,
    LetterGroup,
    LetterPage,
    Notice,
    Overflow,
    Record,
    added,
    is_done,
    position,
    released,
)


@final
class MemoryDeadLetterStore:
    """Keeps dead letters in memory, at most `max_size` of them.

    Nothing here waits: not for room, not for a disk.

    Args:
        max_size: Letters to keep; `None` for no bound.
        overflow: What a full store does with one more.

    Raises:
        ConfigurationError: `max_size` is not above 0.
    """

    def __init__(
        self, max_size: int | None = 10_000, overflow: Overflow = Overflow.DROP_OLDEST
    ) -> None:
        if max_size is not None and max_size < 1:
            raise ConfigurationError(f"max_size is {max_size}; it must be above 0, or None.")
        self.max_size = max_size
        self.overflow = Overflow(overflow)
        self._lock = threading.Lock()
        self._records: dict[str, Record] = {}
        self._places: dict[str, int] = {}
        self._done: dict[str, None] = {}
        self._last_place = 0
        self._listeners: list[Callable[[Notice], None]] = []

    def __len__(self) -> int:
        return len(self._records)

    def add(self, letter: DeadLetterEntry) -> str | None:
        """Take a letter, or update the one of its id; why not, if there is no room for it."""
        with self._lock:
            known = letter.letter_id in self._records
            dropped = [] if known else self._make_room(1)
            if dropped is None:
                return self._full()
            self._store(added(self._records.get(letter.letter_id), letter))
        self._tell(dropped)
        return None

    def listen(self, listener: Callable[[Notice], None]) -> None:
        """Tell about every letter that falls out."""
        self._listeners.append(listener)

    async def open(self) -> None:
        """There is nothing to open."""

    async def flush(self) -> None:
        """Everything is kept at once."""

    async def close(self) -> None:
        """The letters stay, as long as the store does."""

    async def get(self, letter_id: str) -> DeadLetterEntry | None:
        """One letter."""
        record = self._records.get(letter_id)
        return None if record is None else record.letter

    async def page(
        self, which: LetterFilter, *, after: str | None = None, limit: int = 100
    ) -> LetterPage:
        """At most `limit` letters behind the cursor `after`."""
        behind = 0 if after is None else position(after)
        letters: list[DeadLetterEntry] = []
        for letter in self._fitting(which, behind):
            if len(letters) == limit:
                return LetterPage(tuple(letters), str(self._places[letters[-1].letter_id]))
            letters.append(letter)
        return LetterPage(tuple(letters), None)

    async def count(self, which: LetterFilter) -> int:
        """How many there are."""
        return sum(1 for _ in self._fitting(which))

    def size(self) -> int:
        """How many are dead."""
        return sum(1 for _ in self._fitting(LetterFilter()))

    async def groups(self, which: LetterFilter) -> Sequence[LetterGroup]:
        """Letters by error type, handler and message type; the largest group first."""
        found: dict[tuple[str, str, str], list[DeadLetterEntry]] = {}
        for letter in self._fitting(which):
            place = (letter.error_type, letter.handler, letter.message_type)
            found.setdefault(place, []).append(letter)
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
        """The place of the newest letter."""
        return str(self._last_place)

    async def change(
        self,
        letter_id: str,
        step: Callable[[Record], Record],
        *,
        successor: DeadLetterEntry | None = None,
    ) -> DeadLetterEntry | None:
        """Replace one record by what `step` makes of it; `None` if there is none."""
        dropped: list[Notice] = []
        with self._lock:
            record = self._records.get(letter_id)
            if record is None:
                return None
            changed = step(record)
            self._store(changed)
            if successor is not None:
                # The letter it stands in for is done: there is room, or nothing is lost.
                dropped = self._make_room(1) or []
                self._store(Record(successor))
        self._tell(dropped)
        return changed.letter

    async def release(self, is_void: Callable[[Claim], bool]) -> int:
        """Make every letter dead again whose claim is void; how many."""
        with self._lock:
            void = [
                record
                for record in self._records.values()
                if record.letter.status is LetterStatus.REPLAYING
                and (record.claim is None or is_void(record.claim))
            ]
            for record in void:
                self._store(released(record))
        return len(void)

    async def put(self, letters: Sequence[DeadLetterEntry]) -> int:
        """Add those whose ids are new, all or none; how many were.

        Raises:
            DeadLetterStoreError: They do not fit.
        """
        with self._lock:
            unique = {letter.letter_id: letter for letter in letters}
            new = [one for one in unique.values() if one.letter_id not in self._records]
            dropped = self._make_room(len(new))
            if dropped is None:
                raise DeadLetterStoreError(
                    f"{len(new)} letters do not fit: the store holds {len(self)} and takes at "
                    f"most {self.max_size}. Make max_size larger, or discard some."
                )
            for letter in new:
                self._store(Record(letter))
        self._tell(dropped)
        return len(new)

    def _fitting(self, which: LetterFilter, behind: int = 0) -> Iterator[DeadLetterEntry]:
        upto = self._last_place if which.upto is None else position(which.upto)
        # A copy, as others may add while a caller looks.
        for letter_id, record in list(self._records.items()):
            place = self._places.get(letter_id, 0)
            if behind < place <= upto and which.fits(record.letter):
                yield record.letter

    def _store(self, record: Record) -> None:
        letter_id = record.letter.letter_id
        if letter_id not in self._records:
            self._last_place += 1
            self._places[letter_id] = self._last_place
        self._records[letter_id] = record
        if is_done(record):
            self._done[letter_id] = None
        else:
            self._done.pop(letter_id, None)

    def _make_room(self, number: int) -> list[Notice] | None:
        """Room for so many letters, and what fell out for it; `None` if there is none."""
        missing = 0 if self.max_size is None else len(self._records) + number - self.max_size
        done = list(self._done)[:missing] if missing > 0 else []
        missing -= len(done)
        oldest: list[str] = []
        if missing > 0:
            if self.overflow is Overflow.REJECT:
                return None
            oldest = self._oldest(missing)
            if len(oldest) < missing:
                return None
        notices = [Notice("dropped", self._records[one].letter, self._full()) for one in oldest]
        for letter_id in (*done, *oldest):
            del self._records[letter_id], self._places[letter_id]
            self._done.pop(letter_id, None)
        return notices

    def _full(self) -> str:
        return f"the store is full ({self.max_size} letters)"

    def _oldest(self, number: int) -> list[str]:
        found: list[str] = []
        for letter_id, record in self._records.items():
            if record.letter.status is LetterStatus.DEAD:
                found.append(letter_id)
                if len(found) == number:
                    break
        return found

    def _tell(self, notices: Sequence[Notice]) -> None:
        for notice in notices:
            for listener in self._listeners:
                listener(notice)
