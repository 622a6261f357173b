"""`SubscriptionLoop`: gets messages from the journal and runs their deliveries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar, final

import anyio
import anyio.lowlevel

from msgbus._next.journal.errors import StaleError
from msgbus._next.journal.operations import Drop, Put, Reply
from msgbus._next.journal.records import DeliveryRecord, Letter, Outcome, State
from msgbus._next.subscriptions.decision import Next, RetryRule, decide
from msgbus._next.subscriptions.partitioned import PartitionedState
from msgbus._next.subscriptions.shared import SharedState
from msgbus._next.subscriptions.state import Settlement, SubscriptionState
from msgbus.errors import JournalError
from msgbus.handlers.delivery import Poison
from msgbus.runtime.timeouts import time_limit
from msgbus.runtime.token_bucket import TokenBucket
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus._next.journal.ports import Journal, Scan
    from msgbus._next.journal.records import Cursor, Member, Record
    from msgbus._next.subscriptions.gate import Gate
    from msgbus._next.subscriptions.in_flight import InFlight
    from msgbus.runtime.event_loop import Runtime, Task

S = TypeVar("S", bound=SubscriptionState)

Deliver = Callable[["InFlight"], Awaitable[Reply | None]]
"""Handles one message: returning acknowledges it, raising is a failed attempt."""

Describe = Callable[["InFlight", Exception | None, float], Letter]
"""Describes a dead letter: the message, its error (none if its process ended), and the time."""

YIELD_AFTER: Final = 64
"""Deliveries after which a worker lets other tasks run, if its handler never waits."""

AGAIN: Final = 0.1
"""Seconds after which a journal that failed is asked again."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRules:
    """How a subscription delivers, beside what it selects."""

    retry: RetryRule
    on_poison: Poison = Poison.DEAD_LETTER
    ack_timeout: float | None = 30.0
    """Seconds that a row which must run alone waits for what runs beside it."""
    rate_limit: float | None = None
    """Deliveries per second in this process."""
    burst: int = 1
    """Deliveries that may begin at once under `rate_limit` after a quiet time."""


def describe(one: InFlight, error: Exception | None, now: float) -> Letter:
    """Describe a dead letter by its error."""
    reason = "retries exhausted" if error is not None else "its process ended in every attempt"
    kind = "" if error is None else type(error).__name__
    return Letter(kind, reason, one.received, now)


def _offset(record: Record | int) -> int:
    return record if isinstance(record, int) else record.offset


def _text(error: Exception | None) -> str:
    return "The process ended." if error is None else redact_exception(error)


class SubscriptionLoop(ABC, Generic[S]):
    """Runs the deliveries of one subscription in this process.

    Args:
        journal: Where its messages are.
        state: What it knows of them.
        deliver: Handles one message.
        rules: What follows from a failure.
        gate: Shared by all subscriptions of the process.
        letter: Describes a dead letter.
    """

    def __init__(
        self,
        journal: Journal,
        state: S,
        deliver: Deliver,
        rules: DeliveryRules,
        gate: Gate,
        letter: Describe = describe,
    ) -> None:
        self.journal = journal
        self.state = state
        self.is_paused = False
        self.is_standby = False
        """A member of another version of the application has the subscription."""
        self.blocked_at: int | None = None
        """Offset of the message at which `Poison.BLOCK` has stopped it."""
        self.flush: Callable[[], object] = lambda: None
        """Have a commit soon, so that what is settled is written."""
        self._deliver = deliver
        self._rules = rules
        self._gate = gate
        self._letter = letter
        self._clock = state.clock
        self._rate = TokenBucket(rules.rate_limit, rules.burst, self._clock.now())
        self._runtime: Runtime | None = None
        self._tasks: dict[Task, None] = {}  # in order, so that a simulation can be repeated
        self._idle = 0
        self._workers = 0
        self._news = anyio.Event()
        self._more = anyio.Event()

    @property
    def name(self) -> str:
        """Name of the subscription."""
        return self.state.name

    @property
    def member(self) -> Member:
        """The membership under which it works.

        Raises:
            StaleError: It was lost.
        """
        member = self.state.member
        if member is None:
            raise StaleError(f"Subscription {self.name!r} has lost its membership.")
        return member

    @property
    def task_count(self) -> int:
        """Number of tasks that it runs."""
        return len(self._tasks)

    # -- life ------------------------------------------------------------------------------------

    def begin(self, runtime: Runtime, member: Member) -> None:
        """Start to deliver as this member."""
        self._runtime = runtime
        self.state.on_ready = self.start_workers
        self.state.on_rows = self.look
        self.state.begin(member)
        self._idle = self._workers = 0
        self._news = anyio.Event()
        self._news.set()
        self._spawn(self._pull, "pull")

    def end(self) -> None:
        """Cut off every handler at once; nothing more is written."""
        self.state.member = None
        tasks, self._tasks = self._tasks, {}
        for task in tasks:
            task.cancel()

    def look(self) -> None:
        """Look for something to do; called on the event loop."""
        self._news.set()
        self.start_workers()

    def pause(self) -> None:
        """Begin no further delivery."""
        self.is_paused = True

    def resume(self) -> None:
        """Go on after `pause`, or repeat the message at which it is blocked."""
        self.is_paused = False
        self.blocked_at = None
        self.look()

    def _spawn(self, function: Callable[[], Awaitable[None]], what: str) -> Task:
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

    # -- deliveries ------------------------------------------------------------------------------

    @property
    def _is_stopped(self) -> bool:
        return self.is_paused or self.blocked_at is not None

    def start_workers(self) -> None:
        """Let deliveries begin that are ready; called on the event loop."""
        if not self.state.ready or self._is_stopped or self.state.member is None:
            return
        if self._idle:
            self._more.set()
        elif self._workers < self.state.max_in_flight:
            self._workers += 1
            own: list[Task] = []
            own.append(self._spawn(partial(self._work, own), "worker"))

    async def _work(self, own: list[Task]) -> None:
        ready, gate, turns = self.state.ready, self._gate, 0
        try:
            while True:
                while not ready or self._is_stopped:
                    await self._wait_for_more()
                if gate.is_closed:
                    await gate.opened()
                    continue
                pause = self._rate.wait(self._clock.now())
                if pause > 0:
                    await self._clock.sleep(pause)
                    continue
                one = ready.popleft()
                self._rate.take(self._clock.now())
                one.worker = own[0]
                self.start_workers()
                gate.running += 1
                try:
                    await self.run(one)
                finally:
                    gate.leave()
                turns += 1
                if turns % YIELD_AFTER == 0:
                    await anyio.lowlevel.checkpoint()
        finally:
            if own[0] in self._tasks:  # not one of a membership that was lost
                self._workers -= 1
                self.start_workers()

    async def _wait_for_more(self) -> None:
        self._idle += 1
        if self._more.is_set():
            self._more = anyio.Event()
        try:
            await self._more.wait()
        finally:
            self._idle -= 1

    async def run(self, one: InFlight, *, alone: bool = False) -> None:
        """Run one attempt, and do what follows from it."""
        self.state.counts.delivered += 1
        begun = self._clock.now()
        try:
            reply = await self._deliver(one)
        except StaleError:
            self.state.counts.stale += 1
            self.state.abandon([one])
        except Exception as error:
            if not one.is_ended:
                self._note(one, Outcome.FAILED, begun, redact_exception(error))
                self._failed(one, error, alone=alone)
        else:
            self._handled(one, reply, begun)
        if self.state.has_low_stock and self._has_more:
            self._news.set()

    def _handled(self, one: InFlight, reply: Reply | None, begun: float) -> None:
        if not one.is_ended:
            self._note(one, Outcome.OK, begun)
            self.state.acknowledge(one, reply)
        elif one.row is not None:
            self._news.set()  # its own commit may have let the next of its key go
        if reply is not None:
            self.flush()

    def _note(
        self, one: InFlight, outcome: Outcome, begun: float, error: str | None = None
    ) -> None:
        run, now, record = self._clock.now() - begun, self._clock.time(), one.record
        wait = max(now - run - record.time, 0.0)
        note = DeliveryRecord(
            record.message_id, self.name, one.attempt, outcome, wait, run, now, error, one.offset
        )
        self.state.note(note)

    def _failed(self, one: InFlight, error: Exception | None, *, alone: bool) -> None:
        state, counts = self.state, self.state.counts
        counts.failed += 1
        decision = decide(self._rules.retry, self._rules.on_poison, one.attempt, error)
        if decision.then is Next.RETRY and not alone:
            counts.retried += 1
            self._spawn(partial(self._retry, one, decision.pause), "retry")
        elif decision.then in {Next.RETRY, Next.LATER}:
            counts.retried += 1
            due = self._clock.time() + decision.pause
            state.set_aside(one, State.WAITING, due=due, error=_text(error))
            self.flush()
        elif decision.then is Next.DEAD:
            self._dead_letter(one, error)
        elif decision.then is Next.DROP:
            state.acknowledge(one)
        else:
            self.blocked_at = one.offset
            state.ready.appendleft(one)

    def _dead_letter(self, one: InFlight, error: Exception | None) -> None:
        self.state.counts.dead_lettered += 1
        now, text = self._clock.time(), _text(error)
        reply = Reply(one.record.message_id, now, error=text) if self._has_replies else None
        letter = self._letter(one, error, now)
        self.state.set_aside(one, State.DEAD, error=text, letter=letter, reply=reply)
        self.flush()

    async def _retry(self, one: InFlight, pause: float) -> None:
        await self._clock.sleep(pause)
        if not one.is_ended:
            one.attempt += 1
            self.state.ready.append(one)
            self.start_workers()

    # -- getting messages ------------------------------------------------------------------------

    async def _pull(self) -> None:
        due: float | None = None
        while True:
            await self._wait_for_news(due)
            try:
                due = await self._look()
            except StaleError:
                due = None  # the member was ended: `on_lost` ends this task
            except JournalError as error:
                log.warning(
                    "subscription_failed", subscription=self.name, error=redact_exception(error)
                )
                due = self._clock.time() + AGAIN

    async def _wait_for_news(self, due: float | None) -> None:
        if not self._news.is_set():
            pause = None if due is None else max(due - self._clock.time(), 0.0)
            with time_limit(pause, self._clock):
                await self._news.wait()
        self._news = anyio.Event()

    async def _look(self) -> float | None:
        """Do what there is to do now; return when the next row is due."""
        if self.state.is_refused:
            await self._recover()
        if self._is_stopped or self.state.is_draining:
            return None
        partitions = self._partitions()
        if partitions is not None and not partitions:
            return None
        due = await self.journal.next_due(self.name, partitions)
        if due.has_suspects and await self._run_alone(partitions):
            return 0.0
        if due.time is not None and due.time <= self._clock.time() and await self._claim():
            return 0.0
        await self._read_on()
        self.start_workers()
        return (await self.journal.next_due(self.name, partitions)).time

    async def _run_alone(self, partitions: Collection[int] | None) -> bool:
        """Run one row with nothing beside it; return whether there may be another."""
        if not await self._gate.close(self._rules.ack_timeout):
            await self._acquit(partitions)
            return True
        try:
            claims = await self.journal.claim(
                self.member, self.name, 1, self._clock.time(), partitions=partitions, alone=True
            )
            for one in self.state.admit_claims(claims, alone=True):
                if self._rules.retry.pause(one.attempt - 1, None) is None:
                    one.attempt -= 1
                    self._failed(one, None, alone=True)
                else:
                    await self.run(one, alone=True)
            await self.journal.commit([], self.member)
        finally:
            self._gate.open()
        return bool(claims)

    async def _acquit(self, partitions: Collection[int] | None) -> None:
        """Let a row run beside others, as those have run for too long; nothing is counted."""
        now = self._clock.time()
        rows = await self.journal.due(self.name, now)
        for row in rows:
            if row.alone and (partitions is None or row.partition in partitions):
                moved = row.moved(State.WAITING, time=now, due=0.0, alone=False)
                await self.journal.commit([Put(moved)], self.member)
                return

    async def _recover(self) -> None:
        """Find out what was refused, and drop it."""
        self.state.is_refused = False
        self.state.head = await self.journal.head()
        await self.check_ownership()
        held: list[Settlement] = []
        for settlement in self.state.take_settled():
            if await self._holds(settlement):
                held.append(settlement)
            else:
                self.state.forget(settlement)
        self.state.settle_again(held)

    async def _holds(self, settlement: Settlement) -> bool:
        for operation in settlement.operations:
            if isinstance(operation, Drop | Put):
                row = operation.row
                wanted = row.version if isinstance(operation, Drop) else row.version - 1
                stored = await self.journal.row(row.subscription, row.offset)
                if (0 if stored is None else stored.version) != wanted:
                    return False
        return True

    async def check_ownership(self) -> None:
        """Drop what others own now."""

    def _partitions(self) -> Collection[int] | None:
        return None

    @property
    def _has_replies(self) -> bool:
        return False

    @property
    @abstractmethod
    def _has_more(self) -> bool:
        """Whether messages wait in the journal."""

    @abstractmethod
    async def _claim(self) -> bool:
        """Claim rows that are due; return whether there were any."""

    @abstractmethod
    async def _read_on(self) -> None:
        """Get new messages from the log."""


@final
class PartitionedLoop(SubscriptionLoop[PartitionedState]):
    """Delivers from the partitions that this process owns."""

    def _partitions(self) -> Collection[int] | None:
        return [number for number, one in self.state.owned.items() if not one.is_leaving]

    @property
    def _has_more(self) -> bool:
        return self.state.is_behind

    async def _claim(self) -> bool:
        claims = await self.journal.claim(
            self.member,
            self.name,
            self.state.max_in_flight,
            self._clock.time(),
            partitions=self._partitions(),
        )
        self.state.admit_claims(claims)
        self.start_workers()
        return bool(claims)

    async def _read_on(self) -> None:
        state = self.state
        await self._check_keys()
        while (page := state.next_page()) is not None:
            position, partitions = page
            scan = None
            try:
                scan = await self.journal.read(
                    position, state.room(), state.selection, [one.number for one in partitions]
                )
                scan = await self._without_done(scan)
            finally:
                state.take_page(partitions, scan)
            await self.journal.commit([], self.member)

    async def _without_done(self, scan: Scan) -> Scan:
        """Leave out messages that were handled before a seek."""
        if not self.state.selection.keeps_done or not scan.records:
            return scan
        kept = [await self.journal.row(self.name, _offset(one)) for one in scan.records]
        left = [one for one, row in zip(scan.records, kept, strict=True) if row is None]
        return scan._replace(records=left)

    async def _check_keys(self) -> None:
        """Let keys go on that have no row left."""
        state = self.state
        for key in list(state.unchecked):
            state.check(key)
            if not await self.journal.find(self.name, tuple(State), key=key, limit=1):
                state.unblock(key)

    async def check_ownership(self) -> None:
        """Drop partitions that others own now, and cut off their handlers."""
        self._lose(await self.journal.cursors(self.name))

    def _lose(self, cursors: Sequence[Cursor]) -> None:
        for one in self.state.lose({cursor.partition: cursor for cursor in cursors}):
            if one.worker is not None:
                one.worker.cancel()

    async def balance(self, members: Sequence[int]) -> None:
        """Own a fair part of the partitions: release what is too much, take what is free.

        Args:
            members: Ids of those who serve the subscription, this one among them.
        """
        state, name = self.state, self.name
        cursors = await self.journal.cursors(name)
        self._lose(cursors)  # a seek of another process has freed them
        least, rest = divmod(state.selection.partitions, len(members))
        most = least + (sorted(members).index(self.member.id) < rest)
        mine = [one for one in state.owned.values() if not one.is_leaving]
        for partition in mine[most:]:
            partition.is_leaving = True
        free = [one.partition for one in cursors if one.owner is None]
        for number in free[: max(most - len(mine), 0)]:
            cursor = await self.journal.acquire(self.member, name, number, state.selection)
            if cursor is not None:
                blocked = await self.journal.blocked_keys(name, number)
                state.add(cursor, blocked)
                self.look()
        if any(one.is_leaving for one in state.owned.values()):
            self.flush()


@final
class SharedLoop(SubscriptionLoop[SharedState]):
    """Delivers what this process claims."""

    _is_full = False
    """The last claim took all that there was room for."""

    @property
    def _has_replies(self) -> bool:
        return self.state.is_queue

    @property
    def _has_more(self) -> bool:
        return self._is_full or (
            not self.state.is_queue and self.state.feed.looked < self.state.head
        )

    async def check_ownership(self) -> None:
        """Read the cursor again before the next feed."""
        self.state.feed.forget()

    async def _claim(self) -> bool:
        state = self.state
        room = state.room()
        self._is_full = False
        if room <= 0 or not state.has_low_stock:
            self._is_full = True
            return False
        selection = None if state.is_queue else state.selection
        claims = await self.journal.claim(
            self.member, self.name, room, self._clock.time(), selection=selection
        )
        self._is_full = len(claims) == room
        state.admit_claims(claims)
        self.start_workers()
        return bool(claims)

    async def _read_on(self) -> None:
        state = self.state
        if state.is_queue:
            return
        while state.feed.looked < state.head and await self._claim():
            pass
        if not self._is_full and state.feed.looked < state.head:
            (cursor,) = await self.journal.cursors(self.name)
            state.feed.know(cursor, max(cursor.acked, state.feed.looked))
