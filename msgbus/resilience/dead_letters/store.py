"""`DeadLetterStore`: the port of stores, and the rules that every store follows.

The changes of a letter are written here once, as plain functions from one entry to the next; a
store only has to make each step whole, so that no two processes take the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Final, Literal, Protocol, TypeAlias, final

from msgbus.errors import (
    ConfigurationError,
    DeadLetterStoreError,
    LetterStateError,
    MsgBusError,
    UndeliverableLetterError,
)
from msgbus.resilience.dead_letters.entry import DeadLetterEntry, LetterStatus
from msgbus.resilience.dead_letters.filters import LetterFilter
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.tracebacks import redacted_traceback

Step: TypeAlias = Callable[[DeadLetterEntry], DeadLetterEntry]
"""A change of one letter. It may raise, which leaves everything as it was."""

REPLAY_FAILED: Final = "its last replay failed"
"""Note of a letter whose failed replay was counted as one attempt."""


class Overflow(StrEnum):
    """Policy of a full store for one more letter.

    Letters that are done (replayed, discarded, edited) make room first, and nothing is lost by
    that. Letters that are being replayed stay.
    """

    DROP_OLDEST = "drop_oldest"
    """The oldest letter is dropped."""

    REJECT = "reject"
    """The new letter is refused."""


@final
@dataclass(frozen=True, slots=True)
class LetterPage:
    """Some letters, in the order in which they were first dead-lettered, and where to go on."""

    letters: tuple[DeadLetterEntry, ...]
    cursor: str | None
    """Give it as `after` to get the next page; `None` if this is the last."""

    damaged: tuple[MsgBusError, ...] = ()
    """Errors of letters that belong here and cannot be read."""

    def whole(self) -> LetterPage:
        """Return the page itself.

        Raises:
            DeadLetterStoreError: A letter of it is damaged.
        """
        for error in self.damaged:
            raise DeadLetterStoreError(str(error)) from error
        return self


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LetterGroup:
    """Letters with the same type of error, handler and type of message."""

    error_type: str
    handler: str
    message_type: str
    count: int
    first: datetime
    """The first attempt of any of them."""

    last: datetime
    """When one of them was last dead-lettered."""

    sample: str
    """The error of the newest of them."""


@final
@dataclass(frozen=True, slots=True)
class Notice:
    """A letter that a store lost, or did not take."""

    kind: Literal["dropped", "refused"]
    letter: DeadLetterEntry
    reason: str


class DeadLetterStore(Protocol):
    """Keeps dead letters. Methods are called on an event loop, asyncio's or trio's.

    Letters are in the order in which they first came, and stay there when they change.
    """

    def add(self, letter: DeadLetterEntry) -> str | None:
        """Take a letter, or update the one of its id (see `added`); return why it is refused.

        Never waits, never raises, and may be called from any thread. A store that writes
        later tells by `listen` what it could not keep.
        """
        ...

    def listen(self, listener: Callable[[Notice], None]) -> None:
        """Tell about every letter that is dropped, or refused after `add` took it.

        It may be called from any thread.
        """
        ...

    async def open(self) -> None:
        """Make ready; a store that is open already stays so."""
        ...

    async def flush(self) -> None:
        """Return once everything that was added is kept, or was told as lost.

        Raises:
            DeadLetterStoreError: It cannot be written now, and waits.
        """
        ...

    async def close(self) -> None:
        """Flush, and release files and threads. It may be opened again."""
        ...

    async def get(self, letter_id: str) -> DeadLetterEntry | None:
        """Return one letter."""
        ...

    async def page(
        self, which: LetterFilter, *, after: str | None = None, limit: int = 100
    ) -> LetterPage:
        """Return at most `limit` letters behind the cursor `after`."""
        ...

    async def count(self, which: LetterFilter) -> int:
        """Return the number of letters."""
        ...

    def size(self) -> int:
        """Return the number of dead letters, at once and from any thread: for metrics."""
        ...

    async def groups(self, which: LetterFilter) -> Sequence[LetterGroup]:
        """Group letters by error type, handler and message type; the largest group first."""
        ...

    async def head(self) -> str:
        """Return the cursor of the newest letter, for `LetterFilter.upto`."""
        ...

    async def change(
        self, letter_id: str, step: Step, *, successor: DeadLetterEntry | None = None
    ) -> DeadLetterEntry | None:
        """Replace one letter by what `step` makes of it; return it, or `None` if there is none.

        In one go, also across processes, and together with adding `successor`: both or
        neither. `step` may be called again. A letter that it makes `REPLAYING` is claimed by
        this process, and is dead again when the process has ended.
        """
        ...

    async def release(self) -> int:
        """Make letters dead again whose process ended while it replayed them; return how many."""
        ...

    async def put(self, letters: Sequence[DeadLetterEntry]) -> int:
        """Add those whose ids are new, all or none; return how many were.

        Raises:
            DeadLetterStoreError: They do not fit.
        """
        ...


class BoundedStore:
    """What all stores of msgbus have in common: a bound, and listeners to what is lost by it.

    Args:
        max_size: Letters to keep; `None` for no bound.
        overflow: What is done with one letter too many.

    Raises:
        ConfigurationError: `max_size` is not above 0.
    """

    def __init__(self, max_size: int | None, overflow: Overflow) -> None:
        if max_size is not None and max_size < 1:
            message = f"max_size is {max_size}; it must be above 0, or None."
            raise ConfigurationError(message)
        self.max_size = max_size
        self.overflow = Overflow(overflow)
        self.is_full = f"the store is full ({max_size} letters)"
        """Why a letter was lost."""
        self._listeners: list[Callable[[Notice], None]] = []

    def listen(self, listener: Callable[[Notice], None]) -> None:
        """Tell about every letter that is dropped or refused, from whichever thread."""
        self._listeners.append(listener)

    def tell(self, notices: Sequence[Notice]) -> None:
        """Tell all who listen."""
        for notice in notices:
            for listener in self._listeners:
                with suppress(Exception):  # a listener's trouble is its own
                    listener(notice)


# -- changes of a letter -----------------------------------------------------------------------


def added(old: DeadLetterEntry | None, letter: DeadLetterEntry) -> DeadLetterEntry:
    """Add a letter, perhaps again: attempts add up, the last error counts, it is dead."""
    if old is None:
        return letter
    was_counted = old.note == REPLAY_FAILED and old.status is LetterStatus.DEAD
    # The failure of a replay: whether the first caller had an answer stays as it was.
    of_replay = was_counted or old.status is LetterStatus.REPLAYING
    return replace(
        letter,
        attempts=old.attempts + letter.attempts - was_counted,
        first_attempt=min(old.first_attempt, letter.first_attempt),
        answered=old.answered if of_replay else letter.answered,
        replays=old.replays,
        offset=letter.offset or old.offset,
        status=LetterStatus.DEAD,
        note=None,
    )


def claimed(old: DeadLetterEntry) -> DeadLetterEntry:
    """Claim a letter for a replay; unchanged if it is not dead."""
    if old.status is not LetterStatus.DEAD:
        return old
    # Counted before the delivery, which may end the process.
    return replace(old, status=LetterStatus.REPLAYING, replays=old.replays + 1, note=None)


def settled(
    old: DeadLetterEntry,
    claim: DeadLetterEntry,
    error: BaseException | None = None,
    now: datetime | None = None,
) -> DeadLetterEntry:
    """Settle a replay that ended so; unchanged if the message was dead-lettered again.

    `error` is what the handler raised, why it was not called, or a cancellation.
    """
    if old.status is not LetterStatus.REPLAYING or old.replays != claim.replays:
        return old
    if error is None:
        return replace(old, status=LetterStatus.REPLAYED)
    dead = replace(old, status=LetterStatus.DEAD)
    if isinstance(error, UndeliverableLetterError):
        return replace(dead, replays=old.replays - 1)  # as it was before
    if not isinstance(error, Exception):
        return dead
    return replace(
        dead,
        note=REPLAY_FAILED,
        attempts=old.attempts + 1,
        error=redact_exception(error),
        error_type=type(error).__name__,
        traceback=redacted_traceback(error),
        last_attempt=now or old.last_attempt,
    )


def edited(old: DeadLetterEntry, successor: DeadLetterEntry) -> DeadLetterEntry:
    """Mark a letter that another one stands in for.

    Raises:
        LetterStateError: It is not dead.
    """
    _require_dead(old, wanted="edited")
    return replace(old, status=LetterStatus.EDITED, note=f"see {successor.letter_id}")


def discarded(old: DeadLetterEntry, reason: str) -> DeadLetterEntry:
    """Discard a letter; one that is discarded already stays as it is.

    Raises:
        LetterStateError: It is neither dead nor discarded.
    """
    if old.status is LetterStatus.DISCARDED:
        return old
    _require_dead(old, wanted="discarded")
    return replace(old, status=LetterStatus.DISCARDED, note=reason)


def unanswered(old: DeadLetterEntry) -> DeadLetterEntry:
    """Note that its caller got no answer after all, so that it may be replayed with others."""
    return replace(old, answered=False)


def _require_dead(letter: DeadLetterEntry, *, wanted: str) -> None:
    if letter.status is not LetterStatus.DEAD:
        raise LetterStateError(letter.letter_id, status=letter.status.value, wanted=wanted)
