"""`SubscriptionLoop`: gets messages from the journal for its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Final

import anyio

from msgbus.errors import JournalFullError, StaleError
from msgbus.journal.operations import Drop, Fence, Put
from msgbus.journal.records import State
from msgbus.runtime.clock import look_after
from msgbus.runtime.timeouts import time_limit
from msgbus.subscriptions.attempts import AGAIN, LONGEST, AttemptRunner, S
from msgbus.subscriptions.figures import Figures
from msgbus.subscriptions.rules import Deliver, DeliveryRules, Describe, describe
from msgbus.subscriptions.state import Settlement
from msgbus.telemetry.logging import log

if TYPE_CHECKING:
    from msgbus.journal.ports import Journal
    from msgbus.journal.records import Member
    from msgbus.runtime.event_loop import Runtime
    from msgbus.subscriptions.gate import AloneGate
    from msgbus.subscriptions.in_flight import InFlight

STALL: Final = 0.7
"""Seconds after which messages that nobody has begun are a stall; the journal is polled oftener."""

LISTED: Final = 10
"""Offsets of damaged messages that one line of the log has."""

ALONE: Final = 30.0
"""Seconds that a row keeps its process to itself, or waits for that, without `ack_timeout`."""


class SubscriptionLoop(AttemptRunner[S], ABC):
    """Delivers one subscription in this process.

    Args:
        journal: Where its messages are.
        state: What it knows of them.
        deliver: Handles one message.
        rules: What follows from a failure.
        gate: Shared by all subscriptions of the process.
        letter: Describes a dead letter.
        handler: Name of the handler; that of the subscription unless given.
    """

    def __init__(
        self,
        journal: Journal,
        state: S,
        deliver: Deliver,
        rules: DeliveryRules,
        gate: AloneGate,
        letter: Describe = describe,
        *,
        handler: str = "",
    ) -> None:
        super().__init__(state, deliver, rules, gate, letter, handler or state.name)
        self.journal = journal
        self.is_standby = False
        """A member of another version of the application has the subscription."""
        self.full: JournalFullError | None = None
        """Why nothing can be fetched at the moment."""
        self.on_look: Callable[[], object] = lambda: None
        """Called when something was written, by this process or by another."""
        self.on_stall: Callable[[], object] = lambda: None
        """Called when messages were found that nobody had begun."""
        self._is_looking = False
        self._stuck_since: float | None = None
        self._releases_keys = False

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

    # -- life ------------------------------------------------------------------------------------

    def begin(self, runtime: Runtime, member: Member) -> None:
        """Start to deliver as this member."""
        self._runtime = runtime
        self.state.on_ready = self.start_workers
        self.state.on_rows = self.look
        self.state.on_written = self._written
        self.state.begin(member)
        self.figures = Figures()
        self._idle, self._workers = [], 0
        self._is_looking, self._stuck_since = False, None
        self._news = anyio.Event()
        self._news.set()
        self._spawn(self._pull, "pull")

    def end(self) -> None:
        """Cut off every handler at once; nothing more is written."""
        self.state.lose_member()
        tasks, self._tasks = self._tasks, {}
        for task in tasks:
            task.cancel()

    def close(self) -> None:
        """Begin nothing more; what runs may end."""
        self.is_closing = self.state.is_draining = True

    def look(self) -> None:
        """Look for something to do; called on the event loop."""
        self.on_look()
        self._news.set()
        self.start_workers()

    def _written(self) -> None:
        self.on_look()
        if self._wants_more:
            self._news.set()
        self.start_workers()

    def acknowledged(self, one: InFlight) -> None:
        """End a delivery that a commit of its handler has acknowledged."""
        self.state.acknowledged_in_commit(one)

    def pause(self) -> None:
        """Begin no further delivery."""
        self.is_paused = True

    def resume(self) -> None:
        """Go on after `pause`; else let parked keys go. Repeat the message that blocks it."""
        if not self.is_paused:
            self._releases_keys = self.state.selection.parks
        self.is_paused = False
        self.blocked_at = None
        self.look()

    @asynccontextmanager
    async def held(self, timeout: float | None) -> AsyncGenerator[None]:
        """Begin no delivery meanwhile; those that run are waited for, at most `timeout` seconds."""
        self._holds += 1
        try:
            with time_limit(timeout, self._clock):
                await self.ended()
            yield
        finally:
            self._holds -= 1
            self.look()

    # -- getting messages ------------------------------------------------------------------------

    async def _pull(self) -> None:
        due: float | None = None
        while True:
            await self._wait_for_news(due)
            self._is_looking = True
            try:
                due = await self._look()
                self.full = None
            except StaleError:
                due = None  # the member was ended: `on_lost` ends this task
            except Exception as error:  # of the journal, or of a key function of the user
                self.full = error if isinstance(error, JournalFullError) else None
                self.journal_failed(error)
                await self._clock.sleep(AGAIN)
                due = self._clock.time()
            finally:
                self._is_looking = False

    async def _wait_for_news(self, due: float | None) -> None:
        if not self._news.is_set():
            pause = None if due is None else max(due - self._clock.time(), 0.0)
            # Before it is due, too, as the wall clock may jump.
            limit = nullcontext() if due is None else look_after(LONGEST, self._clock)
            with time_limit(pause, self._clock), limit:
                await self._news.wait()
        self._news = anyio.Event()

    async def _look(self) -> float | None:
        """Do what there is to do now; return when the next row is due."""
        self._take_note()
        if self.state.is_refused:
            await self._recover()
        partitions = self._partitions()
        if self._is_stopped or self.state.is_draining:
            await self.count_unread()
            return None
        if partitions is not None and not partitions:
            return None
        if self._releases_keys:
            await self._release_keys()
        due = await self.journal.next_due(self.name, partitions)
        await self._note_recovery(is_recovering=due.has_suspects)
        if due.has_suspects and await self._run_alone(partitions):
            return 0.0
        if due.time is not None and due.time <= self._clock.time() and await self._claim():
            return 0.0
        await self._read_on()
        self.start_workers()
        due = await self.journal.next_due(self.name, partitions)
        await self.figures.count_rows(self.journal, self.state, due)
        self.figures.skipped = due.skipped
        if due.damaged != self.figures.damaged:
            await self._note_damaged(due.damaged)
        return None if self._is_full else due.time  # the end of a delivery makes room

    async def count_unread(self) -> None:
        """Count messages that nobody has got yet, for `progress()`."""
        partitions = self._partitions() or None  # on standby: all of them
        is_stopped = self._is_stopped
        await self.figures.count_unread(self.journal, self.state, partitions, is_stopped=is_stopped)

    async def _note_damaged(self, damaged: int) -> None:
        """Log that more messages were set aside."""
        known, self.figures.damaged = self.figures.damaged, damaged
        if damaged > known:
            rows = await self.journal.find(self.name, (State.DAMAGED,), limit=1000)
            offsets = [row.offset for row in rows[-LISTED:]]
            log.warning(
                "messages_damaged", subscription=self.name, damaged=damaged, offsets=offsets
            )

    def check_stall(self, head: int) -> None:
        """Begin messages that nobody has begun for too long, and say so; called often."""
        state, now = self.state, self._clock.now()
        with state.lock:
            state.head = max(state.head, head)
            is_stuck = self._is_stuck()
        since = self._stuck_since if self._stuck_since is not None else now
        self._stuck_since = since if is_stuck else None
        if is_stuck and now - since >= STALL:
            self._stuck_since = None
            state.counts.stalls += 1
            self.on_stall()
            self.look()

    def _is_stuck(self) -> bool:
        """Tell whether there is something to do, and nothing has been told to do it."""
        state = self.state
        if state.member is None or state.is_draining or self._is_stopped or self._gate.is_closed:
            return False
        if self._is_looking or self._news.is_set() or self._workers > len(self._idle):
            return False
        return bool(state.ready) or self._wants_more

    def _take_note(self) -> None:
        """Log what commits did on another thread."""

    # -- rows that run alone ---------------------------------------------------------------------

    async def _note_recovery(self, *, is_recovering: bool) -> None:
        """Log once that rows are left which were in flight when their process ended."""
        was_recovering, self.figures.is_recovering = self.figures.is_recovering, is_recovering
        if is_recovering and not was_recovering:
            rows = await self.journal.due(self.name, self._clock.time(), 1000)
            offsets = [row.offset for row in rows if row.alone]
            if offsets:
                log.info(
                    "subscription_recovered",
                    subscription=self.name,
                    offset=min(offsets) - 1,
                    in_flight_until=max(offsets),
                )

    async def _run_alone(self, partitions: Collection[int] | None) -> bool:
        """Run one row with nothing beside it; return whether there may be another."""
        if self._rate is not None and (pause := self._rate.wait(self._clock.now())) > 0:
            await self._clock.sleep(pause)
        limit = self._rules.ack_timeout or ALONE
        if not await self._gate.close(limit):
            await self._run_beside(limit)
            return True
        try:
            claims = await self.journal.claim(
                self.member, self.name, 1, self._clock.time(), partitions=partitions, alone=True
            )
            for one in self.state.admit_claims(claims, alone=True):
                if self._rate is not None:
                    self._rate.take(self._clock.now())
                await self._run_one_alone(one)
            await self.journal.commit([], self.member)
        finally:
            self._gate.open()
        return bool(claims)

    async def _run_one_alone(self, one: InFlight) -> None:
        if self._rules.retry.pause(one.attempt - 1, None) is None:
            one.attempt -= 1
            self._failed(one, None, alone=True)
            return
        ended = anyio.Event()

        async def run() -> None:
            try:
                await self.run(one, alone=True)
            finally:
                ended.set()

        one.worker = self._spawn(run, "alone")
        # One without a time limit does not keep all others waiting until it ends.
        with time_limit(ALONE if self._rules.ack_timeout is None else None, self._clock):
            await ended.wait()

    async def _run_beside(self, waited: float) -> None:
        """Let rows run beside others, as those have run for too long; nothing is counted.

        Those of partitions that were acquired meanwhile, too: each would wait anew for all others.
        """
        now, partitions = self._clock.time(), self._partitions()
        for row in await self.journal.due(self.name, now, 1000):
            if row.alone and (partitions is None or row.partition in partitions):
                moved = row.moved(State.WAITING, time=now, due=0.0, alone=False)
                with suppress(StaleError):  # another process has it
                    await self.journal.commit([Put(moved)], self.member)
                    self.state.counts.not_alone += 1
                    if not self.figures.beside:  # once is enough
                        log.warning("subscription_not_alone", subscription=self.name, waited=waited)
                    self.figures.beside.add(row.offset)

    # -- what was refused ------------------------------------------------------------------------

    async def _recover(self) -> None:
        """Find out what was refused, and drop it."""
        self.state.is_refused = False
        self.state.head = await self.journal.head()
        await self.check_ownership()
        held: list[Settlement] = []
        offsets: set[int] = set()
        for settlement in self.state.take_settled():
            # After a seek, a message may run twice here: its row ends once.
            own = {one.offset for one in settlement.ended}
            if own.isdisjoint(offsets) and await self._is_current(settlement):
                held.append(settlement)
                offsets |= own
            else:
                self.state.forget(settlement)
        self.state.settle_again(held)

    async def _is_current(self, settlement: Settlement) -> bool:
        for operation in settlement.operations:
            if isinstance(operation, Fence) and not self.state.owns(operation):
                return False
            if isinstance(operation, Drop | Put):
                row = operation.row
                wanted = row.version if isinstance(operation, Drop) else row.version - 1
                stored = await self.journal.row(row.subscription, row.offset)
                if (0 if stored is None else stored.version) != wanted:
                    return False
        return True

    # -- what the modes do -----------------------------------------------------------------------

    async def check_ownership(self) -> None:
        """Drop what others own now."""

    async def balance(self, members: Sequence[int]) -> None:
        """Take and leave a fair part of the work of these members; called often."""

    async def _release_keys(self) -> None:
        """Let keys go on that wait for a dead letter."""

    def _partitions(self) -> Collection[int] | None:
        return None

    @abstractmethod
    async def _claim(self) -> bool:
        """Claim rows that are due; return whether there were any."""

    @abstractmethod
    async def _read_on(self) -> None:
        """Get new messages from the log."""
