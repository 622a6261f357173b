"""Options of a durable subscription, and the loop that they make."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, final

from pydantic import BeforeValidator, Field, model_validator

from msgbus.handlers.delivery import Delivery, Mode, Poison, StartAt, SubscriptionTuning
from msgbus.journal.operations import Drop, Reply
from msgbus.journal.records import Order, Record, Selection
from msgbus.resilience.config import DURABLE_RETRY, RetryConfig, require_storable
from msgbus.runtime.arguments import Options
from msgbus.subscriptions.loop import SubscriptionLoop
from msgbus.subscriptions.loops import PartitionedLoop, SharedLoop
from msgbus.subscriptions.partitioned import PARK_LIMIT, PartitionedState
from msgbus.subscriptions.rules import Deliver, DeliveryRules, Describe, describe
from msgbus.subscriptions.shared import SharedState

if TYPE_CHECKING:
    from msgbus.journal.ports import Journal
    from msgbus.runtime.clock import Clock
    from msgbus.subscriptions.gate import AloneGate
    from msgbus.subscriptions.in_flight import InFlight

_ORDERS: Final = {
    Mode.EXCLUSIVE: Order.LOG,
    Mode.KEY_SHARED: Order.KEY,
    Mode.SHARED: Order.NONE,
}


class SubscriptionConfig(Options):
    """Everything about a subscription but its name, its messages and its handler."""

    mode: Mode = Mode.EXCLUSIVE
    """How messages are distributed to processes and consumers, and in which order."""

    delivery: Delivery = Delivery.AT_LEAST_ONCE
    """Delivery guarantee after a crash."""

    start: Annotated[StartAt, BeforeValidator(StartAt.of)] = StartAt.EARLIEST
    """Start position of a new subscription; an existing one continues at its cursor."""

    max_in_flight: int = Field(default=1, ge=1)
    """Messages that one consumer handles at the same time."""

    ack_timeout: float | None = Field(default=30.0, gt=0)
    """Seconds after which an attempt is cancelled and counts as failed; `None` for no limit."""

    rate_limit: float | None = Field(default=None, gt=0)
    """Deliveries per second in this process, over all consumers."""

    retry: RetryConfig | None = None
    """When a failed message is retried; by default patiently if a service is down, and only twice
    after an error of the message itself (`MESSAGE_ERRORS`)."""

    on_poison: Poison = Poison.DEAD_LETTER
    """What happens to a message whose last attempt failed."""

    park_key: bool = False
    """Let later messages of its key wait for a dead letter, until that is replayed or discarded;
    in `EXCLUSIVE` mode all messages wait."""

    park_limit: int = Field(default=PARK_LIMIT, ge=1)
    """Messages of one key that are parked at most; further ones are dead-lettered, too."""

    idempotent: bool = False
    """Remember each message that was handled, and never deliver it again, wherever it seeks."""

    key: Callable[[Record], str | None] | None = None
    """The key of a message, instead of the one in its record."""

    require: Literal["memory", "os", "fsync", "quorum", "quorum_fsync"] | None = None
    """What a commit of the journal must survive, else the start fails; as `require_ack`."""

    tuning: SubscriptionTuning = SubscriptionTuning()
    """Numbers that few have to change."""

    @model_validator(mode="after")
    def _check(self) -> SubscriptionConfig:
        if self.park_key and self.mode is Mode.SHARED:
            message = (
                "park_key=True keeps the order of a key behind a dead letter, and mode=Mode.SHARED "
                "has no order. Choose Mode.KEY_SHARED or Mode.EXCLUSIVE, or leave park_key out."
            )
            raise ValueError(message)
        if self.park_key and self.on_poison is not Poison.DEAD_LETTER:
            message = (
                f"park_key=True waits for a dead letter, and on_poison={self.on_poison.value!r} "
                f"makes none. Choose Poison.DEAD_LETTER, or leave park_key out."
            )
            raise ValueError(message)
        if self.is_at_most_once and self.on_poison is Poison.BLOCK:
            message = (
                "on_poison=Poison.BLOCK cannot hold a message that was acknowledged before its "
                "delivery; choose DROP or DEAD_LETTER, or delivery=Delivery.AT_LEAST_ONCE."
            )
            raise ValueError(message)
        return self

    @property
    def is_at_most_once(self) -> bool:
        """Whether messages are acknowledged before they are delivered."""
        return self.delivery is Delivery.AT_MOST_ONCE


def selection_of(
    config: SubscriptionConfig,
    *,
    names: Collection[str] | None = None,
    matches: Callable[[Record], bool] | None = None,
    text: str = "",
) -> Selection:
    """Return which messages a subscription takes, and in which order.

    Args:
        config: Its options.
        names: Wire names; `None` for all.
        matches: Asked for each record that `names` lets through.
        text: Describes `names` and `matches`: processes in which it differs do not mix.
    """
    order = _ORDERS[config.mode]
    return Selection(
        names=names,
        matches=matches,
        order=order,
        partitions=config.tuning.partitions if order is Order.KEY else 1,
        key=config.key,
        parks=config.park_key,
        keeps_done=config.idempotent,
        # Two modes on one cursor would not see each other's claims.
        text=f"{config.mode} {text}".strip(),
    )


@final
class NoRetries:
    """The retry rule of `AT_MOST_ONCE`: none, whatever has failed."""

    in_process = 0.0

    def pause(self, attempt: int, error: BaseException | None) -> None:
        """Return that there is no further attempt."""
        del attempt, error


def make_loop(
    journal: Journal,
    name: str,
    config: SubscriptionConfig,
    selection: Selection,
    deliver: Deliver,
    *,
    clock: Clock,
    gate: AloneGate,
    letter: Describe = describe,
    handler: str = "",
    record: Literal["all", "failures", "none"] = "all",
) -> SubscriptionLoop[Any]:
    """Make the loop that delivers a subscription in this process.

    Args:
        journal: Where its messages are.
        name: Name of the subscription.
        config: Its options.
        selection: Which messages it takes; see `selection_of`.
        deliver: Handles one message.
        clock: Time.
        gate: That of the membership.
        letter: Describes a dead letter.
        handler: Name of the handler; that of the subscription unless given.
        record: Attempts that are recorded as deliveries.

    Raises:
        ConfigurationError: Its retries cannot be kept in the journal.
    """
    retry = config.retry or DURABLE_RETRY
    require_storable(retry, f"Subscription {name!r}")
    rules = DeliveryRules(
        retry=NoRetries() if config.is_at_most_once else retry,
        on_poison=config.on_poison,
        ack_timeout=config.ack_timeout,
        rate_limit=config.rate_limit,
        burst=config.tuning.burst,
        record=record,
        is_once=config.is_at_most_once,
    )
    options: dict[str, Any] = {
        "max_in_flight": config.max_in_flight,
        "buffer": config.tuning.buffer,
    }
    if selection.order is Order.NONE:
        if config.is_at_most_once:
            deliver = _acknowledged_first(journal, deliver)
        shared = SharedState(name, selection, clock, **options)
        return SharedLoop(journal, shared, deliver, rules, gate, letter, handler=handler)
    owned = PartitionedState(
        name,
        selection,
        clock,
        at_most_once=config.is_at_most_once,
        park_limit=config.park_limit,
        **options,
    )
    return PartitionedLoop(journal, owned, deliver, rules, gate, letter, handler=handler)


def _acknowledged_first(journal: Journal, deliver: Deliver) -> Deliver:
    """Drop the row of a claimed message before it is delivered, for `AT_MOST_ONCE`."""

    async def drop_and_deliver(one: InFlight) -> Reply | None:
        if one.row is not None:
            await journal.commit([Drop(one.row)], one.member)
            one.row, one.is_acked_first = None, True
        return await deliver(one)

    return drop_and_deliver
