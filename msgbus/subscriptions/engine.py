"""`SubscriptionEngine` and `DurableSubscription`: subscriptions on a journal, without a bus."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, final
from weakref import WeakValueDictionary

import anyio

from msgbus.errors import (
    BusStateError,
    ConfigurationError,
    HandlerTimeoutError,
    SettleTimeoutError,
)
from msgbus.handlers.delivery import StartAt
from msgbus.journal.records import Record
from msgbus.messages.topics.pattern import TopicPattern
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.event_loop import LATE, current_runtime, in_time
from msgbus.runtime.timeouts import time_limit
from msgbus.subscriptions.config import SubscriptionConfig, make_loop, selection_of
from msgbus.subscriptions.dispatcher import Consume, Consumer, Dispatcher
from msgbus.subscriptions.figures import acked_of
from msgbus.subscriptions.members import Membership
from msgbus.subscriptions.progress import (
    Progress,
    Standing,
    describe_left,
    progress_now,
    require_reached,
    standing_of,
    start_offset,
)
from msgbus.telemetry.logging import log

if TYPE_CHECKING:
    from msgbus.journal.ports import Journal
    from msgbus.journal.records import Selection
    from msgbus.subscriptions.in_flight import InFlight
    from msgbus.subscriptions.loop import SubscriptionLoop
    from msgbus.subscriptions.rules import OnDeadLetter


async def _consume(consumer: Consumer, one: InFlight) -> None:
    await consumer.consume(one.record, one.attempt)


@final
class SubscriptionEngine:
    """One durable subscription in this process.

    Make it, make its dispatcher, add consumers, start it, close it. The dispatcher says the mode.
    Engines on one journal object share a membership; it takes one of each name.

    Args:
        journal: Where its messages are.
        name: Name of the subscription.
        config: Its options.
        topic: Only messages whose topic fits this pattern.
        names: Only messages of these wire names.
        matches: Only records for which this returns true.
        text: Describes `matches`: processes in which it differs do not mix.
        clock: Time.
        ttl: Seconds without a renewal after which other processes take over.
        process: Identity of this process, for the others.
        on_stall: Called with the progress when messages were found that nobody had begun.
        on_dead_letter: Returns operations for the commit that writes a dead letter: it gets the
            record, the error and the number of attempts. If it raises, it is called again later.
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
        text: str = "",
        clock: Clock | None = None,
        ttl: float = 5.0,
        process: str | None = None,
        on_stall: Callable[[Progress], object] | None = None,
        on_dead_letter: OnDeadLetter | None = None,
    ) -> None:
        self.name = name
        self.config = config or SubscriptionConfig()
        self._journal = journal
        self._names = names
        self._matches = _matching(topic, matches)
        described = [topic or "", " ".join(sorted(names or ())), text]
        self._text = " ".join(part for part in described if part)
        self._clock = clock or SystemClock()
        self._membership = membership_of(journal, self._clock, ttl, process)
        self._on_stall = on_stall
        self._on_dead_letter = on_dead_letter
        self._dispatcher: Dispatcher | None = None
        self._loop: SubscriptionLoop[Any] | None = None
        self._is_started = False
        self._is_paused = False
        self._is_closed = False
        self._waits: list[anyio.CancelScope] = []

    def __repr__(self) -> str:
        return f"<SubscriptionEngine {self.name} {self.standing}>"

    # -- the dispatcher --------------------------------------------------------------------------

    def attach(self, dispatcher: Dispatcher) -> None:
        """Connect it with its dispatcher; `Dispatcher.reliable_...(engine)` does this.

        Raises:
            ConfigurationError: It has one, or its retries cannot be kept in the journal.
        """
        if self._dispatcher is not None:
            message = f"Subscription {self.name!r} has a dispatcher already; it takes only one."
            raise ConfigurationError(message)
        self.config = self.config.model_copy(update={"mode": dispatcher.mode})
        selection = selection_of(
            self.config, names=self._names, matches=self._matches, text=self._text
        )
        self._loop = make_loop(
            self._journal,
            self.name,
            self.config,
            selection,
            self._deliver,
            clock=self._clock,
            gate=self._membership.gate,
        )
        self._dispatcher = dispatcher
        self._loop.on_stall = self._stalled
        self._loop.on_dead_letter = self._on_dead_letter
        self._loop.is_paused = True  # until there is a consumer

    def consumers_changed(self) -> None:
        """Deliver as much at the same time as the consumers can handle."""
        loop, capacity = self._require_loop(), self.dispatcher.capacity
        if capacity:
            loop.state.resize(capacity)
        self._steer(loop)

    @property
    def dispatcher(self) -> Dispatcher:
        """Its dispatcher.

        Raises:
            ConfigurationError: It has none yet.
        """
        self._require_loop()
        assert self._dispatcher is not None  # noqa: S101 (attached with the loop)
        return self._dispatcher

    def _require_loop(self) -> SubscriptionLoop[Any]:
        if self._loop is None:
            message = (
                f"Subscription {self.name!r} has no dispatcher. Make one with "
                f"Dispatcher.reliable_exclusive(engine) or another mode."
            )
            raise ConfigurationError(message)
        return self._loop

    async def _deliver(self, one: InFlight) -> None:
        async def run(consumer: Consumer) -> None:
            await self._run(consumer, one)

        once = self.config.is_at_most_once
        await self.dispatcher.deliver(one.record, one.attempt, run, once=once)

    async def _run(self, consumer: Consumer, one: InFlight) -> None:
        """Let a consumer handle a message within `ack_timeout`."""
        seconds = self.config.ack_timeout
        try:
            if seconds is None:
                await consumer.consume(one.record, one.attempt)
                return
            if await in_time(_consume(consumer, one), seconds, self._clock) is not LATE:
                return
        except Exception:
            raise
        except BaseException as error:
            if current_runtime().is_ending(error):
                raise
            message = f"{consumer.name} was cancelled by what it called, not by the engine."
            raise RuntimeError(message) from error
        raise HandlerTimeoutError(handler=consumer.name, message_type=Record, seconds=seconds or 0)

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the journal and begin to deliver, or stand by.

        Raises:
            ConfigurationError: No dispatcher, the journal promises less than `require`, the start
                is beyond its head, or this journal object has one of its name.
            BusStateError: It was started before.
            CursorError: Its cursor cannot be read.
        """
        loop = self._require_loop()
        if self._is_started or self._is_closed:
            message = f"Subscription {self.name!r} was started before; make a new engine."
            raise BusStateError(message)
        wanted, promises = self.config.require, self._journal.promises
        if wanted is not None and not promises.meets(wanted):
            message = (
                f"Subscription {self.name!r} requires {wanted!r}, but its journal promises only "
                f"{promises.level!r}. Use another journal, or require less."
            )
            raise ConfigurationError(message)
        start = await start_offset(self._journal, self.config.start)
        if self.name in self._membership.names:
            message = (
                f"Subscription {self.name!r} is delivered through this journal object already. "
                f"Give it another name, or open the journal a second time."
            )
            raise ConfigurationError(message)
        self._is_started = True
        self._membership.add(loop, start)
        try:
            await self._membership.start()
        except BaseException:
            self.abort()
            raise

    async def close(self, timeout: float | None = 30.0) -> int:
        """Hand out nothing more, wait for what is in flight, and leave the rest to others.

        Returns:
            Deliveries that were still in flight after `timeout`; others repeat them.
        """
        loop = self._require_loop()
        if self._is_closed or not self._is_started:
            self._is_closed = True
            return 0
        left = await self._membership.exclude(loop, timeout)
        if not self._membership.names:
            await self._membership.stop()
        self._closed()
        return left

    def _closed(self) -> None:
        self._is_closed = True
        for scope in self._waits:
            scope.cancel()

    def abort(self) -> None:
        """End at once and write nothing, as a crash would."""
        if self._is_started and not self._is_closed:
            self._membership.forget(self._require_loop())
        self._closed()

    # -- steering --------------------------------------------------------------------------------

    def pause(self) -> None:
        """Begin no further delivery; what is in flight is finished."""
        self._is_paused = True
        self._steer(self._require_loop())

    def resume(self) -> None:
        """Go on after `pause`; else let parked keys go. Repeat the message that blocks it."""
        self._is_paused = False
        loop = self._require_loop()
        loop.resume()
        self._steer(loop)

    def _steer(self, loop: SubscriptionLoop[Any]) -> None:
        if self._is_paused or not self.dispatcher.consumers:
            loop.pause()
        else:
            loop.is_paused = False
            loop.look()

    async def seek(self, start: StartAt | int) -> None:
        """Continue at another position, back or forth, in every process.

        Handlers of messages behind that position are cancelled, as those are delivered again. An
        `idempotent` subscription does not repeat what it has handled.

        Raises:
            BusStateError: It is not started, or closed.
        """
        self._require_running()
        offset = await start_offset(self._journal, StartAt.of(start))
        self._require_running()
        self._require_loop().blocked_at = None
        await self._membership.seek(self.name, offset)

    async def caught_up(self, offset: int | None = None, timeout: float | None = None) -> int:
        """Return when everything up to `offset` is done and written, in whichever process.

        A message that waits for a retry in the journal counts as done until it is due.

        Args:
            offset: By default the head as it is now.
            timeout: Seconds.

        Returns:
            The offset.

        Raises:
            SettleTimeoutError: It took longer than `timeout`; or, without one, it is paused or
                blocked, and nothing goes on before `resume`.
            ConfigurationError: The offset is beyond the head of the journal.
            BusStateError: It is not started, or was closed meanwhile.
        """
        loop = self._require_loop()
        self._require_running()
        upto = await self._journal.head() if offset is None else offset
        await require_reached(self._journal, upto)
        is_patient = timeout is not None
        with time_limit(timeout, self._clock), self._until_closed():
            while not await self._membership.is_done(loop, upto, is_patient=is_patient):
                pass
            return upto
        self._require_running()
        raise SettleTimeoutError([describe_left(self.progress())], seconds=timeout or 0.0)

    @contextmanager
    def _until_closed(self) -> Generator[None]:
        """Cancel what is in the block when the subscription is closed."""
        with anyio.CancelScope() as scope:
            self._waits.append(scope)
            try:
                yield
            finally:
                self._waits.remove(scope)

    def _require_running(self) -> None:
        if not self.is_running:
            message = (
                f"Subscription {self.name!r} is {self.standing} here, at offset "
                f"{self.last_acked}; this is possible while it runs."
            )
            raise BusStateError(message)

    # -- questions -------------------------------------------------------------------------------

    @property
    def standing(self) -> Standing:
        """State of the subscription in this process."""
        if self._loop is None or not self._is_started:
            return Standing.CLOSED if self._is_closed else Standing.NEW
        if self._is_closed:
            return Standing.CLOSED
        standing = standing_of(self._loop)
        if standing is Standing.PAUSED and not self._is_paused:
            return Standing.ACTIVE  # it waits for a consumer
        return standing

    @property
    def is_running(self) -> bool:
        """Whether it was started and is not closed."""
        return self._is_started and not self._is_closed

    @property
    def last_acked(self) -> int:
        """Everything up to this offset is done here, dead-lettered, or waits in the journal."""
        loop = self._require_loop()
        return acked_of(loop.state, loop.figures.cursors)[0]

    @property
    def selection(self) -> Selection:
        """Which messages it takes, and in which order."""
        selection: Selection = self._require_loop().state.selection
        return selection

    @property
    def lag(self) -> int:
        """Messages for it that are not done, as `Progress.lag`; with or without consumers."""
        return self.progress().lag

    def progress(self) -> Progress:
        """Return how it stands, as far as this process knows; no I/O."""
        consumers = len(self.dispatcher.consumers)
        return progress_now(self._require_loop(), consumers=consumers, standing=self.standing)

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


def membership_of(
    journal: Journal, clock: Clock, ttl: float, process: str | None = None
) -> Membership:
    """Return the membership that all engines on a journal object share."""
    found = _memberships.get(id(journal))
    if found is None:
        found = Membership(journal, clock, ttl=ttl, process=process)
        _memberships[id(journal)] = found
    return found


_memberships: WeakValueDictionary[int, Membership] = WeakValueDictionary()
"""By the id of the journal, which lives as long as its membership."""


def _matching(
    topic: str | None, matches: Callable[[Record], bool] | None
) -> Callable[[Record], bool] | None:
    """Join a pattern of topics and a predicate."""
    if topic is None:
        return matches
    fits = TopicPattern(topic).matches
    if matches is None:
        return lambda record: fits(record.topic)
    return lambda record: fits(record.topic) and matches(record)


@final
class DurableSubscription:
    """An engine, its dispatcher and one or more consumers.

    Args:
        journal: Where its messages are.
        name: Name of the subscription, and of its first consumer.
        consume: Handles one record; returning acknowledges it, raising is a failed attempt.
        config: Its options.
        options: As for `SubscriptionEngine`.
    """

    def __init__(
        self,
        journal: Journal,
        name: str,
        consume: Consume,
        config: SubscriptionConfig | None = None,
        **options: Any,
    ) -> None:
        self.engine = SubscriptionEngine(journal, name, config, **options)
        self.dispatcher = Dispatcher(self.engine.config.mode, self.engine)
        self.add_consumer(name, consume)

    @property
    def name(self) -> str:
        """Name of the subscription."""
        return self.engine.name

    def add_consumer(self, name: str, consume: Consume) -> None:
        """Add a consumer, which handles `max_in_flight` messages at the same time."""
        limit = self.engine.config.max_in_flight
        self.dispatcher.add_consumer(name, consume, max_in_flight=limit)

    def remove_consumer(self, name: str) -> bool:
        """Remove a consumer; what it has in flight goes to the others at once."""
        return self.dispatcher.remove_consumer(name)

    async def start(self) -> None:
        """Begin to deliver; see `SubscriptionEngine.start`."""
        await self.engine.start()

    async def close(self, timeout: float | None = 30.0) -> int:
        """Stop to deliver; see `SubscriptionEngine.close`."""
        return await self.engine.close(timeout)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def pause(self) -> None:
        """Begin no further delivery; what is in flight is finished."""
        self.engine.pause()

    def resume(self) -> None:
        """Go on after `pause`; else let parked keys go. Repeat the message that blocks it."""
        self.engine.resume()

    async def seek(self, start: StartAt | int) -> None:
        """Continue at another position; see `SubscriptionEngine.seek`."""
        await self.engine.seek(start)

    async def caught_up(self, offset: int | None = None, timeout: float | None = None) -> int:
        """Return when everything up to `offset` is done; see `SubscriptionEngine.caught_up`."""
        return await self.engine.caught_up(offset, timeout)

    def progress(self) -> Progress:
        """Return how it stands."""
        return self.engine.progress()

    def __repr__(self) -> str:
        return f"<DurableSubscription {self.name} {self.engine.standing}>"
