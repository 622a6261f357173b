"""Handlers that read the journal: each a durable subscription in front of its lane."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import anyio
from pydantic import ValidationError

from msgbus.bus.lanes.queue import Gated
from msgbus.durability.wire_names import WireNames
from msgbus.errors import (
    BusClosedError,
    ConfigurationError,
    DuplicateHandlerError,
    MsgBusError,
    Refusal,
    StoredMessageError,
)
from msgbus.handlers.delivery import Poison
from msgbus.journal.codec import RawMessage
from msgbus.journal.records import Kind, Record
from msgbus.messages.message import Event, SystemEvent, metadata_of
from msgbus.subscriptions.config import SubscriptionConfig
from msgbus.subscriptions.progress import Standing
from msgbus.subscriptions.subscription import DurableSubscription
from msgbus.subscriptions.verdict import is_final
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.durability.hub import Durability
    from msgbus.handlers.registration import Registration
    from msgbus.journal.operations import Operation
    from msgbus.subscriptions.progress import Progress


@final
class HandedOver:
    """One record in the hands of a lane: to be awaited."""

    __slots__ = ("_done", "_error", "_handler")

    def __init__(
        self, handler: DurableHandler, item: Gated | None, error: Exception | None = None
    ) -> None:
        self._handler = handler
        self._error = error
        self._done = anyio.Event()
        if item is not None:
            item.report_to(self._end)
        else:
            self._done.set()

    def _end(self, item: Gated) -> None:
        message_id = metadata_of(item.event).message_id
        is_acknowledged = message_id in self._handler.acknowledged
        self._handler.acknowledged.discard(message_id)
        if isinstance(item.error, Exception):
            self._handler.attempt_failed(item, item.error, is_acknowledged=is_acknowledged)
        if not item.is_handled and not is_acknowledged:
            ended = BusClosedError(f"The bus stopped before {self._handler.name} was done with it.")
            self._error = item.error if isinstance(item.error, Exception) else ended
        self._done.set()

    def __await__(self) -> Generator[Any, Any, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        await self._done.wait()
        if self._error is not None:
            raise self._error


@final
class DurableHandler:
    """One handler's place in the journal."""

    def __init__(
        self, hub: Durability, registration: Registration, name: str, config: SubscriptionConfig
    ) -> None:
        self._hub = hub
        self.registration = registration
        self.name = name
        self.config = config
        self.subscription: DurableSubscription | None = None
        """There once the bus has started."""
        self.acknowledged: set[str] = set()
        """Messages in hand that a transaction has acknowledged, whatever becomes of the try."""
        self.starting: anyio.Event | None = None
        """Set when a start that was begun while the bus runs has come to its end."""

    @property
    def names(self) -> WireNames | None:
        """The wire names that it reads; `None` for all."""
        classes = self.registration.classes
        return None if Event in classes else WireNames(classes, self._hub.codec)

    @property
    def epoch(self) -> int | None:
        """The epoch of its lease, if it works here."""
        return None if self.subscription is None else self.subscription.engine.epoch

    @property
    def is_active(self) -> bool:
        """Whether it works here, and is expected to get on."""
        standing = None if self.subscription is None else self.subscription.engine.standing
        return standing is Standing.ACTIVE

    def progress(self) -> Progress | None:
        """How it stands; `None` before the start."""
        return None if self.subscription is None else self.subscription.progress()

    async def start(self) -> None:
        """Go on where it was.

        Raises:
            CursorError: How far it came cannot be read.
        """
        subscription = DurableSubscription(
            self._hub.journal,
            self.name,
            self,
            self._final_config(),
            names=self.names,
            matches=self.wants,
            target=self.registration.target_key,
            clock=self._hub.state.clock,
            on_dead_letter=self._given_up,
        )
        if self.names is None:
            # For the classes to be known by the time their records are read.
            len(WireNames(Event, self._hub.codec))
        await subscription.start()
        self.subscription = subscription

    def _given_up(
        self, record: Record, error: BaseException | None, attempts: int
    ) -> list[Operation]:
        if error is not None:
            self._hub.tell_failed(record, self.registration, error)
        return self._hub.recorder.burial(record, self.registration.name, attempts, error)

    def attempt_failed(self, item: Gated, error: Exception, *, is_acknowledged: bool) -> None:
        """Tell of a failure after which there is neither another attempt nor a dead letter."""
        if (
            is_acknowledged
            or isinstance(error, Refusal)
            or (
                self.subscription is not None
                and self.config.on_poison is Poison.DROP
                and is_final(self.subscription.engine.config, item.attempt, error)
            )
        ):
            self._hub.state.observers.failed(self.registration, None, item.event, error)

    def _final_config(self) -> SubscriptionConfig:
        retry = self.config.retry
        if "retry" not in (self.registration.subscription or {}):
            # Asked now and not before: policies may be set until the bus starts.
            retry = self._hub.state.assembly.retry_tiers(self.registration)
        # What cannot be decoded now will not be decoded later.
        hopeless = (*retry.give_up_on, StoredMessageError)
        retry = retry.model_copy(update={"give_up_on": hopeless})
        # The handler is in this process and cut off when its time is up, so the engine need
        # not wonder whether an answer will come.
        return self.config.model_copy(update={"retry": retry, "ack_timeout": None})

    def wants(self, record: Record) -> bool:
        """Whether a record of one of its names is for it."""
        pattern = self.registration.pattern
        if record.kind is not Kind.EVENT:
            return False
        return pattern is None or pattern.matches(record.topic)

    is_eager = True
    """Called in the order of the journal, so that the lane gets its events in that order."""

    def __call__(self, record: Record, attempt: int) -> HandedOver:
        """Put one record into the handler's lane; await the result to know how it ended."""
        try:
            event = self._decode(record)
        except StoredMessageError as error:
            return HandedOver(self, None, error)
        state = self._hub.state
        lane = state.lane_of(self.registration, None)
        item = Gated(event, None, (), attempt=attempt)
        handed = HandedOver(self, item)
        # One pair that no publish of this process may have counted.
        state.counters.event(type(event).__name__).pairs += 1
        lane.queue.push(item)
        return handed

    def _decode(self, record: Record) -> Event:
        event = self._hub.decode(record)
        if isinstance(event, RawMessage) or not isinstance(event, Event):
            message = (
                f"{record.name} {record.message_id} cannot be given to {self.name}: this process "
                f"has no event class of that name. Import its module before the bus starts."
            )
            raise StoredMessageError(message, message_id=record.message_id)
        return event


@final
class Subscribers:
    """All durable handlers of one bus."""

    def __init__(self, hub: Durability) -> None:
        self._hub = hub
        self._handlers: dict[Registration, DurableHandler] = {}

    def __iter__(self) -> Iterator[DurableHandler]:
        return iter(list(self._handlers.values()))

    def __len__(self) -> int:
        return len(self._handlers)

    def of(self, registration: Registration) -> DurableHandler | None:
        """The durable side of a handler, if it has one."""
        return self._handlers.get(registration)

    def named(self, name: str) -> DurableHandler | None:
        """The durable handler of this name in the journal."""
        return next((one for one in self._handlers.values() if one.name == name), None)

    def is_acknowledged(self, registration: Registration, message_id: str) -> bool:
        """Tell if a transaction has acknowledged a message that a durable handler has in hand."""
        handler = self._handlers.get(registration)
        return handler is not None and message_id in handler.acknowledged

    # -- registering -----------------------------------------------------------------------------

    def accept(self, registration: Registration, session_id: str | None) -> Registration:
        """The registration as it is to be used, if it becomes durable with what that needs.

        Nothing is kept of it before `add`.

        Raises:
            ConfigurationError: It cannot be durable as asked.
            DuplicateHandlerError: Its name in the journal is taken.
        """
        if not self._is_to_be_durable(registration, session_id):
            return registration
        name = _name(registration)
        if self.named(name) is not None:
            message = (
                f"Two durable handlers are called {name!r} in the journal, and would share one "
                f'place in it. Give one another name: durable="...".'
            )
            raise DuplicateHandlerError(message)
        config = self._config(registration, name)
        timeout = registration.timeout or config.ack_timeout
        return replace(
            registration,
            concurrency=1 if registration.batch else config.max_in_flight,
            timeout=timeout,
            # A name that is its place in the journal must not depend on who came before.
            named=registration.named or not isinstance(registration.durable, str),
        )

    def add(self, registration: Registration, session_id: str | None) -> None:
        """Take a handler that was accepted and is registered now, if it is durable."""
        if self._is_to_be_durable(registration, session_id):
            name = _name(registration)
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
        """Let all of them go on where they were."""
        for handler in list(self._handlers.values()):
            await handler.start()

    def start_soon(self, registration: Registration) -> None:
        """Start one that was registered while the bus runs."""
        handler = self._handlers.get(registration)
        if handler is not None:
            handler.starting = anyio.Event()
            runtime = self._hub.state.require_runtime()
            runtime.spawn(self._start_late, handler, name=f"msgbus subscription {handler.name}")

    async def _start_late(self, handler: DurableHandler) -> None:
        try:
            await handler.start()
        except MsgBusError as error:
            log.error(
                "subscription_failed",
                subscription=handler.name,
                error=redact_exception(error),
            )
        finally:
            if handler.starting is not None:
                handler.starting.set()
                handler.starting = None

    async def forget(self, registration: Registration, timeout: float | None) -> int:
        """End one handler's subscription; how many messages it still had in hand."""
        handler = self._handlers.pop(registration, None)
        if handler is None or handler.subscription is None:
            return 0
        return await handler.subscription.close(timeout)

    async def close(self) -> None:
        """Hand out nothing more, write all cursors, and let others take over.

        There was time to finish before: what is still in hand is delivered again.
        """
        async with anyio.create_task_group() as group:
            for handler in self._handlers.values():
                if handler.subscription is not None:
                    group.start_soon(handler.subscription.close, 0)


def _name(registration: Registration) -> str:
    """Its name in the journal: the one given, else its own and what it is registered for."""
    if isinstance(registration.durable, str):
        return registration.durable
    pattern = registration.pattern
    if pattern is not None:
        return f"{registration.name}:{pattern.pattern}"
    return f"{registration.name}:{'|'.join(cls.__wire__.name for cls in registration.classes)}"


def _obstacle(registration: Registration, session_id: str | None) -> str | None:
    """Why it cannot be durable, if it cannot."""
    if session_id is not None:
        return "handlers of a session end with it"
    if any(issubclass(cls, SystemEvent) for cls in registration.classes):
        return "system events are not in the journal"
    if registration.priority:
        return (
            "priority orders handlers in memory, and each durable one has a place of its own in "
            "the journal. Leave it out, or say durable=False"
        )
    return None


def _is_nameless(registration: Registration) -> bool:
    return not registration.named and "<lambda>" in registration.name
