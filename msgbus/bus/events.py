"""Publishing events: into the queues of all their handlers, or of none.

`EventMethods.publish` handles the plain event itself. `EventPublisher` does the rest: filters,
the schedule, the journal and observers.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, final

import anyio.lowlevel
from typing_extensions import override

from msgbus.bus.lanes.outcomes import Outcomes, waiting_on_lane
from msgbus.bus.lanes.queue import admit_event
from msgbus.bus.phases import Phase
from msgbus.bus.plans import EventPlan
from msgbus.bus.protocols import SendingMethods
from msgbus.bus.schedule import EventSchedule, check_delay
from msgbus.errors import BusClosedError, QueueFullError, WrongMessageTypeError
from msgbus.handlers.filters import FilterLike, filter_name, passes
from msgbus.messages.frame import Frame, current_frame, fix_in_frame
from msgbus.messages.message import (
    Event,
    Message,
    SystemEvent,
    ids_of,
    metadata_of,
    peek,
    require_event,
    set_meta,
)
from msgbus.messages.metadata import ROOT
from msgbus.messages.receipts import (
    ENLISTED,
    PublishReceipt,
    PublishStatus,
    PublishSummary,
    Undelivered,
)
from msgbus.messages.system_events import EventRefusedEvent
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusState
    from msgbus.bus.lanes.queue import Gate
    from msgbus.bus.session import SessionState


get_frame: Final = current_frame.get


class EventMethods(SendingMethods):
    """`publish` and `publish_many`, as part of `MessageBus`."""

    _state: BusState

    def _open_event_methods(self) -> None:
        # Shortcuts for the hot path.
        self._plans: dict[type, EventPlan] = self._state.plain_events
        self._publisher = self._state.event_publisher
        self._filters = self._state.event_publisher.filters

    @override
    async def publish(  # noqa: C901, PLR0911, PLR0912 (the hot path, in one piece)
        self,
        event: Event,
        *,
        headers: Mapping[str, str] | None = None,
        topic: str | None = None,
        delay: float | None = None,
        at: datetime | None = None,
        wait: bool = False,
    ) -> PublishReceipt:
        outer = get_frame()
        plan: EventPlan | None
        try:
            plan = self._plans[type(event)]
            meta = event.__meta__
        except (KeyError, AttributeError):
            plan = meta = None
        if (
            plan is not None
            and outer is None
            and headers is None
            and topic is None
            and delay is None
            and at is None
            and not wait
            and (meta is None or meta is ROOT)
        ):
            if meta is None:
                set_meta(event, ROOT)
        elif self._state.observers.active:
            return await self._publisher.publish_observed(
                event, outer, headers, topic, delay, at, wait=wait
            )
        else:
            plan = self._publisher.prepare(event, outer, headers, topic)
            if delay is not None or at is not None:
                return await self._publisher.schedule(event, plan, delay, at, wait=wait)
            if wait:
                return await self._publisher.publish_and_wait(event, plan, outer)
        if self._filters:
            return await self._publisher.filter_and_admit(event, plan, outer)
        # The common cases, inlined: room everywhere, then the same as `queue.push`. Waking a
        # worker raises on another thread, so it comes first; without a worker to wake, an append
        # is safe on any thread, and the thread is not checked.
        queue = plan.only
        if queue is not None:
            if len(queue.items) >= queue.fast_size:
                return await self._publisher.record_and_admit(event, plan, outer)
            if queue.sleepers:
                queue.wake_one()
            elif queue.on_work is not None:
                queue.on_work()
            queue.items.append(event)
            plan.admitted += 1
            return plan.receipt
        if not plan.is_plain:
            return await self._publisher.record_and_admit(event, plan, outer)
        self._state.require_own_thread("publish on")
        for queue in plan.queues:
            if len(queue.items) >= queue.fast_size:
                return await self._publisher.record_and_admit(event, plan, outer)
        plan.admitted += 1
        for queue in plan.queues:
            queue.items.append(event)
            if queue.sleepers:
                queue.wake_one()
            elif queue.on_work is not None:
                queue.on_work()
        return plan.receipt

    @override
    async def publish_many(
        self, events: Iterable[Event] | AsyncIterable[Event], *, chunk: int = 1000
    ) -> PublishSummary:
        _check_many(events, chunk)
        self._state.require_own_thread("publish on")
        # A subclass or a test that replaces `publish` sees each event.
        is_own = getattr(self.publish, "__func__", None) is EventMethods.publish
        durability = self._state.durability
        if durability is not None and is_own:
            return await durability.publisher.publish_many(events, chunk)
        return await self._publish_each(events, chunk, self._take_plain if is_own else _take_none)

    async def _publish_each(
        self,
        events: Iterable[Event] | AsyncIterable[Event],
        chunk: int,
        take: Callable[[Event, PublishSummary], bool],
    ) -> PublishSummary:
        summary = PublishSummary()
        given = 0
        if isinstance(events, AsyncIterable):
            async for event in events:
                given += 1
                if not take(event, summary):
                    summary.add(await self.publish(event))
                if given % chunk == 0:
                    await anyio.lowlevel.checkpoint()
            return summary
        for event in events:
            given += 1
            if not take(event, summary):
                summary.add(await self.publish(event))
            if given % chunk == 0:
                await anyio.lowlevel.checkpoint()
        return summary

    def _take_plain(self, event: Event, summary: PublishSummary) -> bool:
        """Publish a plain event without awaiting; false if it is not plain."""
        plan = self._plans.get(type(event))
        if plan is None or self._filters or current_frame.get() is not None:
            return False
        queue = plan.only
        if queue is None or len(queue.items) >= queue.fast_size:
            return False
        meta = peek(event)
        if meta is None:
            set_meta(event, ROOT)
        elif meta is not ROOT:
            return False
        plan.admitted += 1
        queue.push(event)
        summary.accepted += 1
        return True

    async def unschedule(self, event: Message | str) -> bool:
        """Cancel a delayed event; false if it was published, or never delayed.

        With a journal this also cancels events that other processes have delayed, and enqueued
        commands that no handler has begun: their tickets then fail.

        Args:
            event: The message, or its id.
        """
        message_id = event if isinstance(event, str) else event.message_id
        if self._publisher.scheduled.remove(message_id):
            return True
        durability = self._state.durability
        return durability is not None and await durability.unschedule(message_id)


def _check_many(events: object, chunk: int) -> None:
    if chunk < 1:
        message = f"chunk must be at least 1, not {chunk}."
        raise ValueError(message)
    if isinstance(events, Message):
        # A model is iterable, over its fields: unchecked, this would publish nothing.
        message = f"publish_many takes many events; publish one {type(events).__name__} with "
        raise WrongMessageTypeError(message + "bus.publish(event).")


def _take_none(event: Event, summary: PublishSummary) -> bool:  # noqa: ARG001
    return False


@final
class EventPublisher:
    """Publishes events that are not plain, and what the parts of the bus have stored."""

    def __init__(self, state: BusState) -> None:
        self._state = state
        # Where each publish is timed, none of them is plain.
        is_timed = state.config.slow_publish is not None
        self.filters: list[FilterLike] = [_pass_all] if is_timed else []
        self.scheduled = EventSchedule(state.clock, self._publish_due, state.observers.unscheduled)

    def prepare(
        self,
        event: Event,
        outer: Frame | None,
        headers: Mapping[str, str] | None = None,
        topic: str | None = None,
    ) -> EventPlan:
        """Check an event, set its metadata and get its plan."""
        require_event(event)
        self._state.require_open("publish on", outer)
        meta = fix_in_frame(event, outer, headers=headers, topic=topic)
        if outer is not None:
            self._state.depth_watch.sent(event, outer)
        session = self._state.sessions.get(meta.session_id) if meta.session_id else None
        return self._state.event_plan(type(event), session, meta.topic)

    async def publish_observed(
        self,
        event: Event,
        outer: Frame | None,
        headers: Mapping[str, str] | None,
        topic: str | None,
        delay: float | None,
        at: datetime | None,
        *,
        wait: bool,
    ) -> PublishReceipt:
        """Publish, and notify observers."""
        require_event(event)
        observers = self._state.observers
        observers.publishing(event)
        try:
            plan = self.prepare(event, outer, headers, topic)
            if delay is not None or at is not None:
                receipt = await self.schedule(event, plan, delay, at, wait=wait)
                observers.scheduled(event)
                return receipt
            if wait:
                return await self.publish_and_wait(event, plan, outer)
            return await self.filter_and_admit(event, plan, outer)
        except BaseException as error:
            observers.not_published(event, error)
            raise

    async def publish_and_wait(
        self, event: Event, plan: EventPlan, outer: Frame | None
    ) -> PublishReceipt:
        """Publish, and wait for the in-memory handlers of this event."""
        self._state.require_runtime()
        outcomes = Outcomes()
        with waiting_on_lane(outer, plan.lanes, type(event)):
            receipt = await self.filter_and_admit(event, plan, outer, outcomes)
            if not receipt.accepted or receipt.duplicate:
                return receipt
            return replace(receipt, outcomes=await outcomes.wait())

    async def filter_and_admit(
        self,
        event: Event,
        plan: EventPlan,
        outer: Frame | None,
        outcomes: Outcomes | None = None,
    ) -> PublishReceipt:
        """Apply the filters of the bus, then admit what passes; warn if that takes too long."""
        self._state.require_own_thread("publish on")
        limit = self._state.config.slow_publish
        if limit is None:
            return await self._filter_then_admit(event, plan, outer, outcomes)
        began = self._state.clock.now()
        try:
            return await self._filter_then_admit(event, plan, outer, outcomes)
        finally:
            seconds = self._state.clock.now() - began
            if seconds > limit:
                log.warning(
                    "slow_publish",
                    bus=self._state.config.name,
                    message_type=type(event).__name__,
                    message_id=metadata_of(event).message_id,
                    seconds=seconds,
                    limit=limit,
                )

    async def _filter_then_admit(
        self, event: Event, plan: EventPlan, outer: Frame | None, outcomes: Outcomes | None
    ) -> PublishReceipt:
        receipt = await self.ask_filters(event, plan)
        if receipt is None:
            # A filter may have awaited: handlers may have changed, the bus may have stopped.
            try:
                plan = self.prepare(event, outer)
            except BusClosedError:
                plan.counts.rejected += 1
                raise
            receipt = await self.record_and_admit(event, plan, outer, outcomes)
        if receipt is not ENLISTED:
            self._state.observers.published(event, receipt)
        return receipt

    async def ask_filters(self, event: Event, plan: EventPlan) -> PublishReceipt | None:
        """Run the filters; the receipt if one of them rejects `event`."""
        for predicate in self.filters:
            try:
                wanted = await passes(predicate, event)
            except BaseException:
                plan.counts.rejected += 1
                raise
            if not wanted:
                plan.counts.filtered += 1
                return PublishReceipt(PublishStatus.FILTERED, reason=filter_name(predicate))
        return None

    async def record_and_admit(
        self,
        event: Event,
        plan: EventPlan,
        outer: Frame | None,
        outcomes: Outcomes | None = None,
    ) -> PublishReceipt:
        """Record the event in the journal, if there is one, and admit it."""
        self._state.require_own_thread("publish on")
        durability = self._state.durability
        if durability is not None and not isinstance(event, SystemEvent):
            return await durability.publisher.publish(event, plan, outer, outcomes)
        return await self.admit(event, plan, outer, outcomes=outcomes)

    async def admit(
        self,
        event: Event,
        plan: EventPlan,
        outer: Frame | None,
        commit: Gate | None = None,
        *,
        may_wait: bool = True,
        outcomes: Outcomes | None = None,
    ) -> PublishReceipt:
        """Put `event` into the queues of its handlers in this process."""
        may_wait = may_wait and (outer is None or not outer.on_lane)
        if self._state.phase is Phase.NEW:
            self._refuse_if_full(plan)
            may_wait = False

        def replan() -> EventPlan:
            return self.prepare(event, outer)

        if not may_wait:
            return await admit_event(
                event,
                plan,
                replan,
                self._state.clock,
                may_wait=False,
                commit=commit,
                outcomes=outcomes,
            )
        self._state.waiting_publishers += 1
        try:
            return await admit_event(
                event,
                plan,
                replan,
                self._state.clock,
                may_wait=True,
                commit=commit,
                outcomes=outcomes,
            )
        finally:
            self._state.waiting_publishers -= 1
            self._state.notify_idle_waiters()

    def _refuse_if_full(self, plan: EventPlan) -> None:
        for queue in plan.queues:
            if queue.must_block:
                plan.counts.rejected += 1
                raise QueueFullError(
                    queue.name,
                    max_size=queue.max_size,
                    reason=(
                        "the bus is not started, so nobody makes room. "
                        "Start it first: `async with bus:`."
                    ),
                )

    async def schedule(
        self,
        event: Event,
        plan: EventPlan,
        delay: float | None,
        at: datetime | None,
        *,
        wait: bool,
    ) -> PublishReceipt:
        """Schedule the event."""
        if wait:
            message = "Give wait=True, or delay= or at=, not both: handlers of it run later."
            raise ValueError(message)
        self._state.require_own_thread("publish on")
        if delay is not None and at is not None:
            message = "Give delay= or at=, not both."
            raise ValueError(message)
        if at is not None:
            if at.tzinfo is None:
                message = "at= must be timezone-aware: datetime(..., tzinfo=UTC)."
                raise ValueError(message)
            delay = at.astimezone(UTC).timestamp() - self._state.clock.time()
        delay = check_delay(delay)
        metadata_of(event).hops = 0  # a delayed event begins a new chain
        durability = self._state.durability
        if durability is not None and not isinstance(event, SystemEvent):
            return await durability.scheduler.add(event, delay, handlers=plan.receipt.handlers)
        cancel = self.scheduled.add(event, delay)
        return PublishReceipt(PublishStatus.ACCEPTED, handlers=plan.receipt.handlers, cancel=cancel)

    def session_ends(self, session: SessionState) -> list[Undelivered]:
        """List delayed events that handlers of an ending session will not get.

        Those that have no other handler are removed from the schedule.
        """
        left: list[Undelivered] = []
        for event in self.scheduled.of_session(session.session_id):
            meta = metadata_of(event)
            handlers = self._state.registry.event_handlers(
                type(event), session.session_id, meta.topic
            )
            own = [one for one in handlers if session.owns(one)]
            left += [Undelivered(event, one.name) for one in own]
            if own and len(own) == len(handlers):
                self.scheduled.remove(meta.message_id)
        return left

    async def _publish_due(self, event: Event) -> None:
        """Publish a delayed event; report a refusal, as there is no caller for a receipt."""
        state = self._state
        state.observers.publishing(event, is_due=True)
        try:
            plan = self.prepare(event, None)
            receipt = await self.ask_filters(event, plan)
            if receipt is None:
                # As on a lane: it does not wait for room, or the events behind it would be late.
                def replan() -> EventPlan:
                    return self.prepare(event, None)

                receipt = await admit_event(event, replan(), replan, state.clock, may_wait=False)
            reason = "" if receipt.status is not PublishStatus.REJECTED else receipt.reason
            state.observers.published(event, receipt)
        except BaseException as error:
            state.observers.not_published(event, error)
            if not isinstance(error, Exception):
                raise
            self.report_refused(event, redact_exception(error), error)
            return
        if reason:
            self.report_refused(event, reason)

    def report_refused(self, event: Event, reason: str, error: Exception | None = None) -> None:
        """Report that a delayed event was not published when it was due."""
        state = self._state
        message_id = metadata_of(event).message_id
        traceback = {} if error is None else {"traceback": error}
        log.error(
            "delayed_event_refused",
            bus=state.config.name,
            **ids_of(event),
            reason=reason,
            **traceback,
        )
        state.system_events.publish(
            EventRefusedEvent,
            event,
            lambda: EventRefusedEvent(
                event_type=type(event).__name__, event_id=message_id, reason=reason
            ),
        )


def _pass_all(event: Event) -> bool:  # noqa: ARG001
    return True
