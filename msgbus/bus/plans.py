"""Plans: the handlers and queues of one message type, computed once and then looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, final

from msgbus.bus.lanes.queue import Gate, Gated, gate_by_priority
from msgbus.messages.receipts import PublishReceipt, PublishStatus

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusState
    from msgbus.bus.lanes.lane import Lane
    from msgbus.bus.lanes.outcomes import Outcomes
    from msgbus.bus.protocols import IMessageBus
    from msgbus.handlers.injection import Call
    from msgbus.handlers.registration import Registration
    from msgbus.messages.message import Event
    from msgbus.telemetry.stats import CommandCounts, EventCounts

TOPICS_KEPT: Final = 5_000
"""Size of each half of the cache of plans by topic."""


@final
class CommandPlan:
    """Handler, chain and counters of the commands of one type."""

    __slots__ = ("counts", "host", "invoke", "name", "registration", "scope")

    def __init__(
        self,
        host: BusState,
        registration: Registration,
        invoke: Call,
        counts: CommandCounts,
        scope: str | None,
    ) -> None:
        self.host = host
        self.registration = registration
        self.name = registration.name
        self.invoke = invoke
        self.counts = counts
        self.scope = scope
        """The session that the handler belongs to; `None` for a handler of the bus."""

    @property
    def bus(self) -> IMessageBus:
        """The bus, for handlers that ask for it."""
        return self.host.bus


@final
class EventPlan:
    """The queues that events of one type go to."""

    __slots__ = (
        "_priorities",
        "admitted",
        "durable",
        "is_plain",
        "lanes",
        "only",
        "queues",
        "receipt",
        "totals",
    )

    def __init__(
        self, lanes: Sequence[Lane], counts: EventCounts, *, is_kept: bool, durable: int = 0
    ) -> None:
        self.totals = counts
        """The counters of the event type, without what the fast path has counted."""
        self.admitted = 0
        """Events admitted on the fast path since `flush_counts` was last called."""
        self.lanes = tuple(lanes)
        self.queues = tuple(lane.queue for lane in lanes)
        self.durable = durable
        """Durable handlers, which read it from the journal."""
        self.receipt = PublishReceipt(PublishStatus.ACCEPTED, handlers=len(lanes) + durable)
        priorities = [lane.priority for lane in lanes]
        self._priorities = priorities
        self.is_plain = is_kept and len(set(priorities)) <= 1
        """Whether events are appended without gates: all handlers have one priority, and the
        plan is kept, so that its counts are flushed later."""
        self.only = self.queues[0] if self.is_plain and len(self.queues) == 1 else None
        """The queue of a plain event with one handler: saves the hot path two loops."""

    @property
    def counts(self) -> EventCounts:
        """The counters of the event type, with the counts of this plan flushed."""
        self.flush_counts()
        return self.totals

    def flush_counts(self) -> None:
        """Add what the fast path counted to the counters of the event type."""
        self.totals.admitted += self.admitted
        self.totals.pairs += self.admitted * len(self.queues)
        self.admitted = 0

    def count_admitted(self) -> None:
        """Count one event admitted off the fast path."""
        self.totals.admitted += 1
        self.totals.pairs += len(self.queues)

    def take_back(self) -> None:
        """Count one admitted event as rejected: the journal has not taken it."""
        self.totals.admitted -= 1
        self.totals.pairs -= len(self.queues)
        self.totals.rejected += 1

    def items(
        self, event: Event, commit: Gate | None = None, outcomes: Outcomes | None = None
    ) -> Sequence[Event | Gated]:
        """Get the item for each queue: the event, or a gated one if priorities differ.

        With `commit`, all of them wait for that gate too; with `outcomes`, each of them reports
        its outcome there.
        """
        if commit is None and outcomes is None and len(set(self._priorities)) <= 1:
            return (event,) * len(self.queues)
        items = gate_by_priority(event, self._priorities, commit)
        if outcomes is not None:
            outcomes.collect(items, [queue.name for queue in self.queues])
        return items


@final
class TopicPlans:
    """Bounded cache of plans for events published under a topic of their own.

    A plan that is found again moves from the old half to the young one; the others are dropped
    with the old half. So topics that are seen once do not evict those in use.
    """

    __slots__ = ("_old", "_young")

    def __init__(self) -> None:
        self._young: dict[tuple[type, str], EventPlan] = {}
        self._old: dict[tuple[type, str], EventPlan] = {}

    def get(self, event_type: type, topic: str) -> EventPlan | None:
        """Get a plan, if it is cached."""
        plan = self._young.get((event_type, topic))
        if plan is None:
            plan = self._old.pop((event_type, topic), None)
            if plan is not None:
                self.keep(event_type, topic, plan)
        return plan

    def keep(self, event_type: type, topic: str, plan: EventPlan) -> None:
        """Cache a plan."""
        if len(self._young) >= TOPICS_KEPT:
            for forgotten in self._old.values():
                forgotten.flush_counts()
            self._old, self._young = self._young, {}
        self._young[event_type, topic] = plan

    def flush_counts(self) -> None:
        """Add the counts of the plans to the counters."""
        for plans in (self._young, self._old):
            for plan in plans.values():
                plan.flush_counts()

    def forget(self) -> None:
        """Drop all plans: the handlers have changed."""
        self.flush_counts()
        self._young = {}
        self._old = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)
