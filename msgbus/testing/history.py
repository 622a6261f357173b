"""What a recorder remembers: messages, what became of their publishing, and who ran them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, Any, cast, final

from msgbus.messages import Command, Event, Message
from msgbus.receipts import DrainReport, PublishReceipt, Undelivered

if TYPE_CHECKING:
    from msgbus.clock import Clock


class Outcome(Enum):
    """What became of one message in one handler, in the words of the causation tree."""

    HANDLED = "handled by"
    FAILED = "failed in"
    RUNNING = "running in"
    RETRYING = "to be tried again in"
    CANCELLED = "cancelled in"
    DROPPED = "dropped for"
    ABANDONED = "given up for"


@final
@dataclass(slots=True, eq=False)
class HistoryEntry:
    """One message in one handler."""

    message: Message
    handler: str
    owner: object = None
    """The handler's lane or plan: handlers of several sessions may share all else."""
    outcome: Outcome = Outcome.RUNNING
    error: BaseException | None = None
    order: int = 0
    """Its place among all outcomes, first to last."""


@final
@dataclass(slots=True, eq=False)
class Publishing:
    """One event handed to the bus."""

    event: Event
    is_under_way: bool = False
    """Whether `publish` has not come back yet; it may be waiting for room."""
    receipt: PublishReceipt | None = None
    """`None` for what the bus tells by itself, and for events that came by a side door."""
    error: Exception | None = None
    """What `publish` raised instead of giving a receipt."""
    due: float | None = None
    """Clock time of a delayed event."""
    is_cancelled: bool = False
    """Whether a delayed event was taken back."""


@final
@dataclass(slots=True, eq=False)
class Entry:
    """One message and all that happened to it."""

    message: Message
    publishings: list[Publishing] = field(default_factory=list[Publishing])
    deliveries: list[HistoryEntry] = field(default_factory=list[HistoryEntry])

    def latest(self, owner: object) -> HistoryEntry | None:
        """The last time this handler got the message."""
        for delivery in reversed(self.deliveries):
            if delivery.owner is owner:
                return delivery
        return None


def _seen_cancel(publishing: Publishing, receipt: PublishReceipt) -> Callable[[], bool]:
    def cancel() -> bool:
        took_back = receipt.cancel is not None and receipt.cancel()
        publishing.is_cancelled |= took_back
        return took_back

    return cancel


@final
class Run:
    """One call of a handler; a handler of lists has several messages in it."""

    __slots__ = ("_deliveries", "_history")

    def __init__(self, history: History, deliveries: Sequence[HistoryEntry]) -> None:
        self._history = history
        self._deliveries = deliveries

    def returned(self) -> None:
        """The handler, and everything around it, succeeded."""
        self._conclude(Outcome.HANDLED, None)

    def raised(self, error: BaseException) -> None:
        """It did not. If that is the last word, `failed` says so afterwards."""
        kind = Outcome.RETRYING if isinstance(error, Exception) else Outcome.CANCELLED
        self._conclude(kind, error)

    def failed(self, error: BaseException) -> None:
        """It failed for good."""
        self._conclude(Outcome.FAILED, error)

    def _conclude(self, outcome: Outcome, error: BaseException | None) -> None:
        for delivery in self._deliveries:
            self._history.conclude(delivery, outcome, error)


@final
class History:
    """Everything that one recorder saw of one bus.

    Messages are told apart as objects: two equal ones are two, and no id needs to be made
    while the bus works.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: float | None = None
        self._order = count(1)
        self._before: dict[int, Event] = {}
        self._entries: dict[int, Entry] = {}
        self.executed: list[Command[Any]] = []
        """Commands that reached their handler."""
        self.publishings: list[Publishing] = []
        """In the order in which the bus took the events."""

    @property
    def entries(self) -> Iterable[Entry]:
        """All messages, in the order in which they were first seen."""
        return self._entries.values()

    def deliveries(self, outcome: Outcome) -> list[HistoryEntry]:
        """All with this outcome, in the order in which they came to it."""
        found = [
            delivery
            for entry in self.entries
            for delivery in entry.deliveries
            if delivery.outcome is outcome
        ]
        return sorted(found, key=lambda delivery: delivery.order)

    def entry(self, message: Message) -> Entry:
        """The entry of this very object."""
        return self._entries.setdefault(id(message), Entry(message))

    # -- beginning and end ---------------------------------------------------------------------

    def skip(self, queued: Iterable[Event]) -> None:
        """These were published before the recording; only their handling belongs to it."""
        self._before |= {id(event): event for event in queued}

    def end(self) -> None:
        """From now on nothing falls due any more."""
        self._ended = self._clock.now()

    def is_due(self, publishing: Publishing) -> bool:
        """Whether an event has really been published, rather than kept for later."""
        if publishing.due is None:
            return True
        now = self._clock.now() if self._ended is None else self._ended
        return publishing.due <= now and not publishing.is_cancelled

    # -- publishing ----------------------------------------------------------------------------

    def publishing(self, event: Event) -> Publishing:
        """`publish` was called."""
        publishing = Publishing(event, is_under_way=True)
        self.entry(event).publishings.append(publishing)
        return publishing

    def published(
        self, publishing: Publishing, receipt: PublishReceipt, due: float | None
    ) -> PublishReceipt:
        """The bus took an event, now or for later, or turned it away and said so.

        Returns:
            The receipt to give to the caller: of a delayed event, one whose `cancel` is seen.
        """
        if due is not None:
            receipt = replace(receipt, cancel=_seen_cancel(publishing, receipt))
        publishing.due = due
        publishing.receipt = receipt
        self._came_back(publishing)
        self._missed(receipt.dropped, Outcome.DROPPED)
        return receipt

    def refused(self, publishing: Publishing, error: Exception) -> None:
        """`publish` raised."""
        publishing.error = error
        self._came_back(publishing)

    def withdrawn(self, publishing: Publishing) -> None:
        """`publish` was cancelled while it waited, or was given no event: nothing happened."""
        entry = self.entry(publishing.event)
        entry.publishings.remove(publishing)
        if not entry.publishings and not entry.deliveries:
            del self._entries[id(publishing.event)]

    def _came_back(self, publishing: Publishing) -> None:
        publishing.is_under_way = False
        self.publishings.append(publishing)

    def left(self, report: DrainReport) -> None:
        """The bus has stopped, and hands back what it did not finish."""
        self._missed(report.leftovers, Outcome.ABANDONED)

    def _missed(self, undelivered: Iterable[Undelivered], outcome: Outcome) -> None:
        for one in undelivered:
            delivery = HistoryEntry(one.event, one.handler)
            self.entry(one.event).deliveries.append(delivery)
            self.conclude(delivery, outcome)

    # -- handling ------------------------------------------------------------------------------

    def begin(self, handler: str, owner: object, messages: Sequence[Message], attempt: int) -> Run:
        """A handler is called, for the first time or again."""
        return Run(self, [self._begin(handler, owner, one, attempt) for one in messages])

    def _begin(self, handler: str, owner: object, message: Message, attempt: int) -> HistoryEntry:
        entry = self.entry(message)
        again = entry.latest(owner) if attempt > 1 else None
        if again is not None:
            again.outcome = Outcome.RUNNING
            return again
        if isinstance(message, Event):
            if self._is_news(entry):
                self._came_back(self.publishing(message))
        else:
            self.executed.append(cast("Command[Any]", message))
        delivery = HistoryEntry(message, handler, owner)
        entry.deliveries.append(delivery)
        return delivery

    def _is_news(self, entry: Entry) -> bool:
        """Whether an event reached a handler without having been seen on its way in."""
        return not entry.publishings and id(entry.message) not in self._before

    def event_failed(
        self, handler: str, owner: object, event: Message, error: BaseException
    ) -> None:
        """The bus has given an event up for one handler."""
        delivery = self.entry(event).latest(owner)
        if delivery is None:  # the handler's own filter failed, so it was never called
            delivery = self._begin(handler, owner, event, attempt=1)
        self.conclude(delivery, Outcome.FAILED, error)

    def conclude(
        self, delivery: HistoryEntry, outcome: Outcome, error: BaseException | None = None
    ) -> None:
        """Note an outcome; a later one takes its place."""
        delivery.outcome = outcome
        delivery.error = error
        delivery.order = next(self._order)
