"""The observer behind `record(bus)`: messages, their handlers and outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, final

from typing_extensions import override

from msgbus.errors import WrongMessageTypeError
from msgbus.handlers.observers import BusObserver, CallBegan, CallEnded
from msgbus.messages.frame import current_frame
from msgbus.messages.message import Command, Event, Message
from msgbus.messages.receipts import DrainReport, PublishReceipt, Undelivered

if TYPE_CHECKING:
    from msgbus.handlers.registration import Registration

HandlerKey: TypeAlias = "tuple[Registration, str | None]"
"""A handler and the session that it belongs to: sessions may share a registration."""


class RecordedOutcome(Enum):
    """The outcome of one message in one handler; values are texts of the causation tree."""

    HANDLED = "handled by"
    FAILED = "failed in"
    RUNNING = "running in"
    RETRYING = "backing off in"
    CANCELLED = "cancelled in"
    DROPPED = "dropped for"
    ABANDONED = "abandoned for"


@final
@dataclass(slots=True, eq=False)
class RecordedDelivery:
    """One message in one handler, with all its attempts."""

    message: Message
    handler: str
    key: HandlerKey | None = None
    outcome: RecordedOutcome = RecordedOutcome.RUNNING
    error: BaseException | None = None
    attempts: int = 0
    order: int = 0
    """Its position among all outcomes, first to last."""


class PublishState(Enum):
    """State of one publish."""

    UNDER_WAY = "being published"
    """It may wait for room, or for the end of its transaction."""
    WAITING = "not due yet"
    CANCELLED = "cancelled before it was due"
    ENDED = ""


@final
@dataclass(slots=True, eq=False)
class RecordedPublish:
    """One event handed to the bus."""

    event: Event
    state: PublishState = PublishState.UNDER_WAY
    was_delayed: bool = False
    receipt: PublishReceipt | None = None
    error: Exception | None = None
    """The error of `publish`, if it raised."""


@final
@dataclass(slots=True, eq=False)
class RecordedMessage:
    """One message with its publishes and deliveries."""

    message: Message
    publishes: list[RecordedPublish] = field(default_factory=list[RecordedPublish])
    deliveries: list[RecordedDelivery] = field(default_factory=list[RecordedDelivery])
    queue_state: Literal["", "enqueued", "cancelled before it was due"] = ""
    """State of an enqueued command that has not reached its handler."""

    def latest(self, key: HandlerKey) -> RecordedDelivery | None:
        """Get the last delivery to this handler; an unfinished one before finished ones."""
        mine = [one for one in self.deliveries if one.key == key]
        going_on = [one for one in mine if one.outcome is not RecordedOutcome.HANDLED]
        found = going_on or mine
        return found[-1] if found else None

    def publish_in(self, *states: PublishState) -> RecordedPublish | None:
        """Get the first publish in one of these states."""
        return next((one for one in self.publishes if one.state in states), None)


@final
class RecordingObserver(BusObserver):
    """Records everything that goes through one bus.

    Messages are identified by their ids: a durable handler gets a copy of what was published.
    """

    def __init__(self) -> None:
        self._is_over = False
        self._order = count(1)
        self._messages: dict[str, RecordedMessage] = {}
        self.executed: list[Command[Any]] = []
        """Commands that reached their handler."""
        self.publishes: list[RecordedPublish] = []
        """In the order in which the bus accepted the events."""

    @property
    def messages(self) -> Iterable[RecordedMessage]:
        """All messages, in the order in which they were first seen."""
        return self._messages.values()

    def deliveries(self, outcome: RecordedOutcome) -> list[RecordedDelivery]:
        """List deliveries with this outcome, in the order of their ends."""
        found = [
            delivery
            for one in self.messages
            for delivery in one.deliveries
            if delivery.outcome is outcome
        ]
        return sorted(found, key=lambda delivery: delivery.order)

    def end(self) -> None:
        """Record no more calls: a worker may keep its call chain until its batch ends."""
        self._is_over = True

    def left(self, report: DrainReport) -> None:
        """Record what a stopped bus has not finished."""
        self._missed(report.leftovers, RecordedOutcome.ABANDONED)

    def _of(self, message: Message) -> RecordedMessage:
        return self._messages.setdefault(message.message_id, RecordedMessage(message))

    # -- sending -------------------------------------------------------------------------------

    @override
    def publishing(self, event: Event, *, is_due: bool = False) -> None:
        entry = self._of(event)
        waiting = entry.publish_in(PublishState.WAITING) if is_due else None
        if waiting is not None:
            waiting.state = PublishState.UNDER_WAY
        else:
            entry.publishes.append(RecordedPublish(event, was_delayed=is_due))

    @override
    def published(self, event: Event, receipt: PublishReceipt) -> None:
        publish = self._of(event).publish_in(PublishState.UNDER_WAY)
        if publish is not None:
            publish.receipt = receipt
            self._publish_ended(publish)
        self._missed(receipt.dropped, RecordedOutcome.DROPPED)

    @override
    def not_published(self, event: Event, error: BaseException) -> None:
        entry = self._of(event)
        publish = entry.publish_in(PublishState.UNDER_WAY)
        if publish is None:
            return
        if isinstance(error, Exception) and not isinstance(error, WrongMessageTypeError):
            publish.error = error
            self._publish_ended(publish)
        elif publish.was_delayed:
            publish.state = PublishState.WAITING
        else:
            # Cancelled while it waited: nothing happened.
            entry.publishes.remove(publish)
            if not entry.publishes and not entry.deliveries:
                del self._messages[event.message_id]

    @override
    def scheduled(self, event: Event) -> None:
        publish = self._of(event).publish_in(PublishState.UNDER_WAY)
        if publish is not None:
            publish.state = PublishState.WAITING
            publish.was_delayed = True

    @override
    def enqueued(self, command: Command[Any]) -> None:
        self._of(command).queue_state = "enqueued"

    @override
    def unscheduled(self, message_id: str) -> None:
        entry = self._messages.get(message_id)
        if entry is None:
            return
        publish = entry.publish_in(PublishState.WAITING)
        if publish is not None:
            publish.state = PublishState.CANCELLED
        elif entry.queue_state:
            entry.queue_state = "cancelled before it was due"

    def _publish_ended(self, publish: RecordedPublish) -> None:
        publish.state = PublishState.ENDED
        self.publishes.append(publish)

    def _missed(self, undelivered: Iterable[Undelivered], outcome: RecordedOutcome) -> None:
        for one in undelivered:
            delivery = RecordedDelivery(one.event, one.handler)
            self._of(one.event).deliveries.append(delivery)
            self._conclude(delivery, outcome)

    # -- handling ------------------------------------------------------------------------------

    @override
    def watch(
        self, registration: Registration, scope: str | None, per: Literal["attempt", "message"]
    ) -> CallBegan | None:
        key = (registration, scope)

        def message_began(message: Any) -> CallEnded | None:
            if self._is_over:
                return None
            deliveries = [self._begin(key, one) for one in _listed(message)]

            def ended(error: BaseException | None) -> None:
                for delivery in deliveries:
                    self._conclude(delivery, _outcome_of(error), error)

            return ended

        def attempt_began(message: Any) -> None:
            for one in _listed(message):
                entry = self._messages.get(one.message_id)
                delivery = None if entry is None else entry.latest(key)
                if delivery is not None and not self._is_over:
                    delivery.attempts = max(delivery.attempts + 1, _current_attempt())

        return message_began if per == "message" else attempt_began

    def _begin(self, key: HandlerKey, message: Message) -> RecordedDelivery:
        entry = self._of(message)
        last = entry.latest(key)
        if last is not None and last.outcome is RecordedOutcome.RETRYING:
            last.outcome = RecordedOutcome.RUNNING
            return last
        if not isinstance(message, Event):
            self.executed.append(cast("Command[Any]", message))
        delivery = RecordedDelivery(message, key[0].name, key)
        entry.deliveries.append(delivery)
        return delivery

    @override
    def failed(
        self, registration: Registration, scope: str | None, message: Message, error: BaseException
    ) -> None:
        key = (registration, scope)
        delivery = self._of(message).latest(key)
        if delivery is None:
            if isinstance(message, Command):
                return  # it was in flight when the recording began
            delivery = self._begin(key, message)  # its own filter failed: it was never called
        is_failure = isinstance(error, Exception)
        outcome = RecordedOutcome.FAILED if is_failure else RecordedOutcome.CANCELLED
        self._conclude(delivery, outcome, error)

    def _conclude(
        self,
        delivery: RecordedDelivery,
        outcome: RecordedOutcome,
        error: BaseException | None = None,
    ) -> None:
        """Set the outcome; a later one replaces it."""
        delivery.outcome = outcome
        delivery.error = error
        delivery.order = next(self._order)


def _outcome_of(error: BaseException | None) -> RecordedOutcome:
    """Get the outcome of one call; after the last attempt `failed` is called, too."""
    if error is None:
        return RecordedOutcome.HANDLED
    is_failure = isinstance(error, Exception)
    return RecordedOutcome.RETRYING if is_failure else RecordedOutcome.CANCELLED


def _current_attempt() -> int:
    frame = current_frame.get()
    return 1 if frame is None else frame.attempt


def _listed(message: Any) -> Sequence[Message]:
    return cast("list[Message]", message) if isinstance(message, list) else (message,)
