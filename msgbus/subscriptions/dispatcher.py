"""Who gets the next message: the consumers of one subscription in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias, final

import anyio

from msgbus.errors import ConfigurationError, Refusal
from msgbus.handlers.delivery import Mode
from msgbus.runtime.event_loop import current_runtime
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.journal.records import Record
    from msgbus.runtime.event_loop import Runtime

Deliver: TypeAlias = "Callable[[Record, int], Awaitable[None]]"
"""Handles a record; the number is that of the try, from 1. Returning is the ack.

One with an attribute `is_eager` that is true is called in the order in which messages are
handed out, whatever the order in which tasks get their turn; it gives its awaitable at once.
"""


class Feed(Protocol):
    """What a reliable dispatcher needs of its engine."""

    def attach(self, dispatcher: Dispatcher) -> None:
        """Give the engine its dispatcher."""
        ...

    def consumer_joined(self) -> None:
        """There may be somebody to deliver to."""
        ...

    def consumer_left(self, consumer: Consumer) -> None:
        """What it has in hand is to go to others, now."""
        ...


@final
class Consumer:
    """One of those who share a subscription."""

    __slots__ = ("deliver", "handed", "in_hand", "is_eager", "limit", "name")

    def __init__(self, name: str, deliver: Deliver, limit: int) -> None:
        self.name = name
        self.deliver = deliver
        self.is_eager = bool(getattr(deliver, "is_eager", False))
        """Whether `deliver` is called as soon as a message is handed out."""
        self.limit = limit
        self.in_hand = 0
        """Messages it has and has not answered."""
        self.handed = 0
        """Messages it ever got."""

    def __repr__(self) -> str:
        return f"<Consumer {self.name} {self.in_hand}/{self.limit}>"


@final
class Dispatcher:
    """Chooses a consumer for each message.

    Reliable ones are fed by an engine, from the journal. The others are fed by `dispatch`: it
    fires and forgets, never waits for a slow consumer, and drops what nobody is free to take.
    """

    def __init__(self, mode: Mode, engine: Feed | None = None) -> None:
        self.mode = mode
        self._engine = engine
        self._turns: deque[Consumer] = deque()
        self._consumers: dict[str, Consumer] = {}
        self.dropped = 0
        """Messages that nobody could take; unreliable dispatchers only."""
        self.failed = 0
        """Messages whose consumer raised; unreliable dispatchers only."""
        self.handled = 0
        """Messages whose consumer is done with them; unreliable dispatchers only."""
        self._runtime: Runtime | None = None
        self._under_way = 0
        self._settled: anyio.Event | None = None
        if engine is not None:
            engine.attach(self)

    @classmethod
    def reliable_exclusive(cls, engine: Feed) -> Dispatcher:
        """One active consumer, in order; the next in line follows when it leaves."""
        return cls(Mode.EXCLUSIVE, engine)

    @classmethod
    def reliable_shared(cls, engine: Feed) -> Dispatcher:
        """All consumers in turn."""
        return cls(Mode.SHARED, engine)

    @classmethod
    def reliable_key_shared(cls, engine: Feed) -> Dispatcher:
        """All consumers in turn; one message of a key at a time."""
        return cls(Mode.KEY_SHARED, engine)

    @classmethod
    def non_reliable_exclusive(cls) -> Dispatcher:
        """The first consumer gets all that it is free to take; the rest is dropped."""
        return cls(Mode.EXCLUSIVE)

    @classmethod
    def non_reliable_shared(cls) -> Dispatcher:
        """Free consumers in turn; what comes when none is free is dropped."""
        return cls(Mode.SHARED)

    # -- consumers -----------------------------------------------------------------------------

    @property
    def consumers(self) -> tuple[Consumer, ...]:
        """Those who are there, in the order they came."""
        return tuple(self._consumers.values())

    def add_consumer(self, name: str, deliver: Deliver, *, max_in_flight: int = 1) -> Consumer:
        """Let one more take part.

        Raises:
            ConfigurationError: One of this name takes part already.
        """
        if name in self._consumers:
            message = f"There is already a consumer {name!r}; give each its own name."
            raise ConfigurationError(message)
        consumer = Consumer(name, deliver, max_in_flight)
        self._consumers[name] = consumer
        self._turns.append(consumer)
        if self._engine is not None:
            self._engine.consumer_joined()
        return consumer

    def remove_consumer(self, name: str) -> bool:
        """Let one go; what it has in hand goes to the others at once. Whether it was there.

        Without an engine it finishes what it has in hand.
        """
        consumer = self._consumers.pop(name, None)
        if consumer is None:
            return False
        self._turns.remove(consumer)
        if self._engine is not None:
            self._engine.consumer_left(consumer)
        return True

    # -- the choice ----------------------------------------------------------------------------

    def _takers(self) -> list[Consumer]:
        """Those who may get something: in exclusive mode the first only."""
        return list(self._turns)[: 1 if self.mode is Mode.EXCLUSIVE else None]

    @property
    def places(self) -> int:
        """Messages that can be in hand at the same time."""
        return sum(consumer.limit for consumer in self._takers())

    @property
    def free(self) -> int:
        """Messages that could be taken now."""
        return sum(max(consumer.limit - consumer.in_hand, 0) for consumer in self._takers())

    def choose(self) -> Consumer | None:
        """Whose turn it is, of those who are free; it has the message in hand from now on."""
        turns = self._turns
        places = min(len(turns), 1) if self.mode is Mode.EXCLUSIVE else len(turns)
        for _ in range(places):
            consumer = turns[0]
            if self.mode is not Mode.EXCLUSIVE:
                turns.rotate(-1)
            if consumer.in_hand < consumer.limit:
                consumer.in_hand += 1
                consumer.handed += 1
                return consumer
        return None

    # -- without an engine ---------------------------------------------------------------------

    async def dispatch(self, record: Record) -> bool:
        """Hand a message to a free consumer and return; whether there was one.

        It does not wait for the consumer. Nothing is kept: if nobody is free, or the consumer
        fails, the message is gone, and counted.

        Raises:
            ConfigurationError: This dispatcher is fed by an engine.
        """
        if self._engine is not None:
            message = "This dispatcher is fed by its engine; append to the journal instead."
            raise ConfigurationError(message)
        self._runtime = runtime = current_runtime(self._runtime)
        consumer = self.choose()
        if consumer is None:
            # Those who were just handed something, and need not wait for anything, finish it
            # now. Twice, as trio gives turns in any order.
            for _ in range(2):
                await runtime.checkpoint()
            consumer = self.choose()
        if consumer is None:
            self.dropped += 1
            return False
        self._under_way += 1
        begun: Awaitable[None] | None = None
        if consumer.is_eager:
            try:
                begun = consumer.deliver(record, 1)
            except Exception as error:
                self._count_failure(consumer, record, error)
                self._end(consumer)
                return True
        runtime.spawn(self._deliver, consumer, record, begun, name=f"msgbus {consumer.name}")
        return True

    async def _deliver(
        self, consumer: Consumer, record: Record, begun: Awaitable[None] | None
    ) -> None:
        try:
            await (begun or consumer.deliver(record, 1))
            self.handled += 1
        except Refusal:
            self.handled += 1
        except Exception as error:
            self._count_failure(consumer, record, error)
        except BaseException as error:
            if self._runtime is None or self._runtime.is_ending(error):
                raise
            self._count_failure(consumer, record, error)  # cancelled by its own doing
        finally:
            self._end(consumer)

    def _end(self, consumer: Consumer) -> None:
        consumer.in_hand -= 1
        self._under_way -= 1
        if self._settled is not None and not self._under_way:
            self._settled.set()
            self._settled = None

    def _count_failure(self, consumer: Consumer, record: Record, error: BaseException) -> None:
        self.failed += 1
        log.error(
            "unreliable_delivery_failed",
            consumer=consumer.name,
            message_type=record.name,
            message_id=record.message_id,
            correlation_id=record.correlation_id,
            session_id=record.session_id,
            attempt=1,
            error=redact_exception(error),
            traceback=error,
        )

    async def settled(self) -> None:
        """Return once the consumers are done with all that `dispatch` has handed out."""
        while self._under_way:
            if self._settled is None:
                self._settled = anyio.Event()
            await self._settled.wait()
