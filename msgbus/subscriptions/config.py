"""How a subscription works: frozen models, seconds as floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from msgbus.errors import Unhandleable
from msgbus.handlers.delivery import Delivery, Mode, Poison, StartAt
from msgbus.journal.records import AckLevel, Record
from msgbus.runtime.arguments import Options


class RetryTiers(Options):
    """How often, and how patiently, a message that failed is tried again.

    Short pauses are kept in memory. Longer ones are written to the journal, so that a restart
    neither forgets nor shortens them.
    """

    max_attempts: int = Field(default=5, ge=1)
    """Attempts in all, the first included; 1 means no retry."""

    initial_delay: float = Field(default=0.1, ge=0)
    """Seconds before the second attempt."""

    exponential_base: float = Field(default=2.0, ge=1)
    """By how much each pause is longer than the one before."""

    max_delay: float = Field(default=600.0, ge=0)
    """Upper bound of one pause, jitter included."""

    jitter: bool = True
    """Multiply each pause by a random factor between 0.5 and 1.5."""

    in_process: float = Field(default=10.0, ge=0)
    """Pauses beyond this are written to the journal."""

    retry_on: tuple[type[Exception], ...] | None = None
    """Only these errors are followed by another attempt; `None` for all."""

    give_up_on: tuple[type[Exception], ...] = ()
    """Errors after which there is no other attempt, even if `retry_on` names a base of them."""

    def delay(self, attempt: int, chance: float = 0.5) -> float:
        """Seconds between attempt number `attempt`, which failed, and the next.

        `chance` is a random number from 0 to 1; in the middle, jitter changes nothing.
        """
        try:
            pause = self.initial_delay * self.exponential_base ** (attempt - 1)
        except OverflowError:
            pause = self.max_delay if self.initial_delay else 0.0
        if self.jitter:
            pause = min(pause, self.max_delay) * (0.5 + chance)
        return min(pause, self.max_delay)

    def allows(self, error: Exception) -> bool:
        """Whether another attempt may follow this error."""
        if isinstance(error, (Unhandleable, self.give_up_on)):
            return False
        return self.retry_on is None or isinstance(error, self.retry_on)


class SubscriptionConfig(Options):
    """Everything about a subscription but its name and its handler."""

    mode: Mode = Mode.EXCLUSIVE
    """Who gets what, and in which order."""

    delivery: Delivery = Delivery.AT_LEAST_ONCE
    """What a crash may do to a message."""

    start: Annotated[StartAt, BeforeValidator(StartAt.of)] = StartAt.EARLIEST
    """Where it begins if it is new."""

    max_in_flight: int = Field(default=1, ge=1)
    """Messages that one consumer may have in flight at the same time."""

    ack_timeout: float | None = Field(default=30.0, gt=0)
    """Seconds after which a message in flight counts as failed; `None` for no limit."""

    rate_limit: float | None = Field(default=None, gt=0)
    """Deliveries per second, over all consumers."""

    burst: int = Field(default=1, ge=1)
    """Deliveries that may begin at once under `rate_limit` after a quiet time."""

    retry: RetryTiers = RetryTiers()
    """How often, and how patiently, a failed message is tried again."""

    on_poison: Poison = Poison.DEAD_LETTER
    """What becomes of a message that has failed for the last time."""

    park_key: bool = False
    """After a dead letter, send later messages of its key there too; `KEY_SHARED` only."""

    idempotent: bool = False
    """Mark each message as handled, and never deliver a marked one again."""

    key: Callable[[Record], str | None] | None = None
    """The key of a message, instead of the one in its record."""

    require: AckLevel | None = None
    """The least that the journal must promise; otherwise the start fails."""

    lease_ttl: float = Field(default=5.0, gt=0)
    """Seconds without a sign of life after which a standby takes over."""

    flush_acks: int = Field(default=1000, ge=1)
    """Acks after which the cursor is written."""

    flush_interval: float = Field(default=5.0, gt=0)
    """Seconds after which a cursor that has moved is written."""

    flush_idle: float = Field(default=0.5, ge=0)
    """Seconds without work after which a cursor that has moved is written."""

    fetch_size: int = Field(default=100, ge=1)
    """Messages that are read from the journal at a time."""

    max_buffered: int = Field(default=1000, ge=1)
    """Messages that are held in memory: ready, in flight, or waiting for a retry."""

    max_ahead: int = Field(default=10_000, ge=1)
    """Messages that may be read from the oldest one on that is not done; then it is waited for."""

    loss_window: int = Field(default=100, ge=1)
    """Messages that are passed at once, before the first is delivered; `AT_MOST_ONCE` only."""

    watchdog: float = Field(default=0.5, gt=0)
    """Seconds between looks for overdue acks, stalls and lag."""

    @model_validator(mode="after")
    def _check(self) -> SubscriptionConfig:
        if self.park_key and self.mode is not Mode.KEY_SHARED:
            message = "park_key=True needs mode=Mode.KEY_SHARED: other modes know no keys."
            raise ValueError(message)
        if self.delivery is Delivery.AT_MOST_ONCE and self.on_poison is Poison.BLOCK:
            message = (
                "on_poison=Poison.BLOCK cannot hold a message that was passed before its "
                "delivery; choose DROP or DEAD_LETTER, or delivery=Delivery.AT_LEAST_ONCE."
            )
            raise ValueError(message)
        return self

    @property
    def is_at_most_once(self) -> bool:
        """Whether the cursor moves before the delivery."""
        return self.delivery is Delivery.AT_MOST_ONCE
