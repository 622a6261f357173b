"""`Replayer`: hands dead letters to their handlers once more, and stores the outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, TypeAlias, final

import anyio

from msgbus.errors import (
    DeadLetterStoreError,
    UndeliverableLetterError,
    UnreadableLetterError,
)
from msgbus.resilience.dead_letters.entry import DeadLetterEntry, LetterStatus, moment
from msgbus.resilience.dead_letters.filters import LetterFilter
from msgbus.resilience.dead_letters.store import DeadLetterStore, claimed, settled
from msgbus.runtime.clock import Clock

Redeliver: TypeAlias = Callable[[DeadLetterEntry], Awaitable[object]]
"""Hands a letter's message to its handler; returns its reply, or raises what it raised.

Raises `UndeliverableLetterError` if that handler cannot be reached."""

OnSettled: TypeAlias = Callable[[], Awaitable[object]]
"""Called when a letter has changed: messages that were parked behind it may go on."""

OnProgress: TypeAlias = Callable[[int, int], object]
"""Called with the number of letters that are through, and of all."""

PAGE: Final = 100


@final
@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Outcome of one replay."""

    letter: DeadLetterEntry
    """The letter as it is now."""

    status: Literal["succeeded", "failed", "skipped"]
    error: Exception | None = None
    """What the handler raised, or why the message could not be read."""

    reason: str | None = None
    """Why it was skipped."""

    value: object = None
    """Reply of the handler of a command."""

    @property
    def succeeded(self) -> bool:
        """Whether the handler handled it."""
        return self.status == "succeeded"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LetterReplayReport:
    """Outcome of many replays: `matched` is the sum of the other three counts."""

    matched: int
    succeeded: int
    failed: int
    skipped: int
    errors: Mapping[str, int]
    """Failures by the type of their error."""

    reasons: Mapping[str, int]
    """Skipped letters by reason."""

    dry_run: bool = False
    """Nothing was delivered: `succeeded` are those that would be, `failed` cannot be read."""


@final
class _Tally:
    """Counts outcomes."""

    def __init__(self, total: int, progress: OnProgress | None) -> None:
        self._total = total
        self._progress = progress
        self._counts: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()

    def add(self, status: str, error: Exception | None = None, reason: str | None = None) -> None:
        """Count an outcome, with the error or the reason of it."""
        self._counts[status] += 1
        if error is not None:
            self._errors[type(error).__name__] += 1
        if reason is not None:
            self._reasons[reason] += 1
        if self._progress is not None:
            done = self._counts.total()
            self._progress(done, max(self._total, done))

    def report(self, *, dry_run: bool) -> LetterReplayReport:
        """Return the counts."""
        return LetterReplayReport(
            matched=self._counts.total(),
            succeeded=self._counts["succeeded"],
            failed=self._counts["failed"],
            skipped=self._counts["skipped"],
            errors=dict(self._errors),
            reasons=dict(self._reasons),
            dry_run=dry_run,
        )


@final
class Replayer:
    """Claims letters, hands them over, and stores how it went."""

    def __init__(self, store: DeadLetterStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.on_settled: OnSettled = _nothing

    async def replay(self, letter: DeadLetterEntry, redeliver: Redeliver) -> ReplayOutcome:
        """Hand one letter's message to its handler, unless it is done or somebody else does."""
        try:
            _ = letter.message
            claim, is_ours = await self._claim(letter)
        except UnreadableLetterError as error:
            return ReplayOutcome(letter, "failed", error)
        except UndeliverableLetterError as error:
            return ReplayOutcome(letter, "skipped", reason=error.reason)
        if claim is None:
            return ReplayOutcome(letter, "skipped", reason="gone")
        if is_ours:
            return await self._deliver(letter, claim, redeliver)
        is_theirs = claim.status is LetterStatus.REPLAYING
        reason = "being replayed" if is_theirs else f"already {claim.status.value}"
        return ReplayOutcome(claim, "skipped", reason=reason)

    async def _deliver(
        self, letter: DeadLetterEntry, claim: DeadLetterEntry, redeliver: Redeliver
    ) -> ReplayOutcome:
        error: Exception | None = None
        value: object = None
        try:
            value = await redeliver(letter)
        except Exception as raised:  # the border to the handler
            error = raised
        except BaseException as cancelled:  # not failed; and the letter must not stay claimed
            await self._settle(claim, cancelled)
            raise
        now_is = await self._settle(claim, error)
        if isinstance(error, UndeliverableLetterError):
            return ReplayOutcome(now_is, "skipped", reason=error.reason)
        # Dead although nothing was raised: somebody added it again meanwhile.
        succeeded = error is None and now_is.status is not LetterStatus.DEAD
        return ReplayOutcome(now_is, "succeeded" if succeeded else "failed", error, value=value)

    async def _claim(self, letter: DeadLetterEntry) -> tuple[DeadLetterEntry | None, bool]:
        """Return the letter as it is now, and whether this replay has claimed it."""
        is_ours = False

        def claim(old: DeadLetterEntry) -> DeadLetterEntry:
            nonlocal is_ours
            new = claimed(old)
            is_ours = new is not old
            return new

        return await self._store.change(letter.letter_id, claim), is_ours

    async def _settle(self, claim: DeadLetterEntry, error: BaseException | None) -> DeadLetterEntry:
        """Store how it ended, whoever has lost interest meanwhile; return the letter."""
        now = moment(self._clock.time())
        step = partial(settled, claim=claim, error=error, now=now)
        letter = replace(step(claim), subscription="")
        with anyio.CancelScope(shield=True):
            found = await self._store.change(claim.letter_id, step)
            if found is not None:
                letter = found
            elif letter.status is LetterStatus.REPLAYED:
                # The handler acknowledged it in a transaction; only the record is missing.
                await self._store.put([letter])
            if claim.subscription:
                await self.on_settled()
        return letter

    async def replay_all(
        self,
        which: LetterFilter,
        redeliver: Redeliver,
        *,
        answered: bool,
        rate: float | None,
        dry_run: bool,
        progress: OnProgress | None,
    ) -> LetterReplayReport:
        """Replay every letter that fits and is there now, once, in the order in which they came."""
        tally = _Tally(await self._store.count(which), progress)
        due = self._clock.now()
        cursor: str | None = None
        while True:
            page = await self._store.page(which, after=cursor, limit=PAGE)
            for letter in page.letters:
                if letter.answered and not answered:
                    tally.add("skipped", reason="answered")
                    continue
                if rate is not None and not dry_run:
                    # The token first, then the letter: a claim must not wait for its turn.
                    due = await self._pace(due, 1 / rate)
                outcome = await self._one_of_many(letter, None if dry_run else redeliver)
                tally.add(outcome.status, outcome.error, outcome.reason)
            for damage in page.damaged:
                tally.add("failed", damage)
            cursor = page.cursor
            if cursor is None:
                return tally.report(dry_run=dry_run)

    async def _one_of_many(
        self, letter: DeadLetterEntry, redeliver: Redeliver | None
    ) -> ReplayOutcome:
        """Replay one, or only read it; what goes wrong with it must not stop the others."""
        try:
            if redeliver is not None:
                return await self.replay(letter, redeliver)
            _ = letter.message
        except (DeadLetterStoreError, UnreadableLetterError) as error:
            return ReplayOutcome(letter, "failed", error)
        return ReplayOutcome(letter, "succeeded")

    async def _pace(self, due: float, interval: float) -> float:
        """Wait until `due`; return when the next letter is due."""
        now = self._clock.now()
        if due > now:
            await self._clock.sleep(due - now)
        return max(due, now) + interval


async def _nothing() -> None:
    pass
