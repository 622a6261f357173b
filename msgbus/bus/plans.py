"""What to do with a message of one type: worked out once, then looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, final

from msgbus.bus.lanes.queue import Gate, Gated, gate_by_priority
from msgbus.messages.receipts import PublishReceipt, PublishStatus

if TYPE_CHECKING:
    from msgbus.bus.bus import MessageBus
    from msgbus.bus.lanes.lane import Lane
    from msgbus.bus.lanes.outcomes import Outcomes
    from msgbus.handlers.injection import Call
    from msgbus.handlers.registration import Registration
    from msgbus.messages.message import Event
    from msgbus.telemetry.stats import CommandCounts, EventCounts

TOPICS_KEPT: Final = 5_000
"""So many plans for topics are kept, and as many that were in use before them."""


@final
class CommandPlan:
    """How commands of one type are handled."""

    __slots__ = ("bus", "counts", "invoke", "name", "registration", "scope")

    def __init__(
        self,
        bus: MessageBus,
        registration: Registration,
        invoke: Call,
        counts: CommandCounts,
        scope: str | None,
    ) -> None:
        self.bus = bus
        self.registration = registration
        self.name = registration.name
        self.invoke = invoke
        self.counts = counts
        self.scope = scope
        """The session whose handler it is; `None` for the bus's."""


@final
class EventPlan:
    """Where events of one type go."""

    __slots__ = (
        "_counts",
        "_priorities",
        "admitted",
        "durable",
        "is_plain",
        "lanes",
        "only",
        "queues",
        "receipt",
    )

    def __init__(
        self, lanes: Sequence[Lane], counts: EventCounts, *, is_kept: bool, durable: int = 0
    ) -> None:
        self._counts = counts
        self.admitted = 0
        """Events admitted on the fast path since the last `settle_accounts`."""
        self.lanes = tuple(lanes)
        self.queues = tuple(lane.queue for lane in lanes)
        self.durable = durable
        """How many more handlers will find it in the journal."""
        self.receipt = PublishReceipt(PublishStatus.ACCEPTED, handlers=len(lanes) + durable)
        priorities = [lane.priority for lane in lanes]
        self._priorities = priorities
        self.is_plain = is_kept and len(set(priorities)) <= 1
        """Whether events are simply appended: all handlers have one priority, and the plan
        is kept, so that what it counts is brought in later."""
        self.only = self.queues[0] if self.is_plain and len(self.queues) == 1 else None
        """The one queue of a plain event with one handler: spares the hot path two loops."""

    @property
    def counts(self) -> EventCounts:
        """The counters of the event type, with this plan's share brought in."""
        self.settle_accounts()
        return self._counts

    def settle_accounts(self) -> None:
        """Bring what the fast path counted into the counters of the event type."""
        self._counts.admitted += self.admitted
        self._counts.pairs += self.admitted * len(self.queues)
        self.admitted = 0

    def count_admitted(self) -> None:
        """Count one event that took the long way."""
        self._counts.admitted += 1
        self._counts.pairs += len(self.queues)

    def take_back(self) -> None:
        """One event that was counted as admitted was not published after all."""
        self._counts.admitted -= 1
        self._counts.pairs -= len(self.queues)
        self._counts.rejected += 1

    def items(
        self, event: Event, commit: Gate | None = None, outcomes: Outcomes | None = None
    ) -> Sequence[Event | Gated]:
        """The event as it goes into each queue: behind gates if priorities differ.

        With `commit`, all of them wait for that gate too; with `outcomes`, each of them reports
        there how its handler ended.
        """
        if commit is None and outcomes is None and len(set(self._priorities)) <= 1:
            return (event,) * len(self.queues)
        items = gate_by_priority(event, self._priorities, commit)
        if outcomes is not None:
            outcomes.collect(items, [queue.name for queue in self.queues])
        return items


@final
class TopicPlans:
    """Plans of events that were published under a topic of their own; a bounded number.

    What is found again moves from the old half to the young one, and what is not is
    forgotten with its half, so topics that are seen once do not push out those in use.
    """

    __slots__ = ("_old", "_young")

    def __init__(self) -> None:
        self._young: dict[tuple[type, str], EventPlan] = {}
        self._old: dict[tuple[type, str], EventPlan] = {}

    def get(self, event_type: type, topic: str) -> EventPlan | None:
        """The plan, if it is kept."""
        plan = self._young.get((event_type, topic))
        if plan is None:
            plan = self._old.pop((event_type, topic), None)
            if plan is not None:
                self.keep(event_type, topic, plan)
        return plan

    def keep(self, event_type: type, topic: str, plan: EventPlan) -> None:
        """Keep a plan."""
        if len(self._young) >= TOPICS_KEPT:
            for forgotten in self._old.values():
                forgotten.settle_accounts()
            self._old, self._young = self._young, {}
        self._young[event_type, topic] = plan

    def settle_accounts(self) -> None:
        """Bring into the ledger what the plans have counted."""
        for plans in (self._young, self._old):
            for plan in plans.values():
                plan.settle_accounts()

    def forget(self) -> None:
        """The handlers have changed: begin anew."""
        self.settle_accounts()
        self._young = {}
        self._old = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)
