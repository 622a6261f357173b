"""`Dispatcher`: chooses a consumer for each message of one subscription in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias, final

import anyio

from msgbus.errors import BusStateError, ConfigurationError, Refusal
from msgbus.handlers.delivery import Mode
from msgbus.runtime.event_loop import current_runtime
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.journal.records import Record
    from msgbus.runtime.event_loop import Runtime

Consume: TypeAlias = "Callable[[Record, int], Awaitable[None]]"
"""Handles a record; the number is that of the attempt, from 1. Returning acknowledges it."""


class Feed(Protocol):
    """What a reliable dispatcher needs of its engine."""

    def attach(self, dispatcher: Dispatcher) -> None:
        """Connect the engine with its dispatcher."""
        ...

    def consumers_changed(self) -> None:
        """Take note that a consumer was added or removed."""
        ...


@final
class Consumer:
    """One of those that share a subscription."""

    __slots__ = ("consume", "delivered", "in_flight", "limit", "name")

    def __init__(self, name: str, consume: Consume, limit: int) -> None:
        self.name = name
        self.consume = consume
        self.limit = limit
        self.in_flight = 0
        """Messages that it is handling."""
        self.delivered = 0
        """Messages that it ever got."""

    def __repr__(self) -> str:
        return f"<Consumer {self.name} {self.in_flight}/{self.limit}>"


@final
class _Assignment:
    """One message, and the consumer that has it."""

    __slots__ = ("_waiting", "consumer", "offset", "scope")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.consumer: Consumer | None = None
        self.scope: anyio.CancelScope | None = None
        """Cancels the attempt that is running."""
        self._waiting: anyio.Event | None = None

    async def wait(self) -> None:
        """Wait for a consumer."""
        self._waiting = anyio.Event()
        await self._waiting.wait()

    def give(self, consumer: Consumer) -> None:
        """Let a consumer have the message."""
        self.consumer = consumer
        if self._waiting is not None:
            self._waiting.set()


@final
class Dispatcher:
    """Chooses a consumer for each message.

    A reliable one is fed by an engine, from the journal. The others are fed by `dispatch`, which
    returns at once: it never waits for a slow consumer, and drops what no consumer is free for.
    """

    def __init__(self, mode: Mode, engine: Feed | None = None) -> None:
        self.mode = mode
        self._engine = engine
        self._turns: deque[Consumer] = deque()
        self._consumers: dict[str, Consumer] = {}
        self._assignments: list[_Assignment] = []
        self.dropped = 0
        """Messages that no consumer was free for; without an engine only."""
        self.failed = 0
        """Messages whose consumer raised; without an engine only."""
        self.handled = 0
        """Messages that a consumer has handled; without an engine only."""
        self._runtime: Runtime | None = None
        self._running = 0
        self._settled: anyio.Event | None = None
        if engine is not None:
            engine.attach(self)

    @classmethod
    def reliable_exclusive(cls, engine: Feed) -> Dispatcher:
        """Deliver to one consumer, in order; the next one takes over when it leaves."""
        return cls(Mode.EXCLUSIVE, engine)

    @classmethod
    def reliable_shared(cls, engine: Feed) -> Dispatcher:
        """Deliver to all consumers in turn."""
        return cls(Mode.SHARED, engine)

    @classmethod
    def reliable_key_shared(cls, engine: Feed) -> Dispatcher:
        """Deliver to all consumers in turn; one message of a key at a time."""
        return cls(Mode.KEY_SHARED, engine)

    @classmethod
    def non_reliable_exclusive(cls) -> Dispatcher:
        """Deliver to the first consumer whatever it is free for; drop the rest."""
        return cls(Mode.EXCLUSIVE)

    @classmethod
    def non_reliable_shared(cls) -> Dispatcher:
        """Deliver to free consumers in turn; drop what comes when none is free."""
        return cls(Mode.SHARED)

    # -- consumers -------------------------------------------------------------------------------

    @property
    def consumers(self) -> tuple[Consumer, ...]:
        """All consumers, in the order in which they were added."""
        return tuple(self._consumers.values())

    def add_consumer(self, name: str, consume: Consume, *, max_in_flight: int = 1) -> Consumer:
        """Add a consumer, also while messages are delivered.

        Args:
            name: Its name.
            consume: Handles a record.
            max_in_flight: Messages that it handles at the same time.

        Raises:
            ConfigurationError: There is one of this name.
        """
        if name in self._consumers:
            message = f"There is already a consumer {name!r}; give each its own name."
            raise ConfigurationError(message)
        consumer = Consumer(name, consume, max_in_flight)
        self._consumers[name] = consumer
        self._turns.append(consumer)
        if self._engine is not None:
            self._engine.consumers_changed()
        self._assign()
        return consumer

    def remove_consumer(self, name: str) -> bool:
        """Remove a consumer; return whether it was there.

        Its handler is cancelled, and what it has in flight goes to the others at once. Without an
        engine it finishes what it has.
        """
        consumer = self._consumers.pop(name, None)
        if consumer is None:
            return False
        self._turns.remove(consumer)
        if self._engine is not None:
            left = [one for one in self._assignments if one.consumer is consumer]
            for one in left:
                one.consumer = None
            self._engine.consumers_changed()
            self._assign()  # in order, before any of their tasks goes on
            for one in left:
                if one.scope is not None:
                    one.scope.cancel()
        return True

    @property
    def capacity(self) -> int:
        """Messages that can be in flight at the same time."""
        return sum(consumer.limit for consumer in self._active())

    def _active(self) -> list[Consumer]:
        """Return those that may get messages: in exclusive mode the first only."""
        return list(self._turns)[: 1 if self.mode is Mode.EXCLUSIVE else None]

    def choose(self) -> Consumer | None:
        """Return a free consumer, those in turn, and count the message as in flight there."""
        turns = self._turns
        for _ in self._active():
            consumer = turns[0]
            if self.mode is not Mode.EXCLUSIVE:
                turns.rotate(-1)
            if consumer.in_flight < consumer.limit:
                consumer.in_flight += 1
                consumer.delivered += 1
                return consumer
        return None

    # -- with an engine --------------------------------------------------------------------------

    async def deliver(
        self,
        record: Record,
        attempt: int,
        run: Callable[[Consumer], Awaitable[None]],
        *,
        once: bool,
    ) -> None:
        """Deliver a message to a free consumer; to another one if that is removed meanwhile.

        Args:
            record: The message.
            attempt: Number of the attempt.
            run: Lets a consumer handle it.
            once: Deliver it to one consumer only.

        Raises:
            BusStateError: The consumer was removed, and it is to be delivered once.
        """
        one = _Assignment(record.offset)
        self._assignments.append(one)
        self._assign()
        try:
            while True:
                consumer = one.consumer
                if consumer is None:
                    await one.wait()
                    continue
                with anyio.CancelScope() as one.scope:
                    await run(consumer)
                    return
                consumer.in_flight -= 1
                if once:
                    message = (
                        f"Consumer {consumer.name!r} was removed in attempt {attempt} at "
                        f"{record.name} {record.message_id}, which is delivered at most once."
                    )
                    raise BusStateError(message)
        finally:
            self._assignments.remove(one)
            if one.consumer is not None:
                one.consumer.in_flight -= 1
            self._assign()

    def _assign(self) -> None:
        """Give waiting messages to free consumers, the oldest message first."""
        waiting = [one for one in self._assignments if one.consumer is None]
        for one in sorted(waiting, key=lambda each: each.offset):
            consumer = self.choose()
            if consumer is None:
                return
            one.give(consumer)

    # -- without an engine -----------------------------------------------------------------------

    async def dispatch(self, record: Record) -> bool:
        """Give a message to a free consumer and return; tell whether there was one.

        It does not wait for the consumer. Nothing is kept: if no consumer is free, or it fails,
        the message is lost, and counted.

        Raises:
            ConfigurationError: This dispatcher is fed by an engine.
        """
        if self._engine is not None:
            message = "This dispatcher is fed by its engine; append to the journal instead."
            raise ConfigurationError(message)
        self._runtime = runtime = current_runtime(self._runtime)
        consumer = self.choose()
        if consumer is None:
            # Consumers that just got something, and wait for nothing, finish it now. Twice, as
            # trio gives turns in any order.
            for _ in range(2):
                await runtime.checkpoint()
            consumer = self.choose()
        if consumer is None:
            self.dropped += 1
            return False
        self._running += 1
        runtime.spawn(self._run, consumer, record, name=f"msgbus {consumer.name}")
        return True

    async def _run(self, consumer: Consumer, record: Record) -> None:
        try:
            await consumer.consume(record, 1)
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
            consumer.in_flight -= 1
            self._running -= 1
            if self._settled is not None and not self._running:
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
        """Return once consumers have handled all that `dispatch` gave them."""
        while self._running:
            if self._settled is None:
                self._settled = anyio.Event()
            await self._settled.wait()
