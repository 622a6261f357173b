"""Where dead letters are kept: the port, and the rules that every store follows.

A store keeps `Record`s: a letter, and who replays it. What may happen to a record is written
here once, as plain functions from one record to the next; a store only has to make each step
whole, so that no two processes take the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Final, Literal, Protocol, final

from msgbus.errors import (
    DeadLetterError,
    DeadLetterStoreError,
    LetterStateError,
    MsgBusError,
)
from msgbus.resilience.claims import Claim
from msgbus.resilience.letters import DONE, DeadLetterEntry, LetterStatus, aware


class Overflow(StrEnum):
    """What a full store does with one more letter.

    Letters that are done (replayed, discarded, edited) make room first, and nothing is lost by
    that. Letters that are being replayed stay.
    """

    DROP_OLDEST = "drop_oldest"
    """The oldest letter falls out."""

    REJECT = "reject"
    """The new letter is refused."""


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
    """Died at this moment or later (`last_attempt`)."""

    until: datetime | None = None
    """Died before this moment."""

    status: LetterStatus | None = LetterStatus.DEAD
    answered: bool | None = None
    upto: str | None = None
    """Only letters that were there when the store's `head` was this."""

    def fits(self, letter: DeadLetterEntry) -> bool:
        """Whether the letter is meant, `upto` left aside."""
        return (
            (self.message_types is None or letter.message_type in self.message_types)
            and self.handler in (None, letter.handler)
            and self.error_type in (None, letter.error_type)
            and self.session_id in (None, letter.session_id)
            and (self.since is None or letter.last_attempt >= aware(self.since))
            and (self.until is None or letter.last_attempt < aware(self.until))
            and self.status in (None, letter.status)
            and self.answered in (None, letter.answered)
        )


ANY: Final = LetterFilter(status=None)
"""Every letter there is."""


@final
@dataclass(frozen=True, slots=True)
class LetterPage:
    """Some letters, in the order in which they first died, and where to go on."""

    letters: tuple[DeadLetterEntry, ...]
    cursor: str | None
    """Give it as `after` to get the next page; `None` if this is the last."""

    damaged: tuple[MsgBusError, ...] = ()
    """What is wrong with letters that should be here, and cannot be read."""

    def whole(self) -> LetterPage:
        """The page itself.

        Raises:
            DeadLetterStoreError: A letter of it is damaged.
        """
        for error in self.damaged:
            raise DeadLetterStoreError(str(error)) from error
        return self


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LetterGroup:
    """Letters that died of the same thing."""

    error_type: str
    handler: str
    message_type: str
    count: int
    first: datetime
    """The first attempt of any of them."""

    last: datetime
    """When one of them last died."""

    sample: str
    """The error of the newest of them."""


@final
@dataclass(frozen=True, slots=True)
class Notice:
    """A letter that a store lost, or did not take."""

    kind: Literal["dropped", "refused"]
    letter: DeadLetterEntry
    reason: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """How a replay ended."""

    outcome: Literal["handled", "failed", "given back", "not reached"]
    """`given back`: the handler came to no end, as the replay was cancelled. `not reached`: it
    was not called."""

    error: str = ""
    error_type: str = ""
    traceback: str = ""
    at: datetime | None = None


@final
@dataclass(frozen=True, slots=True)
class Record:
    """A letter as a store keeps it."""

    letter: DeadLetterEntry
    claim: Claim | None = None
    counted: bool = False
    """Whether a failed replay was counted as one attempt, as its number was not yet known."""


class DeadLetterStore(Protocol):
    """Keeps dead letters. Methods are called on an event loop, asyncio's or trio's.

    Letters have an order, by when they first came, and keep their place when they change.
    """

    def add(self, letter: DeadLetterEntry) -> str | None:
        """Take a letter, or update the one of its id (see `added`); why not, if it is refused.

        Never waits, never raises, and may be called from any thread. A store that writes
        later tells by `listen` what it could not keep.
        """
        ...

    def listen(self, listener: Callable[[Notice], None]) -> None:
        """Tell about every letter that is dropped, or refused after `add` took it.

        May be called from any thread.
        """
        ...

    async def open(self) -> None:
        """Make ready; a store that is open already stays so."""
        ...

    async def flush(self) -> None:
        """Return once everything that was added is kept, or was told as lost."""
        ...

    async def close(self) -> None:
        """Flush, and let go of files and threads. It may be opened again."""
        ...

    async def get(self, letter_id: str) -> DeadLetterEntry | None:
        """One letter."""
        ...

    async def page(
        self, which: LetterFilter, *, after: str | None = None, limit: int = 100
    ) -> LetterPage:
        """At most `limit` letters behind the cursor `after`."""
        ...

    async def count(self, which: LetterFilter) -> int:
        """How many there are."""
        ...

    def size(self) -> int:
        """How many are dead, at once and from any thread: for metrics."""
        ...

    async def groups(self, which: LetterFilter) -> Sequence[LetterGroup]:
        """Letters by error type, handler and message type; the largest group first."""
        ...

    async def head(self) -> str:
        """The place of the newest letter, for `LetterFilter.upto`."""
        ...

    async def change(
        self,
        letter_id: str,
        step: Callable[[Record], Record],
        *,
        successor: DeadLetterEntry | None = None,
    ) -> DeadLetterEntry | None:
        """Replace one record by what `step` makes of it; `None` if there is none.

        In one go, also across processes, and together with adding `successor`: both or
        neither. `step` may raise, which leaves everything as it was.
        """
        ...

    async def release(self, is_void: Callable[[Claim], bool]) -> int:
        """Make every letter dead again whose claim is void; how many."""
        ...

    async def put(self, letters: Sequence[DeadLetterEntry]) -> int:
        """Add those whose ids are new, all or none; how many were.

        Raises:
            DeadLetterStoreError: They do not fit.
        """
        ...


# -- what may happen to a record ---------------------------------------------------------------


def added(old: Record | None, letter: DeadLetterEntry) -> Record:
    """The letter came, perhaps again: attempts add up, the last error counts, it is dead."""
    if old is None:
        return Record(letter)
    before = old.letter
    # The failure of a replay: whether the first caller had an answer stays as it was.
    of_replay = old.counted or before.status is LetterStatus.REPLAYING
    return Record(
        replace(
            letter,
            attempts=before.attempts + letter.attempts - old.counted,
            first_attempt=min(before.first_attempt, letter.first_attempt),
            answered=before.answered if of_replay else letter.answered,
            replays=before.replays,
            status=LetterStatus.DEAD,
            note=None,
        )
    )


def claimed(old: Record, claim: Claim) -> Record:
    """Somebody is about to replay it; unchanged if it is not theirs to take."""
    status = old.letter.status
    is_free = status is LetterStatus.DEAD or (
        status is LetterStatus.REPLAYING and (old.claim is None or old.claim.is_void(claim.at))
    )
    if not is_free:
        return old
    # Counted before the delivery, which may end the process.
    letter = replace(old.letter, status=LetterStatus.REPLAYING, replays=old.letter.replays + 1)
    return Record(letter, claim)


def settled(old: Record, owner: str, settlement: Settlement) -> Record:
    """A replay has ended; unchanged if the claim is gone, as after a failure that was added."""
    if old.claim is None or old.claim.owner != owner:
        return old
    if settlement.outcome == "handled":
        return Record(replace(old.letter, status=LetterStatus.REPLAYED))
    if settlement.outcome == "given back":
        return Record(replace(old.letter, status=LetterStatus.DEAD))
    if settlement.outcome == "not reached":
        # As it was before: nothing happened that it could tell of.
        replays = old.letter.replays - 1
        return Record(replace(old.letter, status=LetterStatus.DEAD, replays=replays))
    letter = replace(
        old.letter,
        status=LetterStatus.DEAD,
        attempts=old.letter.attempts + 1,
        error=settlement.error,
        error_type=settlement.error_type,
        traceback=settlement.traceback,
        last_attempt=settlement.at or old.letter.last_attempt,
    )
    return Record(letter, counted=True)


def released(old: Record) -> Record:
    """Its claim is void."""
    return Record(replace(old.letter, status=LetterStatus.DEAD))


def edited(old: Record, successor: DeadLetterEntry) -> Record:
    """Another letter stands in for it.

    Raises:
        LetterStateError: It is not dead.
    """
    _require_dead(old, wanted="edited")
    note = f"see {successor.letter_id}"
    return Record(replace(old.letter, status=LetterStatus.EDITED, note=note))


def discarded(old: Record, reason: str) -> Record:
    """Nothing is to be done about it; one that is discarded already stays as it is.

    Raises:
        LetterStateError: It is neither dead nor discarded.
    """
    if old.letter.status is LetterStatus.DISCARDED:
        return old
    _require_dead(old, wanted="discarded")
    return Record(replace(old.letter, status=LetterStatus.DISCARDED, note=reason))


def unanswered(old: Record) -> Record:
    """Its caller got no answer after all, so that it may be replayed with the others."""
    return replace(old, letter=replace(old.letter, answered=False))


def _require_dead(record: Record, *, wanted: str) -> None:
    letter = record.letter
    if letter.status is not LetterStatus.DEAD:
        raise LetterStateError(letter.letter_id, status=letter.status.value, wanted=wanted)


def is_done(record: Record) -> bool:
    """Whether it may make room for others without loss."""
    return record.letter.status in DONE


def position(cursor: str) -> int:
    """A cursor of the stores that come with msgbus, as the number it is.

    Raises:
        DeadLetterError: It is none.
    """
    if not cursor.isdecimal():
        raise DeadLetterError(f"{cursor!r} is no cursor. Use the one of the page before.")
    return int(cursor)
