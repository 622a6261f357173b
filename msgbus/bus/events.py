"""The event side of a bus: into the queues of all handlers, or none."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import anyio.lowlevel
from typing_extensions import override

from msgbus.admission import admit_event
from msgbus.bus.bus_state import Phase
from msgbus.bus.context import Frame, current_frame, fix_in_frame
from msgbus.bus.lanes.outcomes import Outcomes, waiting_on_lane
from msgbus.bus.plans import EventPlan
from msgbus.bus.protocols import SendingMethods
from msgbus.bus.schedule import Schedule, check_delay
from msgbus.errors import BusClosedError, QueueFullError, WrongMessageTypeError
from msgbus.handlers.filters import FilterLike, filter_name, passes
from msgbus.messages.message import (
    Event,
    Message,
    SystemEvent,
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
from msgbus.telemetry.logging import ids_of, log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusCore
    from msgbus.bus.lanes.queue import Gate
    from msgbus.bus.session import BusSession


get_frame: Final = current_frame.get


class EventSide(SendingMethods):
    """`publish` and `publish_many`, as part of `MessageBus`."""

    _core: BusCore

    def _open_event_side(self) -> None:
        # Shortcut for the hot path.
        self._events: dict[type, EventPlan] = self._core.events
        # Where each publish is timed, all of them take the long way.
        is_timed = self._core.config.slow_publish is not None
        self._filters: list[FilterLike] = [_pass_all] if is_timed else []
        observers = self._core.observers
        self._schedule = Schedule(self._core.clock, self._publish_due, observers.unscheduled)
        self._is_observed = False

    def observers_changed(self) -> None:
        """Let each publish be seen, if somebody wants to; for the bus's parts."""
        self._is_observed = bool(self._core.observers.told)
        # Without plans at hand, every event takes the way on which it is told of.
        self._events = {} if self._is_observed else self._core.events

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
            plan = self._events[type(event)]
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
        elif self._is_observed:
            return await self._publish_observed(event, outer, headers, topic, delay, at, wait=wait)
        else:
            plan = self.prepare_event(event, outer, headers, topic)
            if delay is not None or at is not None:
                return await self._schedule_event(event, plan, delay, at, wait=wait)
            if wait:
                return await self._publish_and_wait(event, plan, outer)
        if self._filters:
            return await self._filter_and_admit(event, plan, outer)
        # The common cases, in place: room everywhere, and then the same as `queue.push`. To wake
        # is to be refused on another thread, so it comes first; where nobody is to be woken, an
        # append is safe on any thread, and nothing is asked.
        queue = plan.only
        if queue is not None:
            if len(queue.items) >= queue.fast_size:
                return await self._admit(event, plan, outer)
            if queue.sleepers:
                queue.wake_one()
            elif queue.on_work is not None:
                queue.on_work()
            queue.items.append(event)
            plan.admitted += 1
            return plan.receipt
        if not plan.is_plain:
            return await self._admit(event, plan, outer)
        self._core.require_home("publish on")
        for queue in plan.queues:
            if len(queue.items) >= queue.fast_size:
                return await self._admit(event, plan, outer)
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
        self._core.require_home("publish on")
        # Whoever replaces `publish`, in a subclass or a test, gets to see each event.
        is_own = getattr(self.publish, "__func__", None) is EventSide.publish
        durability = self._core.durability
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
        """Do at once what `publish` would, if there is nothing special about it."""
        plan = self._events.get(type(event))
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

    def prepare_event(
        self,
        event: Event,
        outer: Frame | None,
        headers: Mapping[str, str] | None = None,
        topic: str | None = None,
    ) -> EventPlan:
        """Everything that a plain event from outside does not need; for the bus's parts."""
        require_event(event)
        self._core.require_open("publish on", outer)
        meta = fix_in_frame(event, outer, headers=headers, topic=topic)
        if outer is not None:
            self._core.depth_watch.sent(event, outer)
        session = self._core.sessions.get(meta.session_id) if meta.session_id else None
        return self._core.event_plan(type(event), session, meta.topic)

    async def _publish_observed(
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
        """As `publish`, where somebody is told of it."""
        require_event(event)
        observers = self._core.observers
        observers.publishing(event)
        try:
            plan = self.prepare_event(event, outer, headers, topic)
            if delay is not None or at is not None:
                receipt = await self._schedule_event(event, plan, delay, at, wait=wait)
                observers.scheduled(event)
                return receipt
            if wait:
                return await self._publish_and_wait(event, plan, outer)
            return await self._filter_and_admit(event, plan, outer)
        except BaseException as error:
            observers.not_published(event, error)
            raise

    async def _publish_and_wait(
        self, event: Event, plan: EventPlan, outer: Frame | None
    ) -> PublishReceipt:
        self._core.require_runtime()
        outcomes = Outcomes()
        with waiting_on_lane(outer, plan.lanes, type(event)):
            receipt = await self._filter_and_admit(event, plan, outer, outcomes)
            if not receipt.accepted or receipt.duplicate:
                return receipt
            return replace(receipt, outcomes=await outcomes.wait())

    async def _filter_and_admit(
        self,
        event: Event,
        plan: EventPlan,
        outer: Frame | None,
        outcomes: Outcomes | None = None,
    ) -> PublishReceipt:
        self._core.require_home("publish on")
        limit = self._core.config.slow_publish
        if limit is None:
            return await self._filter_then_admit(event, plan, outer, outcomes)
        began = self._core.clock.now()
        try:
            return await self._filter_then_admit(event, plan, outer, outcomes)
        finally:
            seconds = self._core.clock.now() - began
            if seconds > limit:
                log.warning(
                    "slow_publish",
                    bus=self._core.config.name,
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
            # A filter may have awaited: handlers may have come or gone, the bus may have stopped.
            try:
                plan = self.prepare_event(event, outer)
            except BusClosedError:
                plan.counts.rejected += 1
                raise
            receipt = await self._admit(event, plan, outer, outcomes)
        if receipt is not ENLISTED:
            self._core.observers.published(event, receipt)
        return receipt

    async def ask_filters(self, event: Event, plan: EventPlan) -> PublishReceipt | None:
        """The receipt of the filter that turns `event` away, if one does; for the bus's parts."""
        for predicate in self._filters:
            try:
                wanted = await passes(predicate, event)
            except BaseException:
                plan.counts.rejected += 1
                raise
            if not wanted:
                plan.counts.filtered += 1
                return PublishReceipt(PublishStatus.FILTERED, reason=filter_name(predicate))
        return None

    async def _admit(
        self,
        event: Event,
        plan: EventPlan,
        outer: Frame | None,
        outcomes: Outcomes | None = None,
    ) -> PublishReceipt:
        self._core.require_home("publish on")
        durability = self._core.durability
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
        """Put `event` into the queues of its handlers in this process; for the bus's parts."""
        may_wait = may_wait and (outer is None or not outer.on_lane)
        if self._core.phase is Phase.NEW:
            self._refuse_if_full(plan)
            may_wait = False

        def replan() -> EventPlan:
            return self.prepare_event(event, outer)

        if not may_wait:
            return await admit_event(
                event,
                plan,
                replan,
                self._core.clock,
                may_wait=False,
                commit=commit,
                outcomes=outcomes,
            )
        self._core.waiting_publishers += 1
        try:
            return await admit_event(
                event,
                plan,
                replan,
                self._core.clock,
                may_wait=True,
                commit=commit,
                outcomes=outcomes,
            )
        finally:
            self._core.waiting_publishers -= 1
            self._core.work_ended()

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

    async def _schedule_event(
        self,
        event: Event,
        plan: EventPlan,
        delay: float | None,
        at: datetime | None,
        *,
        wait: bool,
    ) -> PublishReceipt:
        if wait:
            message = "wait=True waits for handlers now: leave it out, or delay= and at=."
            raise ValueError(message)
        self._core.require_home("publish on")
        if delay is not None and at is not None:
            message = "Give delay= or at=, not both."
            raise ValueError(message)
        if at is not None:
            if at.tzinfo is None:
                message = "at= must know its time zone: datetime(..., tzinfo=UTC)."
                raise ValueError(message)
            delay = at.astimezone(UTC).timestamp() - self._core.clock.time()
        delay = check_delay(delay)
        metadata_of(event).hops = 0  # what waits for its time begins anew
        durability = self._core.durability
        if durability is not None and not isinstance(event, SystemEvent):
            return await durability.schedule(event, delay, handlers=plan.receipt.handlers)
        cancel = self._schedule.add(event, delay)
        return PublishReceipt(PublishStatus.ACCEPTED, handlers=plan.receipt.handlers, cancel=cancel)

    async def unschedule(self, event: Message | str) -> bool:
        """Take back a delayed event; false if it was published, or never delayed.

        With a journal this works for events that other processes have delayed, and for
        enqueued commands that nobody has begun to handle: their tickets then fail.

        Args:
            event: The message, or its id.
        """
        message_id = event if isinstance(event, str) else event.message_id
        if self._schedule.remove(message_id):
            return True
        durability = self._core.durability
        return durability is not None and await durability.unschedule(message_id)

    def session_ends(self, session: BusSession) -> list[Undelivered]:
        """Delayed events that handlers of an ending session will not see; for the bus's parts.

        One that no other handler would see either is taken out of the schedule.
        """
        left: list[Undelivered] = []
        for event in self._schedule.of_session(session.session_id):
            meta = metadata_of(event)
            handlers = self._core.registry.event_handlers(
                type(event), session.session_id, meta.topic
            )
            own = [one for one in handlers if session.owns(one)]
            left += [Undelivered(event, one.name) for one in own]
            if own and len(own) == len(handlers):
                self._schedule.remove(meta.message_id)
        return left

    async def _publish_due(self, event: Event) -> None:
        """Publish a delayed event. Nobody waits for a receipt, so a refusal is told about."""
        core = self._core
        core.observers.publishing(event, is_due=True)
        try:
            plan = self.prepare_event(event, None)
            receipt = await self.ask_filters(event, plan)
            if receipt is None:
                # As on a lane: nobody may be kept waiting for a delayed event's room.
                def replan() -> EventPlan:
                    return self.prepare_event(event, None)

                receipt = await admit_event(event, replan(), replan, core.clock, may_wait=False)
            reason = "" if receipt.status is not PublishStatus.REJECTED else receipt.reason
            core.observers.published(event, receipt)
        except BaseException as error:
            core.observers.not_published(event, error)
            if not isinstance(error, Exception):
                raise
            self.tell_refused(event, redact_exception(error), error)
            return
        if reason:
            self.tell_refused(event, reason)

    def tell_refused(self, event: Event, reason: str, error: Exception | None = None) -> None:
        """Say that a delayed event was not published when it was due; for the bus's parts."""
        core = self._core
        message_id = metadata_of(event).message_id
        traceback = {} if error is None else {"traceback": error}
        log.error(
            "delayed_event_refused",
            bus=core.config.name,
            **ids_of(event),
            reason=reason,
            **traceback,
        )
        core.lifecycle.tell(
            EventRefusedEvent,
            event,
            lambda: EventRefusedEvent(
                event_type=type(event).__name__, event_id=message_id, reason=reason
            ),
        )


def _check_many(events: object, chunk: int) -> None:
    if chunk < 1:
        message = f"chunk must be at least 1, not {chunk}."
        raise ValueError(message)
    if isinstance(events, Message):
        # A model is iterable, over its fields: without this it would publish nothing.
        message = f"publish_many takes many events; publish one {type(events).__name__} with "
        raise WrongMessageTypeError(message + "bus.publish(event).")


def _pass_all(event: Event) -> bool:  # noqa: ARG001
    return True


def _take_none(event: Event, summary: PublishSummary) -> bool:  # noqa: ARG001
    return False
