"""`SubscriptionEngine`: one durable subscription at work, from lease to last flush."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, final

import anyio
from uuid_utils import uuid7

from msgbus.clock import Clock, SystemClock
from msgbus.errors import (
    BusStateError,
    ConfigurationError,
    JournalClosedError,
    LeaseLostError,
    SettleTimeoutError,
)
from msgbus.journal.records import Record
from msgbus.runtime import Runtime, Task, Waker, current_runtime
from msgbus.subscriptions.config import SubscriptionConfig
from msgbus.subscriptions.desk import Desk
from msgbus.subscriptions.dispatcher import Consumer, Dispatcher
from msgbus.subscriptions.ledger import Ledger, Source
from msgbus.subscriptions.mode import StartAt
from msgbus.subscriptions.progress import Progress, Standing
from msgbus.subscriptions.pump import Pump
from msgbus.subscriptions.runner import Runner
from msgbus.subscriptions.tenure import Tenure
from msgbus.subscriptions.watchdog import Watchdog
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.journal.port import Journal

LOOKS_PER_TTL = 5
"""How often a standby looks at the lease while it could run out."""

SHORTEST_REST = 0.001


@final
class SubscriptionEngine:
    """Reads a journal from a cursor on, and delivers through a `Dispatcher`.

    One engine of a name is active at a time, over all processes on one journal; the others
    stand by. Make it, give it a dispatcher, add consumers, start it, close it.
    """

    def __init__(
        self,
        journal: Journal,
        name: str,
        config: SubscriptionConfig | None = None,
        *,
        topic: str | None = None,
        names: Collection[str] | None = None,
        matches: Callable[[Record], bool] | None = None,
        clock: Clock | None = None,
        on_stall: Callable[[Progress], object] | None = None,
    ) -> None:
        self.name = name
        self.config = config or SubscriptionConfig()
        self._journal = journal
        self._clock = clock or SystemClock()
        self._source = Source(topic, names, matches)
        self._on_stall = on_stall
        holder = f"{os.getpid()}-{uuid7()}"
        ttl = self.config.lease_ttl
        self._tenure = Tenure(journal, name, holder, self._clock, ttl, self._lease_lost)
        self._start = 0
        self._runtime: Runtime | None = None
        self._waker: Waker | None = None
        self._tasks: list[Task] = []
        self._runners: dict[Runner, None] = {}
        self._has_news = False
        self._is_lost = False
        self._close_by: float | None = None
        self._left_in_hand = 0
        self._ended: anyio.Event | None = None
        self._is_ended = False
        self._waiters: list[tuple[int, anyio.Event]] = []
        self._seeks: list[anyio.Event] = []
        self._last_error: str | None = None
        self._desk: Desk | None = None

    def __repr__(self) -> str:
        return f"<SubscriptionEngine {self.name} {self.standing}>"

    # -- the dispatcher's side -----------------------------------------------------------------

    def attach(self, dispatcher: Dispatcher) -> None:
        """Give it its dispatcher; `Dispatcher.reliable_...(engine)` does this.

        Raises:
            ConfigurationError: It has one.
        """
        if self._desk is not None:
            message = f"Subscription {self.name!r} has a dispatcher already; it takes only one."
            raise ConfigurationError(message)
        self._desk = Desk(self.config, dispatcher, self._clock, self.wake)
        self._ledger = Ledger(
            self._journal, self.name, self._desk, self._tenure, self._clock, self._source
        )
        self._pump = Pump(self.name, self._desk, self._ledger, self._clock)
        self._watchdog = Watchdog(
            self._journal, self._desk, self._ledger, self._clock, self._stalled
        )

    @property
    def desk(self) -> Desk:
        """All that it knows.

        Raises:
            ConfigurationError: It has no dispatcher yet.
        """
        if self._desk is None:
            message = (
                f"Subscription {self.name!r} has no dispatcher. Make one with "
                f"Dispatcher.reliable_exclusive(engine) or another mode."
            )
            raise ConfigurationError(message)
        return self._desk

    def consumer_joined(self) -> None:
        """There may be somebody to deliver to."""
        self.wake()

    def consumer_left(self, consumer: Consumer) -> None:
        """What it has in hand goes to others, now."""
        for entry in self.desk.window.held_by(consumer):
            if entry.runner is not None:
                entry.runner.task.cancel()
                entry.runner = None
        self.desk.consumer_left(consumer)

    def wake(self) -> None:
        """Let it look at once whether there is something to do."""
        self._has_news = True
        if self._waker is not None:
            self._waker.wake()

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take the lease, write the first cursor, and begin to deliver; or stand by.

        Raises:
            ConfigurationError: No dispatcher, or the journal promises less than `require`.
            BusStateError: It was started before.
            CursorError: How far it came cannot be read. It never guesses.
        """
        desk = self.desk
        if self._runtime is not None:
            message = f"Subscription {self.name!r} was started before; make a new engine."
            raise BusStateError(message)
        self._check_level()
        self._start = await self.resolve(self.config.start)
        desk.head = await self._journal.head()
        self._watchdog.head = desk.head
        if await self._tenure.take():
            try:
                await self._take_office()
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._tenure.release()
                raise
        self._runtime = current_runtime()
        self._waker = self._runtime.waker()
        self._ended = anyio.Event()
        self._tasks = [
            self._runtime.spawn(self._work, name=f"msgbus subscription {self.name}"),
            self._runtime.spawn(self._listen, name=f"msgbus news for {self.name}"),
        ]

    async def close(self, timeout: float | None = 30.0) -> int:
        """Hand out nothing more, wait for what is in hand, write the cursor, free the lease.

        Returns:
            Messages that were still in hand after `timeout`; they are delivered again.
        """
        if self._ended is None:
            self._is_ended = True
            return 0
        desk = self.desk
        desk.is_closing = True
        until = float("inf") if timeout is None else self._clock.now() + timeout
        self._close_by = until if self._close_by is None else min(self._close_by, until)
        self.wake()
        await self._ended.wait()
        return self._left_in_hand

    def abort(self) -> None:
        """End at once and write nothing, as a crash would."""
        self._is_ended = True
        for task in self._tasks:
            task.cancel()
        self._cancel_runners()
        if self._ended is not None:
            self._ended.set()

    async def resolve(self, start: StartAt) -> int:
        """The offset behind which `start` begins."""
        if start.is_latest:
            return await self._journal.head()
        if start.time is not None:
            return await self._journal.offset_at(start.time) - 1
        if start.offset is not None:
            return max(start.offset - 1, 0)
        return await self._journal.first() - 1

    def _check_level(self) -> None:
        wanted = self.config.require
        if wanted is not None and self._journal.level < wanted:
            message = (
                f"Subscription {self.name!r} requires {wanted.name}, but its journal promises "
                f"only {self._journal.level.name}. Use another journal, or require less."
            )
            raise ConfigurationError(message)

    # -- steering ------------------------------------------------------------------------------

    def pause(self) -> None:
        """Hand out nothing more for now; what is in hand is finished."""
        self.desk.is_paused = True

    def resume(self) -> None:
        """Go on after `pause`; try the message that `Poison.BLOCK` holds once more."""
        self.desk.is_paused = False
        self.desk.unblock()
        self.wake()

    async def seek(self, start: StartAt | int) -> None:
        """Go on at another place, back or forth, once what is in hand is finished.

        An `idempotent` subscription does not repeat what it has marked, wherever it seeks.

        Raises:
            BusStateError: It is not active here.
            CursorError: The place is beyond the head.
        """
        if self.standing in {Standing.NEW, Standing.STANDBY, Standing.CLOSED}:
            message = (
                f"Subscription {self.name!r} is {self.standing} here; seek where it is active."
            )
            raise BusStateError(message)
        offset = await self.resolve(StartAt.of(start))
        done = anyio.Event()
        self._seeks.append(done)
        self.desk.seek_to = min(offset, await self._journal.head())
        self.wake()
        await done.wait()

    async def caught_up(self, offset: int | None = None, timeout: float | None = None) -> int:
        """Return when everything up to `offset` is done and the journal knows it.

        Without `offset`: up to the head as it is now. A message that waits in the schedule for
        another try counts as passed. Gives the offset.

        Raises:
            SettleTimeoutError: It took longer than `timeout`.
        """
        target = await self._journal.head() if offset is None else offset
        reached = anyio.Event()
        waiter = (target, reached)
        self._waiters.append(waiter)
        self.desk.waiters.append(target)
        self.wake()
        try:
            if timeout is None:
                await reached.wait()
            else:
                with self._clock.cancel_after(timeout):
                    await reached.wait()
        finally:
            self._waiters.remove(waiter)
            self.desk.waiters.remove(target)
        if not reached.is_set():
            raise SettleTimeoutError([self.name], seconds=timeout or 0.0)
        return target

    # -- questions -----------------------------------------------------------------------------

    @property
    def standing(self) -> Standing:
        """What it is doing."""
        if self._is_ended:
            return Standing.CLOSED
        if self._runtime is None or self._desk is None:
            return Standing.NEW
        if self._tenure.lease is None:
            return Standing.STANDBY
        if self._desk.blocked is not None:
            return Standing.BLOCKED
        return Standing.PAUSED if self._desk.is_paused else Standing.ACTIVE

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._runtime is not None and not self._is_ended

    @property
    def last_acked(self) -> int:
        """Everything up to this offset is done."""
        return self.desk.cursor.position

    @property
    def lag(self) -> int:
        """Offsets between `last_acked` and the head; with or without consumers."""
        return max(self._watchdog.head - self.last_acked, self.desk.head - self.last_acked, 0)

    @property
    def epoch(self) -> int:
        """The epoch of its lease; 0 if it stands by."""
        return self._tenure.epoch

    def progress(self) -> Progress:
        """How it stands; what concerns the journal is at most a watchdog's beat old."""
        desk = self.desk
        return Progress(
            name=self.name,
            standing=self.standing,
            last_acked=desk.cursor.position,
            persisted=desk.cursor.persisted,
            head=max(self._watchdog.head, desk.head),
            lag=self.lag,
            oldest_unacked_age=self._watchdog.oldest_age(),
            in_flight=len(desk.window.in_flight),
            buffered=len(desk.window),
            waiting=len(desk.window.waiting),
            scheduled=self._pump.scheduled,
            consumers=len(desk.dispatcher.consumers),
            parked_keys=len(desk.parked),
            blocked_at=None if desk.blocked is None else desk.blocked.offset,
            is_recovering=desk.is_recovering,
            counts=desk.counts,
            last_error=self._last_error,
        )

    # -- work ----------------------------------------------------------------------------------

    async def _work(self) -> None:
        try:
            while not self._is_ended:
                self._has_news = False
                try:
                    await self._turn()
                except LeaseLostError:
                    self._lease_lost()
                except JournalClosedError as error:
                    self._note(error)
                    self._is_ended = True
                except Exception as error:  # a full disk may have room again
                    self._note(error)
                    self._is_ended = self._is_time_up()
                    self._has_news = False
                if not self._is_ended:
                    await self._rest()
        finally:
            self._end()

    async def _turn(self) -> None:
        if self._is_lost:
            self._leave_office()
        if self._tenure.lease is None:
            await self._stand_by()
            return
        await self._watchdog.look_if_due()
        await self._pump.round()
        self._feed()
        self._tell(self.desk.cursor.persisted)
        if self.desk.is_closing and (not self.desk.window.in_flight or self._is_time_up()):
            await self._leave_in_peace()

    def _feed(self) -> None:
        """Begin a delivery for everybody who is free."""
        assert self._runtime is not None  # noqa: S101 (set by `start`)
        while (entry := self.desk.next()) is not None:
            runner = Runner(self.desk, self._runtime, entry, self._runners)
            self._runners[runner] = None
            runner.task = self._runtime.spawn(runner.run, name=f"msgbus delivery of {self.name}")

    async def _rest(self) -> None:
        assert self._waker is not None  # noqa: S101 (set by `start`)
        assert self._runtime is not None  # noqa: S101 (set by `start`)
        if self._has_news:
            await self._runtime.checkpoint()
            return
        with self._clock.cancel_after(max(self._pause(), SHORTEST_REST)):
            await self._waker.wait()

    def _pause(self) -> float:
        now = self._clock.now()
        if self._tenure.lease is None:
            return self.config.lease_ttl / LOOKS_PER_TTL
        pause = min(self._watchdog.due - now, self._pump.until_next())
        return pause if self._close_by is None else min(pause, self._close_by - now)

    def _tell(self, persisted: int) -> None:
        for target, event in self._waiters:
            if target <= persisted:
                event.set()
        if self.desk.seek_to is None:
            for event in self._seeks:
                event.set()
            self._seeks.clear()

    async def _listen(self) -> None:
        """Hear of new messages, from this process and others."""
        desk = self.desk
        while not self._is_ended:
            try:
                head = await self._journal.wait(desk.head)
            except JournalClosedError:
                return
            except Exception as error:  # the watchdog finds what is missed meanwhile
                self._note(error)
                await self._clock.sleep(self.config.watchdog)
                continue
            if head > desk.head:
                desk.head = head
                self.wake()

    def _stalled(self) -> None:
        progress = self.progress()
        log.warning(
            "subscription_stalled",
            subscription=self.name,
            offset=progress.last_acked,
            lag=progress.lag,
        )
        if self._on_stall is not None:
            self._on_stall(progress)

    def _note(self, error: Exception) -> None:
        self.desk.counts.errors += 1
        self._last_error = redact_exception(error)
        log.error("subscription_failed", subscription=self.name, error=self._last_error)

    # -- the lease -----------------------------------------------------------------------------

    async def _take_office(self) -> None:
        await self._pump.begin(self._start)
        await self._tenure.keep()
        log.info("subscription_active", subscription=self.name, epoch=self._tenure.epoch)

    async def _stand_by(self) -> None:
        if self.desk.is_closing:
            self._is_ended = True
            return
        if await self._tenure.take():
            await self._take_office()
            self.wake()
            return
        cursor = await self._journal.cursor(self.name)
        self._watchdog.head = await self._journal.head()
        if cursor is not None:
            self.desk.open(cursor.offset)
            self._tell(cursor.offset)

    def _lease_lost(self) -> None:
        self._is_lost = True
        self.wake()

    def _leave_office(self) -> None:
        """Another engine has taken over: what is in hand here will be refused."""
        self._is_lost = False
        self._cancel_runners()
        self.desk.drop()
        self._pump.forget()
        self._tenure.lose()
        log.warning("subscription_lease_lost", subscription=self.name)

    # -- the end -------------------------------------------------------------------------------

    def _is_time_up(self) -> bool:
        return self._close_by is not None and self._clock.now() >= self._close_by

    async def _leave_in_peace(self) -> None:
        self._left_in_hand = len(self.desk.window.in_flight)
        self._cancel_runners()
        await self._ledger.commit(close=True)
        await self._tenure.release()
        self._is_ended = True

    def _cancel_runners(self) -> None:
        for runner in list(self._runners):
            runner.task.cancel()
        self._runners.clear()

    def _end(self) -> None:
        self._is_ended = True
        self._cancel_runners()
        for task in self._tasks[1:]:
            task.cancel()
        if self._ended is not None:
            self._ended.set()
