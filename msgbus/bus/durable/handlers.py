"""Durable handlers: event handlers whose subscription reads the journal and calls them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, final

import anyio
from pydantic import ValidationError

from msgbus.bus.durable.renamed import refuse_renamed
from msgbus.bus.lanes.queue import Gated
from msgbus.errors import (
    BusClosedError,
    BusStateError,
    ConfigurationError,
    DuplicateHandlerError,
    MsgBusError,
    Refusal,
    SettleTimeoutError,
    StoredMessageError,
)
from msgbus.handlers.delivery import Mode, StartAt
from msgbus.handlers.filters import passes
from msgbus.journal.codec import RawMessage, WireNames
from msgbus.journal.records import Letter, Selection
from msgbus.messages.frame import DeliveryFrame, current_frame
from msgbus.messages.message import Event, SystemEvent
from msgbus.middleware.chain import not_awaited
from msgbus.runtime.timeouts import time_limit
from msgbus.subscriptions.config import SubscriptionConfig, make_loop, selection_of
from msgbus.subscriptions.progress import (
    Standing,
    count_left,
    describe_left,
    progress_now,
    require_reached,
    start_offset,
)
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.stats import Durations
from msgbus.telemetry.tracebacks import redacted_traceback

if TYPE_CHECKING:
    from msgbus.bus.durable.hub import DurableBus
    from msgbus.bus.lanes.lane import Lane
    from msgbus.handlers.registration import Registration
    from msgbus.journal.records import Record
    from msgbus.messages.topics.pattern import TopicPattern
    from msgbus.subscriptions.in_flight import InFlight
    from msgbus.subscriptions.loop import SubscriptionLoop
    from msgbus.subscriptions.progress import Progress


@final
class DurableHandler:
    """One event handler with a subscription of its own."""

    def __init__(
        self, hub: DurableBus, registration: Registration, name: str, config: SubscriptionConfig
    ) -> None:
        self._hub = hub
        self.registration = registration
        self.name = name
        self.config = config
        self.loop: SubscriptionLoop[Any] | None = None
        """There while the bus runs."""
        self._lane: Lane | None = None
        """Its counts and its call chain, for one run of the bus."""
        self._last: Progress | None = None
        """As it was when the bus stopped."""
        self.starting: anyio.Event | None = None
        """Set when a start that was begun while the bus runs has ended."""

    @property
    def names(self) -> WireNames | None:
        """Wire names of its messages; `None` for all."""
        classes = self.registration.classes
        return None if Event in classes else WireNames(classes, self._hub.codec)

    @property
    def selection(self) -> Selection:
        """Which messages it gets, and in which order."""
        pattern = self.registration.pattern
        matches = None if pattern is None else partial(_has_topic, pattern)
        if self.names is None:
            len(WireNames(Event, self._hub.codec))  # the classes are known then
        text = self.registration.target_key
        return selection_of(self.config, names=self.names, matches=matches, text=text)

    @property
    def is_active(self) -> bool:
        """True while it delivers in this process."""
        progress = self.progress()
        return progress is not None and progress.standing is Standing.ACTIVE

    def progress(self) -> Progress | None:
        """Return how it stands; `None` before the first start."""
        return self._last if self.loop is None else progress_now(self.loop)

    def require_progress(self) -> Progress:
        """Return how it stands.

        Raises:
            BusStateError: The bus was never started.
        """
        progress = self.progress()
        return progress_now(self._require_loop()) if progress is None else progress

    def _require_loop(self) -> SubscriptionLoop[Any]:
        if self.loop is None:
            message = f"{self.registration.name} reads the journal once the bus is started."
            raise BusStateError(message)
        return self.loop

    # -- steering --------------------------------------------------------------------------------

    def pause(self) -> None:
        """Begin no further delivery."""
        self._require_loop().pause()

    def resume(self) -> None:
        """Go on after `pause`; else let parked keys go. Repeat the message that blocks it."""
        self._require_loop().resume()

    async def seek(self, start: StartAt | int) -> None:
        """Continue at another position, in every process.

        Raises:
            BusStateError: The bus does not run.
        """
        loop = self._require_loop()
        offset = await start_offset(self._hub.journal, StartAt.of(start))
        loop.blocked_at = None
        await self._hub.membership.seek(self.name, offset)

    async def caught_up(self, offset: int | None, timeout: float | None) -> int:
        """Return when everything up to `offset` is done and written, in whichever process.

        Raises:
            SettleTimeoutError: It took longer than `timeout`; or, without one, it is paused or
                blocked, and nothing goes on before `resume`.
            ConfigurationError: The offset is beyond the head of the journal.
            BusStateError: The bus does not run, or it ended during the wait.
        """
        loop, is_patient = self._require_loop(), timeout is not None
        upto = await self._hub.journal.head() if offset is None else offset
        await require_reached(self._hub.journal, upto)
        with time_limit(timeout, self._hub.state.clock):
            while not await self._hub.membership.is_done(loop, upto, is_patient=is_patient):
                if self._require_loop() is not loop:
                    message = f"{self.registration.name} was restarted while it was waited for."
                    raise BusStateError(message)
            return upto
        raise SettleTimeoutError([describe_left(self.require_progress())], seconds=timeout or 0.0)

    # -- life ------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Add its subscription to the membership, which begins it with its next `start`.

        Raises:
            ConfigurationError: Its retry cannot be stored, or the journal promises too little.
        """
        hub, self._lane = self._hub, None
        retry = self.config.retry
        if retry is None:
            # Asked now and not before: policies may be set until the bus starts.
            retry = hub.state.assembly.durable_retry(self.registration)
        config = self.config.model_copy(update={"retry": retry})
        hub.require_promise(config.require, f"Subscription {self.name!r}")
        loop = make_loop(
            hub.journal,
            self.name,
            config,
            self.selection,
            self.deliver,
            clock=hub.state.clock,
            gate=hub.membership.gate,
            letter=self._letter,
            handler=self.registration.name,
            record=hub.recorded_attempts,
        )
        loop.on_final_failure = self._failed_finally
        hub.membership.add(loop, await start_offset(hub.journal, config.start))
        self.loop = loop

    async def close(self, timeout: float | None) -> int:
        """Leave the subscription to other processes; return what was still in flight."""
        loop, self.loop = self.loop, None
        if loop is None:
            return 0
        self._last = progress_now(loop)
        return await self._hub.membership.exclude(loop, timeout)

    async def left(self) -> int:
        """Return how many messages it still has to handle, at most, in whichever process."""
        return await count_left(self._hub.journal, self.name, self.selection)

    def ending(self) -> None:
        """Take note that the membership is about to end."""
        if self.loop is not None:
            self._last = replace(progress_now(self.loop), standing=Standing.CLOSED)
            self.loop = None

    # -- deliveries ------------------------------------------------------------------------------

    async def deliver(self, one: InFlight) -> None:
        """Call the handler with one message."""
        event, lane = self._decode(one.record), self._lane
        counters, name = self._hub.state.counters, type(event).__name__
        counts = counters.events.get(name) or counters.event(name)
        # One pair that no publish of this process may have counted.
        counts.pairs += 1
        if lane is None:
            lane = self._lane = self._hub.state.lane_of(self.registration, None)
        try:
            if self.registration.batch:
                while not await self._deliver_in_list(lane, event, one):
                    counts.pairs += 1
            else:
                await self._call(lane, event, DeliveryFrame(event, lane, one))
        except Exception as error:
            if one.is_ended and not one.is_lost:  # its transaction has acknowledged it
                self._hub.tell_failed(one.record, self.registration, error)
            raise

    @staticmethod
    async def _call(lane: Lane, event: Event, frame: DeliveryFrame) -> None:
        """Call the handler, count it, and raise what it raises: no queue, no worker in between."""
        counts = lane.queue.counts
        invoke = lane.invoke
        assert invoke is not None  # noqa: S101 (lanes are opened when the bus starts)
        if len(counts.recent) >= Durations.FOLD_AT:
            counts.fold()
        counts.retried += frame.first_attempt > 1
        predicate = lane.registration.filter
        now = lane.host.clock.now
        token = current_frame.set(frame)
        began = now()
        try:
            if predicate is not None and not await passes(predicate, event):
                counts.filtered += 1
                return
            value = await invoke(event)
            if value is not None and type(value) is CoroutineType:
                value.close()
                raise not_awaited(lane.name, event)
            if frame.context is not None and frame.context.emitted:
                await lane.host.flush(frame)
        except Exception as error:
            counts.recent.append(now() - began)
            lane.host.event_failed(lane, event, error)
            raise
        except BaseException as error:
            if lane.host.require_runtime().is_ending(error):
                counts.abandoned += 1
                raise
            counts.recent.append(now() - began)
            lane.host.event_failed(lane, event, error)
            message = f"{lane.name} was cancelled by what it called, not by the bus."
            raise RuntimeError(message) from error
        finally:
            current_frame.reset(token)
        counts.recent.append(now() - began)

    def held(self) -> AbstractAsyncContextManager[None]:
        """Begin nothing while a dead letter is replayed, if it has one order for all messages.

        Not if it parks them behind the letter: then nothing else runs anyway.
        """
        config = self.config
        if self.loop is None or config.mode is not Mode.EXCLUSIVE or config.park_key:
            return nullcontext()
        return self.loop.held(config.ack_timeout)

    async def _deliver_in_list(self, lane: Lane, event: Event, one: InFlight) -> bool:
        """Let the lane handle an event; false if its list was cut off because of another one."""
        done = anyio.Event()
        item = Gated(event, None, (), lambda _: done.set(), delivery=one)
        lane.queue.push(item)
        try:
            await done.wait()
        except BaseException:
            lane.interrupt(item)  # another process has it now
            raise
        if isinstance(item.error, Exception):
            raise item.error
        if lane.is_closing and not item.is_handled and not item.is_filtered:
            raise BusClosedError(f"The bus stopped before {self.name} was done with it.")
        return item.is_handled or item.is_filtered

    def _decode(self, record: Record) -> Event:
        event = self._hub.codec.decode(record)
        if isinstance(event, RawMessage) or not isinstance(event, Event):
            message = (
                f"{record.name} {record.message_id} cannot be given to {self.name}: this process "
                f"has no event class of that name. Import its module before the bus starts."
            )
            raise StoredMessageError(message, message_id=record.message_id)
        return event

    def _failed_finally(self, one: InFlight, error: Exception | None) -> None:
        if error is not None:
            self._hub.tell_failed(one.record, self.registration, error)

    def _letter(self, one: InFlight, error: Exception | None, now: float) -> Letter:
        self._hub.dead_lettered()
        # Its handler is known by the name of the subscription.
        return letter_of(self.registration, one, error, now)._replace(handler="")


def _has_topic(pattern: TopicPattern, record: Record) -> bool:
    return pattern.matches(record.topic)


def letter_of(
    registration: Registration | None, one: InFlight, error: Exception | None, now: float
) -> Letter:
    """Describe the dead letter of a message that its last attempt has failed on."""
    if error is None:
        reason = "its process ended in every attempt"
    elif isinstance(error, (Refusal, StoredMessageError)):
        reason = "not to be retried"
    else:
        reason = "retries exhausted"
    return Letter(
        "" if error is None else type(error).__name__,
        reason,
        one.received,
        now,
        traceback="" if error is None else redacted_traceback(error),
        handler="" if registration is None else registration.name,
        target="" if registration is None else registration.target_key,
    )


@final
class DurableHandlers:
    """All durable handlers of one bus."""

    def __init__(self, hub: DurableBus) -> None:
        self._hub = hub
        self._handlers: dict[Registration, DurableHandler] = {}

    def __iter__(self) -> Iterator[DurableHandler]:
        return iter(list(self._handlers.values()))

    def __len__(self) -> int:
        return len(self._handlers)

    @property
    def names(self) -> set[str]:
        """Names of the subscriptions."""
        return {handler.name for handler in self._handlers.values()}

    def of(self, registration: Registration) -> DurableHandler | None:
        """Return the durable side of a handler, if it has one."""
        return self._handlers.get(registration)

    def named(self, name: str) -> DurableHandler | None:
        """Return the handler of a subscription."""
        return next((one for one in self._handlers.values() if one.name == name), None)

    def acknowledged(self, delivery: InFlight) -> None:
        """End a delivery that a transaction has acknowledged."""
        handler = self.named(delivery.subscription)
        if handler is not None and handler.loop is not None:
            handler.loop.acknowledged(delivery)

    # -- registering -----------------------------------------------------------------------------

    def accept(self, registration: Registration, session_id: str | None) -> Registration:
        """Return a registration as it is to be used, if it becomes durable with what that needs.

        Nothing is kept of it before `add`.

        Raises:
            ConfigurationError: It cannot be durable as asked.
            DuplicateHandlerError: The name of its subscription is taken.
        """
        if not self._is_to_be_durable(registration, session_id):
            return registration
        name = subscription_name(registration)
        if self.named(name) is not None:
            message = (
                f"Two durable handlers are called {name!r} in the journal, and would share one "
                f'subscription. Give one another name: durable="...".'
            )
            raise DuplicateHandlerError(message)
        config = self._config(registration, name)
        return replace(
            registration,
            concurrency=1 if registration.batch else config.max_in_flight,
            timeout=registration.timeout or config.ack_timeout,
            # The name of its subscription must not depend on who came before.
            named=registration.named or not isinstance(registration.durable, str),
        )

    def add(self, registration: Registration, session_id: str | None) -> None:
        """Add a handler that was accepted and is registered now, if it is durable."""
        if self._is_to_be_durable(registration, session_id):
            name = subscription_name(registration)
            config = self._config(registration, name)
            self._handlers[registration] = DurableHandler(self._hub, registration, name, config)

    def _is_to_be_durable(self, registration: Registration, session_id: str | None) -> bool:
        if registration.is_command:
            return False
        options = ", ".join(registration.subscription or ())
        if registration.durable is False:
            if options:
                message = (
                    f"{registration.name}: {options} is for durable handlers, not durable=False."
                )
                raise ConfigurationError(message)
            return False
        is_asked = bool(registration.durable or options)
        is_wanted = is_asked or not _is_nameless(registration)
        obstacle = _obstacle(registration, session_id)
        if obstacle is None:
            return is_wanted
        is_in_order = session_id is not None or not registration.priority
        if is_asked or (is_wanted and not is_in_order):
            message = f"{registration.name} cannot be a durable subscription: {obstacle}."
            raise ConfigurationError(message)
        return False

    def _config(self, registration: Registration, name: str) -> SubscriptionConfig:
        options = dict(registration.subscription or {})
        in_flight = registration.concurrency
        if registration.batch:
            in_flight = (registration.queue or self._hub.state.config.queue).batch_size
        options.setdefault("max_in_flight", in_flight)
        try:
            return SubscriptionConfig(**options)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(str(part) for part in fault['loc']) or 'options'}: {fault['msg']}"
                for fault in error.errors()
            )
            known = ", ".join(SubscriptionConfig.model_fields)
            message = f"Durable handler {name!r}: {faults}. Its options are: {known}."
            raise ConfigurationError(message) from None

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Let all of them continue at their cursors.

        Raises:
            ConfigurationError: A retry cannot be stored, the journal promises too little, or one
                is new beside a subscription for the same messages that nobody attends.
            CursorError: A cursor cannot be read.
        """
        handlers = list(self._handlers.values())
        await refuse_renamed(self._hub.journal, handlers)
        for handler in handlers:
            await handler.prepare()
        if handlers:
            await self._hub.membership.start()

    def start_soon(self, registration: Registration) -> None:
        """Start one that was registered while the bus runs."""
        handler = self._handlers.get(registration)
        if handler is not None:
            handler.starting = anyio.Event()
            runtime = self._hub.state.require_runtime()
            runtime.spawn(self._start_late, handler, name=f"msgbus subscription {handler.name}")

    async def _start_late(self, handler: DurableHandler) -> None:
        try:
            await handler.prepare()
            await self._hub.membership.start()
        except MsgBusError as error:
            log.error(
                "subscription_failed", subscription=handler.name, error=redact_exception(error)
            )
        finally:
            if handler.starting is not None:
                handler.starting.set()
                handler.starting = None

    async def forget(self, registration: Registration, timeout: float | None) -> int:
        """End the subscription of one handler; return what was still in flight."""
        handler = self._handlers.pop(registration, None)
        return 0 if handler is None else await handler.close(timeout)

    def ending(self) -> None:
        """Take note that the membership is about to end."""
        for handler in self._handlers.values():
            handler.ending()


def subscription_name(registration: Registration) -> str:
    """Return the name of its subscription: as given, else its own and its messages'."""
    if isinstance(registration.durable, str):
        return registration.durable
    pattern = registration.pattern
    if pattern is not None:
        return f"{registration.name}:{pattern.pattern}"
    return f"{registration.name}:{'|'.join(cls.__wire__.name for cls in registration.classes)}"


def _obstacle(registration: Registration, session_id: str | None) -> str | None:
    """Return why it cannot be durable, if it cannot."""
    if session_id is not None:
        return "handlers of a session end with it"
    if any(issubclass(cls, SystemEvent) for cls in registration.classes):
        return "system events are not in the journal"
    if registration.priority:
        return (
            "priority orders handlers in memory, and each durable one has a cursor of its own in "
            "the journal. Leave it out, or say durable=False"
        )
    return None


def _is_nameless(registration: Registration) -> bool:
    return not registration.named and "<lambda>" in registration.name
