"""Handing dead letters to their handlers once more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

import anyio

from msgbus.errors import (
    DeadLetterStoreError,
    MsgBusError,
    UndeliverableLetterError,
    UnreadableLetterError,
)
from msgbus.resilience import claims
from msgbus.resilience.claims import Claim
from msgbus.resilience.letters import DeadLetterEntry, LetterStatus, at
from msgbus.resilience.stores import (
    DeadLetterStore,
    LetterFilter,
    Record,
    Settlement,
    claimed,
    settled,
)
from msgbus.runtime.clock import Clock
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.tracebacks import redacted_traceback

Redeliver: TypeAlias = Callable[[DeadLetterEntry], Awaitable[object]]
"""Hands a letter's message to the handler it is of; gives its reply, or raises what it raised.

Raises `UndeliverableLetterError` if that handler cannot be reached."""

Progress: TypeAlias = Callable[[int, int], object]
"""Called with how many letters are through, and how many there are."""

PAGE: Final = 100


@final
@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """What became of one replay."""

    letter: DeadLetterEntry
    """The letter as it is now."""

    status: Literal["succeeded", "failed", "skipped"]
    error: Exception | None = None
    """What the handler raised, or why the message could not be read."""

    reason: str | None = None
    """Why it was skipped."""

    value: object = None
    """What the handler of a command replied."""

    @property
    def succeeded(self) -> bool:
        """Whether the handler handled it."""
        return self.status == "succeeded"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LetterReplayReport:
    """What became of many: `matched` is the sum of the other three counts."""

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
    """Outcomes, counted."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._counts: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()

    def note(self, outcome: ReplayOutcome) -> None:
        self._counts[outcome.status] += 1
        if outcome.error is not None:
            self._errors[type(outcome.error).__name__] += 1
        if outcome.reason is not None:
            self._reasons[outcome.reason] += 1
        self._tell()

    def damaged(self, error: MsgBusError) -> None:
        """A letter that its store cannot read."""
        self._counts["failed"] += 1
        self._errors[type(error).__name__] += 1
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            done = self._counts.total()
            self._progress(done, max(self._total, done))

    def report(self, *, dry_run: bool) -> LetterReplayReport:
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
    """Claims letters, hands them over, and notes how it went."""

    def __init__(self, store: DeadLetterStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def release(self) -> int:
        """Make letters dead again whose replay ended with its process; how many."""
        now = self._clock.time()
        return await self._store.release(lambda claim: claim.is_void(now))

    async def replay(self, letter: DeadLetterEntry, redeliver: Redeliver) -> ReplayOutcome:
        """Hand one letter's message to its handler, unless it is done or somebody else does."""
        try:
            _ = letter.message
        except UnreadableLetterError as error:
            return ReplayOutcome(letter, "failed", error)
        claim = Claim(letter.letter_id, claims.new_owner(), self._clock.time())
        # Before it is stored: a claim of this process that is not in flight is void.
        claims.begin(claim)
        try:
            return await self._claim_and_deliver(letter, claim, redeliver)
        finally:
            claims.end(claim)

    async def _claim_and_deliver(
        self, letter: DeadLetterEntry, claim: Claim, redeliver: Redeliver
    ) -> ReplayOutcome:
        is_ours = False

        def take(record: Record) -> Record:
            nonlocal is_ours
            taken = claimed(record, claim)
            is_ours = taken is not record
            return taken

        found = await self._store.change(letter.letter_id, take)
        if found is None:
            return ReplayOutcome(letter, "skipped", reason="gone")
        if not is_ours:
            is_theirs = found.status is LetterStatus.REPLAYING
            reason = "being replayed" if is_theirs else f"already {found.status.value}"
            return ReplayOutcome(found, "skipped", reason=reason)
        error: Exception | None = None
        value: object = None
        try:
            value = await redeliver(letter)
        except Exception as raised:  # the border to the handler
            error = raised
        except BaseException:
            # Cancelled, not failed. The letter must not stay claimed.
            with anyio.CancelScope(shield=True):
                await self._settle(claim, found, Settlement(outcome="given back"))
            raise
        # It has ended: that must be noted, whoever has lost interest meanwhile.
        now_is = found
        with anyio.CancelScope(shield=True):
            now_is = await self._settle(claim, found, self._settlement(error))
        if isinstance(error, UndeliverableLetterError):
            return ReplayOutcome(now_is, "skipped", reason=error.reason)
        # Dead although nothing was raised: somebody added it again meanwhile.
        succeeded = error is None and now_is.status is not LetterStatus.DEAD
        return ReplayOutcome(now_is, "succeeded" if succeeded else "failed", error, value=value)

    async def _settle(
        self, claim: Claim, letter: DeadLetterEntry, settlement: Settlement
    ) -> DeadLetterEntry:
        found = await self._store.change(
            letter.letter_id, lambda record: settled(record, claim.owner, settlement)
        )
        return letter if found is None else found

    def _settlement(self, error: Exception | None) -> Settlement:
        if error is None:
            return Settlement(outcome="handled")
        if isinstance(error, UndeliverableLetterError):
            return Settlement(outcome="not reached")
        return Settlement(
            outcome="failed",
            error=redact_exception(error),
            error_type=type(error).__name__,
            traceback=redacted_traceback(error),
            at=at(self._clock.time()),
        )

    async def replay_all(
        self,
        which: LetterFilter,
        redeliver: Redeliver,
        *,
        answered: bool,
        rate: float | None,
        dry_run: bool,
        progress: Progress | None,
    ) -> LetterReplayReport:
        """Every letter that fits and is there now, once, in the order in which they died."""
        tally = _Tally(await self._store.count(which), progress)
        due = self._clock.now()
        cursor: str | None = None
        while True:
            page = await self._store.page(which, after=cursor, limit=PAGE)
            for letter in page.letters:
                if letter.answered and not answered:
                    tally.note(ReplayOutcome(letter, "skipped", reason="answered"))
                elif dry_run:
                    tally.note(_readable(letter))
                else:
                    if rate is not None:
                        # The token first, then the letter: a claim must not wait for its turn.
                        due = await self._pace(due, 1 / rate)
                    tally.note(await self._one_of_many(letter, redeliver))
            for error in page.damaged:
                tally.damaged(error)
            cursor = page.cursor
            if cursor is None:
                return tally.report(dry_run=dry_run)

    async def _one_of_many(self, letter: DeadLetterEntry, redeliver: Redeliver) -> ReplayOutcome:
        try:
            return await self.replay(letter, redeliver)
        except DeadLetterStoreError as error:  # of this letter: the others have their turn
            return ReplayOutcome(letter, "failed", error)

    async def _pace(self, due: float, interval: float) -> float:
        """Wait for this letter's turn; the turn of the next."""
        now = self._clock.now()
        if due > now:
            await self._clock.sleep(due - now)
        return max(due, now) + interval


def _readable(letter: DeadLetterEntry) -> ReplayOutcome:
    try:
        _ = letter.message
    except UnreadableLetterError as error:
        return ReplayOutcome(letter, "failed", error)
    return ReplayOutcome(letter, "succeeded")
