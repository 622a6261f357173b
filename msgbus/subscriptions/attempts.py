"""`AttemptRunner`: workers that run attempts to handle messages, and what follows from each."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import anyio
import anyio.lowlevel

from msgbus.errors import BusStateError, CircuitOpenError, Refusal, StaleError
from msgbus.journal.operations import Operation, Reply
from msgbus.journal.records import DeliveryRecord, Outcome, State
from msgbus.runtime.token_bucket import TokenBucket
from msgbus.subscriptions.decision import FailureDecision, Next, decide, reason_of
from msgbus.subscriptions.failures import error_text, log_failure, outcome_of
from msgbus.subscriptions.figures import Figures
from msgbus.subscriptions.rules import (
    Deliver,
    DeliveryRules,
    Describe,
    NotAttemptedError,
    OnDeadLetter,
    OnFinalFailure,
)
from msgbus.subscriptions.state import SubscriptionState
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.runtime.event_loop import LoopReply, Runtime, Task
    from msgbus.subscriptions.gate import AloneGate
    from msgbus.subscriptions.in_flight import InFlight

S = TypeVar("S", bound=SubscriptionState)

YIELD_AFTER: Final = 64
"""Deliveries after which a worker lets other tasks run, if its handler never waits."""

AGAIN: Final = 0.5
"""Seconds after which a journal that failed is asked again."""

SOONEST: Final = 0.1
"""Seconds after which an open circuit is asked again, at least."""

LONGEST: Final = 60.0
"""Seconds after which an open circuit, or a wall clock that may have jumped, is asked again."""


class AttemptRunner(Generic[S]):
    """Runs the deliveries of one subscription in this process, once they are ready.

    Args:
        state: What the subscription knows of its messages.
        deliver: Handles one message.
        rules: What follows from a failure.
        gate: Shared by all subscriptions of the process.
        letter: Describes a dead letter.
        handler: Name of the handler in the records of deliveries.
    """

    def __init__(
        self,
        state: S,
        deliver: Deliver,
        rules: DeliveryRules,
        gate: AloneGate,
        letter: Describe,
        handler: str,
    ) -> None:
        self.state = state
        self.handler = handler
        """Name of the handler in the records of deliveries."""
        self.on_final_failure: OnFinalFailure = lambda one, error: None  # noqa: ARG005
        self.on_dead_letter: OnDeadLetter | None = None
        self.figures = Figures()
        self.last_error: str | None = None
        """Text of the last error of the journal, redacted."""
        self.blocked_at: int | None = None
        """Offset of the message at which `Poison.BLOCK` has stopped it."""
        self.flush: Callable[[], object] = lambda: None
        """Have a commit soon, so that what is settled is written."""
        self._holds = 0
        """Number of those who have it begin nothing for a while."""
        self.is_closing = False
        """It begins nothing more."""
        self._ended = anyio.Event()
        self._flushes_when_idle = False
        self._deliver = deliver
        self._rules = rules
        self._gate = gate
        self._letter = letter
        self._clock = state.clock
        self._rate: TokenBucket | None = None
        if rules.rate_limit is not None:
            self._rate = TokenBucket(rules.rate_limit, rules.burst, self._clock.now())
        self.is_paused = False
        self._is_full = False
        """The last claim took all that there was room for."""
        self._news = anyio.Event()
        """Set when there may be something to get from the journal."""
        self._runtime: Runtime | None = None
        self._tasks: dict[Task, None] = {}  # in order, so that a simulation can be repeated
        self._workers = 0
        self._idle: list[LoopReply] = []
        """Workers that wait for a delivery."""

    @property
    def name(self) -> str:
        """Name of the subscription."""
        return self.state.name

    @property
    def task_count(self) -> int:
        """Number of tasks that it runs."""
        return len(self._tasks)

    @property
    def _has_replies(self) -> bool:
        """Whether results are stored: those of enqueued commands."""
        return False

    # -- workers ---------------------------------------------------------------------------------

    @property
    def _is_stopped(self) -> bool:
        is_paused = self.is_paused or self._holds > 0
        return is_paused or self.is_closing or self.blocked_at is not None

    def start_workers(self) -> None:
        """Let deliveries begin that are ready; called on the event loop."""
        if not self.state.ready or self._is_stopped or self.state.member is None:
            return
        while self._idle:
            woken = self._idle.pop()
            if not woken.done():  # else it was cancelled
                woken.set_result(None)
                return  # one is enough: it wakes the next if there is more
        if self._workers < self.state.max_in_flight:
            assert self._runtime is not None  # noqa: S101 (set by `begin`)
            self._workers += 1
            own: list[Task] = []
            own.append(self._runtime.spawn(self._work, own, name=f"msgbus {self.name} worker"))
            self._tasks[own[0]] = None

    async def _work(self, own: list[Task]) -> None:
        ready, gate, turns = self.state.ready, self._gate, 0
        try:
            while True:
                while not ready or self._is_stopped:
                    await self._wait_for_more()
                if (gate.is_closed or self._rate is not None) and await self._had_to_wait():
                    continue
                one = ready.popleft()
                one.worker = own[0]
                if self._idle or self._workers < self.state.max_in_flight:
                    self.start_workers()
                await self.run(one)
                if self._wants_more:
                    self._news.set()
                turns += 1
                if turns % YIELD_AFTER == 0:
                    await anyio.lowlevel.checkpoint()
        finally:
            if own[0] in self._tasks:  # not one of a membership that was lost
                del self._tasks[own[0]]
                self._workers -= 1
                self.start_workers()

    async def _had_to_wait(self) -> bool:
        """Wait while a delivery runs alone, or for the rate limit; else count one more for it."""
        if self._gate.is_closed:
            await self._gate.opened()
            return True
        if self._rate is None:
            return False
        pause = self._rate.wait(self._clock.now())
        if pause > 0:
            await self._clock.sleep(pause)
            return True
        self._rate.take(self._clock.now())
        return False

    async def _wait_for_more(self) -> None:
        assert self._runtime is not None  # noqa: S101 (set by `begin`)
        idle, woken = self._idle, self._runtime.reply()
        idle.append(woken)
        try:
            await woken
        finally:
            if woken in idle:  # it was cancelled
                idle.remove(woken)

    @property
    def _wants_more(self) -> bool:
        """Whether there is room, and messages wait in the journal."""
        return self.state.has_low_stock and (self._is_full or self.state.is_behind)

    def _spawn(self, function: Callable[[], Coroutine[Any, Any, None]], what: str) -> Task:
        assert self._runtime is not None  # noqa: S101 (set by `begin`)
        own: list[Task] = []

        async def run() -> None:
            try:
                await function()
            finally:
                self._tasks.pop(own[0], None)

        own.append(self._runtime.spawn(run, name=f"msgbus {self.name} {what}"))
        self._tasks[own[0]] = None
        return own[0]

    # -- one attempt -----------------------------------------------------------------------------

    async def run(self, one: InFlight, *, alone: bool = False) -> None:
        """Run one attempt, and do what follows from it."""
        counts = self.state.counts
        counts.delivered += 1
        counts.redelivered += one.attempt > 1
        begun, figures, gate = self._clock.now(), self.figures, self._gate
        figures.running += 1
        gate.running += 1
        one.is_running = True
        try:
            reply = await self._deliver(one)
        except StaleError:
            counts.stale += 1
            self.state.abandon([one])
        except Refusal as refusal:
            self._refused(one, refusal, begun)
        except (CircuitOpenError, NotAttemptedError) as error:
            self._not_attempted(one, error)
        except Exception as error:
            self._raised(one, error, begun, alone=alone)
        else:
            self._handled(one, reply, begun)
        finally:
            one.is_running = False
            figures.running -= 1
            gate.running -= 1
            if gate.is_closed or self.is_closing or self._holds or self._flushes_when_idle:
                self._tell_of_end()

    def _tell_of_end(self) -> None:
        """Wake those who wait for the end of deliveries."""
        self._gate.notify()
        self._ended.set()
        if self._flushes_when_idle:
            self.flush_when_idle()

    def flush_when_idle(self) -> None:
        """Have a commit as soon as nothing is in flight: somebody waits for that."""
        left = self.figures.running if self._is_stopped else self.state.in_flight
        self._flushes_when_idle = bool(left)
        if not self._flushes_when_idle:
            self.flush()

    async def ended(self) -> None:
        """Return once nothing runs; only while it begins nothing more."""
        while self.figures.running:
            self._ended = anyio.Event()
            await self._ended.wait()

    def _handled(self, one: InFlight, reply: Reply | None, begun: float) -> None:
        note = None
        if not one.is_lost and self._rules.record == "all":
            note = self._record(one, Outcome.OK, begun)
        if not one.is_ended:
            if self.state.acknowledge(one, reply, note):
                self.flush()
            return
        if note is not None:  # its own commit has ended it
            self.state.note(note)
        if one.row is not None:
            self._news.set()  # its own commit may have let the next of its key go

    def _refused(self, one: InFlight, refusal: Refusal, begun: float) -> None:
        """Acknowledge a message whose handler has answered that it will not handle it."""
        if one.is_ended:
            return
        text = error_text(refusal)
        self._note(one, Outcome.REFUSED, begun, text)
        self.state.counts.refused += 1
        is_awaited = self.state.acknowledge(one, self._reply(one, text))
        self.on_final_failure(one, refusal)
        if is_awaited:
            self.flush()

    def _not_attempted(self, one: InFlight, error: CircuitOpenError | NotAttemptedError) -> None:
        """Leave a message to others, or wait for an open circuit in the journal."""
        if isinstance(error, CircuitOpenError):
            # One that is forced open may be reset at any time, so it is asked again.
            due = self._clock.time() + min(max(error.retry_after, SOONEST), LONGEST)
            self.state.set_aside(
                one, State.WAITING, due=due, attempt=one.attempt - 1, error=error_text(error)
            )
        elif not one.is_ended:
            self.state.give_back([one])
        self.flush()

    def _reply(self, one: InFlight, error: str) -> Reply | None:
        if not self._has_replies:
            return None
        return Reply(one.record.message_id, self._clock.time(), error=error)

    def _note(
        self, one: InFlight, outcome: Outcome, begun: float | None, error: str | None = None
    ) -> None:
        if self._rules.record != "none":
            self.state.note(self._record(one, outcome, begun, error))

    def _record(
        self, one: InFlight, outcome: Outcome, begun: float | None, error: str | None = None
    ) -> DeliveryRecord:
        # A decision after the last attempt took no time: a run would be one more attempt.
        run = 0.0 if begun is None else self._clock.now() - begun
        now, record = self._clock.time(), one.record
        wait = max(now - run - record.time, 0.0)
        offset = record.offset or None
        return DeliveryRecord(
            record.message_id, self.handler, one.attempt, outcome, wait, run, now, error, offset
        )

    # -- failures --------------------------------------------------------------------------------

    def _raised(self, one: InFlight, error: Exception, begun: float, *, alone: bool) -> None:
        if not one.is_lost:
            self._note(one, outcome_of(error), begun, error_text(error))
        if not one.is_ended:  # its own commit may have ended it
            self._failed(one, error, alone=alone)

    def _failed(self, one: InFlight, error: Exception | None, *, alone: bool) -> None:
        state, counts = self.state, self.state.counts
        counts.failed += 1
        counts.timed_out += error is not None and outcome_of(error) is Outcome.TIMED_OUT
        decision = decide(self._rules.retry, self._rules.on_poison, one.attempt, error)
        if decision.then is Next.RETRY and alone:
            decision = FailureDecision(Next.LATER, decision.pause)
        log_failure(one, error, decision, is_command=self._has_replies)
        if decision.then is Next.RETRY:
            counts.retried += 1
            one.attempt += 1
            self._spawn(partial(self._retry, one, decision.pause), "retry")
        elif decision.then is Next.LATER:
            counts.retried += 1
            due = self._clock.time() + decision.pause
            state.set_aside(one, State.WAITING, due=due, error=error_text(error))
            self.flush()
        elif decision.then is Next.BLOCK:
            self.blocked_at = one.offset
            one.attempt += 1  # that of `resume`
            state.ready.appendleft(one)
        elif decision.then is Next.DEAD:
            self._dead_letter(one, error)
        else:
            counts.dropped += 1
            state.acknowledge(one, self._reply(one, error_text(error, one.attempt)))
            self.on_final_failure(one, error)

    async def _retry(self, one: InFlight, pause: float) -> None:
        figures = self.figures
        figures.retrying += 1
        try:
            await self._clock.sleep(pause)
        finally:
            figures.retrying -= 1
        if not one.is_ended:
            self.state.ready.append(one)
            self.start_workers()

    def _dead_letter(self, one: InFlight, error: Exception | None) -> None:
        try:
            beside = self._written_beside(one, error)
        except Exception as failure:  # code of the user: it is asked again, and nothing is written
            self.journal_failed(failure)
            self._spawn(partial(self._dead_letter_later, one, error), "dead letter")
            return
        self.state.counts.dead_lettered += 1
        now, text = self._clock.time(), error_text(error, one.attempt)
        self._note(one, Outcome.DEAD_LETTERED, None, text)
        reason = reason_of(self._rules.retry, error)
        letter = self._letter(one, error, now)._replace(reason=reason)
        self.state.set_aside(one, State.DEAD, error=text, letter=letter, beside=beside)
        self.on_final_failure(one, error)
        self.flush()

    def _written_beside(self, one: InFlight, error: Exception | None) -> list[Operation]:
        """Return what goes into the commit of a dead letter."""
        reply = self._reply(one, error_text(error, one.attempt))
        beside: list[Operation] = [] if reply is None else [reply]
        if self.on_dead_letter is not None:
            beside += self.on_dead_letter(one.record, error, one.attempt)
        return beside

    async def _dead_letter_later(self, one: InFlight, error: Exception | None) -> None:
        await self._clock.sleep(AGAIN)
        if not one.is_ended:
            self._dead_letter(one, error)

    def dead_letter_running(self) -> None:
        """Dead-letter what still runs when the process stops, if it is delivered once only."""
        if self._rules.is_once:
            for one in [one for one in self.state.in_flight if one.worker is not None]:
                message = (
                    f"{self.handler} was cancelled at {one.record.name} {one.record.message_id}, "
                    f"as its process stopped; it is delivered at most once."
                )
                self._dead_letter(one, BusStateError(message))

    def journal_failed(self, error: Exception) -> None:
        """Count and log an error of the journal."""
        self.state.counts.errors += 1
        self.last_error = redact_exception(error)
        log.error("subscription_failed", subscription=self.state.name, error=self.last_error)
