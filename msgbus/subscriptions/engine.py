"""`SubscriptionEngine`: one durable subscription at work, from lease to last flush."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, final

import anyio
from uuid_utils import uuid7

from msgbus.errors import BusStateError, ConfigurationError, SettleTimeoutError
from msgbus.handlers.delivery import StartAt
from msgbus.journal.records import Record
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.subscriptions.config import SubscriptionConfig
from msgbus.subscriptions.desk import Desk
from msgbus.subscriptions.dispatcher import Consumer, Dispatcher
from msgbus.subscriptions.ledger import Ledger, OnDeadLetter, Source
from msgbus.subscriptions.office import Office
from msgbus.subscriptions.progress import Progress, Standing
from msgbus.subscriptions.pump import Pump
from msgbus.subscriptions.tenure import Tenure
from msgbus.subscriptions.watchdog import Watchdog
from msgbus.telemetry.logging import log

if TYPE_CHECKING:
    from msgbus.journal.port import Journal


@final
class _Waiter:
    """Somebody who waits for a place to be reached."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.event = anyio.Event()
        self.is_reached = False

    def reach(self) -> None:
        self.is_reached = True
        self.event.set()


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
        target: str = "",
        clock: Clock | None = None,
        on_stall: Callable[[Progress], object] | None = None,
        on_dead_letter: OnDeadLetter | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.name = name
        self.config = config or SubscriptionConfig()
        self._journal = journal
        self._clock = clock or SystemClock()
        self._source = Source(topic, names, matches, target)
        self._on_stall = on_stall
        self._on_dead_letter = on_dead_letter
        self._chance = chance
        holder = f"{os.getpid()}-{uuid7()}"
        ttl = self.config.lease_ttl
        self._tenure = Tenure(journal, name, holder, self._clock, ttl, self._lease_lost)
        self._waiters: list[_Waiter] = []
        self._seeks: list[_Waiter] = []
        self._desk: Desk | None = None
        self._office: Office | None = None

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
        ledger = Ledger(
            self._journal,
            self.name,
            self._desk,
            self._tenure,
            self._clock,
            self._source,
            self._on_dead_letter,
        )
        self._pump = Pump(self.name, self._desk, ledger, self._clock, self._chance)
        self._watchdog = Watchdog(self._journal, self._desk, ledger, self._clock, self._stalled)
        self._office = Office(
            self.name,
            self._journal,
            self._clock,
            self._desk,
            self._pump,
            self._watchdog,
            self._tenure,
            self._tell,
            self._stopped,
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
        if self._office is not None:
            self._office.wake()

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take the lease, write the first cursor, and begin to deliver; or stand by.

        Raises:
            ConfigurationError: No dispatcher, or the journal promises less than `require`.
            BusStateError: It was started before.
            CursorError: How far it came cannot be read. It never guesses.
        """
        desk, office = self.desk, self._own_office()
        if office.is_started or office.is_ended:
            message = f"Subscription {self.name!r} was started before; make a new engine."
            raise BusStateError(message)
        self._check_level()
        first = await self.resolve(self.config.start)
        desk.head = self._watchdog.head = await self._journal.head()
        await office.start(first)

    def _own_office(self) -> Office:
        assert self._office is not None  # noqa: S101 (made with the desk)
        return self._office

    async def close(self, timeout: float | None = 30.0) -> int:
        """Hand out nothing more, wait for what is in hand, write the cursor, free the lease.

        Returns:
            Messages that were still in hand after `timeout`; they are delivered again.
        """
        self.desk  # noqa: B018 (raises if there is none)
        return await self._own_office().close(timeout)

    def abort(self) -> None:
        """End at once and write nothing, as a crash would."""
        if self._office is not None:
            self._office.abort()

    async def resolve(self, start: StartAt) -> int:
        """The offset behind which `start` begins."""
        return await first_offset(self._journal, start) - 1

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
        """Go on after `pause`; try the message that `Poison.BLOCK` holds once more.

        Parked keys are let go, until the next dead letter, or the next start if theirs is
        still there.
        """
        self.desk.is_paused = False
        self.desk.unblock()
        self._pump.parking.clear()
        self.wake()

    async def seek(self, start: StartAt | int) -> None:
        """Go on at another place, back or forth, once what is in hand is finished.

        An `idempotent` subscription does not repeat what it has marked, wherever it seeks.

        Raises:
            BusStateError: It is not active here, or ended meanwhile.
        """
        if self.standing in {Standing.NEW, Standing.STANDBY, Standing.CLOSED}:
            message = (
                f"Subscription {self.name!r} is {self.standing} here; seek where it is active."
            )
            raise BusStateError(message)
        offset = await self.resolve(StartAt.of(start))
        waiter = _Waiter(min(offset, await self._journal.head()))
        self._seeks.append(waiter)
        self.desk.seek_to = waiter.target
        self.wake()
        await self._wait_for(waiter, None)
        if not waiter.is_reached:
            raise self._not_reached()

    async def caught_up(self, offset: int | None = None, timeout: float | None = None) -> int:
        """Return when everything up to `offset` is done and the journal knows it.

        Without `offset`: up to the head as it is now. A message that waits in the schedule for
        another try counts as passed. Gives the offset.

        Raises:
            SettleTimeoutError: It took longer than `timeout`.
            BusStateError: It ended meanwhile.
        """
        target = await self._journal.head() if offset is None else offset
        waiter = _Waiter(target)
        self._waiters.append(waiter)
        self.desk.waiters.append(target)
        self.wake()
        try:
            await self._wait_for(waiter, timeout)
        finally:
            self._waiters.remove(waiter)
            self.desk.waiters.remove(target)
        if waiter.is_reached:
            return target
        if waiter.event.is_set():
            raise self._not_reached()
        raise SettleTimeoutError([self.name], seconds=timeout or 0.0)

    async def _wait_for(self, waiter: _Waiter, timeout: float | None) -> None:
        if self.standing is Standing.CLOSED:
            raise self._not_reached()
        if timeout is None:
            await waiter.event.wait()
            return
        with self._clock.cancel_after(timeout):
            await waiter.event.wait()

    def _not_reached(self) -> BusStateError:
        message = (
            f"Subscription {self.name!r} is {self.standing} here now, at offset "
            f"{self.last_acked}; what was waited for has not come to pass."
        )
        return BusStateError(message)

    # -- questions -----------------------------------------------------------------------------

    @property
    def standing(self) -> Standing:
        """What it is doing."""
        if self._office is None or self._desk is None:
            return Standing.NEW
        if self._office.is_ended:
            return Standing.CLOSED
        if not self._office.is_started:
            return Standing.NEW
        if self._tenure.lease is None:
            return Standing.STANDBY
        if self._desk.blocked is not None:
            return Standing.BLOCKED
        return Standing.PAUSED if self._desk.is_paused else Standing.ACTIVE

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._office is not None and self._office.is_started and not self._office.is_ended

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
            owner=self._tenure.owner if self.standing is Standing.STANDBY else None,
            last_acked=desk.cursor.position,
            persisted=desk.cursor.persisted,
            head=max(self._watchdog.head, desk.head),
            lag=self.lag,
            oldest_unacked_age=self._watchdog.oldest_age(),
            in_flight=len(desk.window.in_flight),
            buffered=len(desk.window),
            waiting=len(desk.window.waiting),
            shelved=desk.window.shelved,
            scheduled=self._pump.scheduled,
            consumers=len(desk.dispatcher.consumers),
            parked_keys=len(self._pump.parking),
            blocked_at=None if desk.blocked is None else desk.blocked.offset,
            is_recovering=desk.is_recovering,
            counts=desk.counts,
            last_error=self._own_office().last_error,
        )

    # -- what its parts tell it ----------------------------------------------------------------

    def _tell(self, persisted: int) -> None:
        """The journal knows that everything up to here is done."""
        for waiter in self._waiters:
            if waiter.target <= persisted:
                waiter.reach()
        if self.desk.seek_to is None:
            for waiter in self._seeks:
                waiter.reach()
            self._seeks.clear()

    def _stopped(self) -> None:
        """It has ended here, or another engine has taken over."""
        self.desk.seek_to = None
        for waiter in self._seeks:
            waiter.event.set()
        self._seeks.clear()
        if self.standing is Standing.CLOSED:
            for waiter in self._waiters:
                waiter.event.set()

    def _lease_lost(self) -> None:
        self._own_office().lease_lost()

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


async def first_offset(journal: Journal, start: StartAt) -> int:
    """The offset of the first message that `start` means, whether it is there yet or not."""
    if start.is_latest:
        return await journal.head() + 1
    if start.time is not None:
        return await journal.offset_at(start.time)
    if start.offset is not None:
        return max(start.offset, 1)
    return await journal.first()
