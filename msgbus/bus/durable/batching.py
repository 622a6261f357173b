"""Publish many events on a bus with a journal, many of them in one commit.

Two take turns: one reads the events and asks the filters, the other gives them their places
and commits them. So a source that lets one wait holds up nothing that it has given already,
and whatever arrives during a commit forms the next one.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from typing import TYPE_CHECKING, Final, final

import anyio

from msgbus.bus.durable.fencing import owned_deliveries
from msgbus.bus.durable.transactions import current_transaction
from msgbus.errors import BusClosedError
from msgbus.messages.frame import current_frame
from msgbus.messages.message import SystemEvent, require_event
from msgbus.messages.receipts import PublishReceipt

if TYPE_CHECKING:
    from msgbus.bus.durable.hub import DurableBus
    from msgbus.bus.durable.publishing import Placed
    from msgbus.bus.plans import EventPlan
    from msgbus.messages.message import Event

LARGEST: Final = 1000
"""Events of one commit, at most."""


@final
class Batch:
    """Many events on their way to the journal.

    Args:
        hub: Whose journal it is.
        told: Called with each event and what became of it.
        size: Events of one commit; never more than `LARGEST`.
    """

    def __init__(
        self,
        hub: DurableBus,
        told: Callable[[Event, PublishReceipt], object],
        size: int = LARGEST,
    ) -> None:
        self._hub = hub
        self._publisher = hub.state.event_publisher
        self._is_observed = bool(hub.state.observers.active)
        self._told = self._tell if self._is_observed else told
        self._told_caller = told
        self._size = min(size, LARGEST)
        self._outer = current_frame.get()
        self._read: list[tuple[Event, Placed | None]] = []
        """Those that wait for their place; those that need none are prepared meanwhile."""
        self._version = -1
        """Of the plans for which they were prepared."""
        self._is_all = False
        """Whether there will be no more."""
        self._news = anyio.Event()
        self._room = anyio.Event()
        self._fault: Exception | None = None
        """Why the source, or one of its events, was the last."""
        self._failure: Exception | None = None
        """Why nothing more can be written."""
        self._observers = hub.state.observers
        self._observed: dict[int, Event] = {}
        """Events whose end is still to be told to those who observe, if anybody does."""

    async def publish(self, events: Iterable[Event] | AsyncIterable[Event]) -> None:
        """Publish all of them, in order; those before one that is refused are published.

        Raises:
            WrongMessageTypeError: One is no event.
            StoredMessageError: One would not come back as it is.
            JournalError: The journal did not take a commit; nothing of that one is published.
        """
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._write_all, group.cancel_scope)
                await self._read_all(events)
            # What stopped the writer came first in the order of the events.
            error = self._failure or self._fault
            if error is not None:
                raise error
        except BaseException as failure:
            for event in self._observed.values():
                self._observers.not_published(event, failure)
            raise

    # -- reading ---------------------------------------------------------------------------------

    async def _read_all(self, events: Iterable[Event] | AsyncIterable[Event]) -> None:
        try:
            if isinstance(events, AsyncIterable):
                async for event in events:
                    await self._take(event)
            else:
                is_enlisted = self._is_enlisted()
                for event in events:
                    if is_enlisted or self._is_observed or self._publisher.filters:
                        await self._take(event)
                    else:
                        await self._put(event)
        except Exception as error:
            self._fault = error
        finally:
            self._is_all = True
            self._news.set()

    async def _take(self, event: Event) -> None:
        if self._is_enlisted():
            self._told(event, await self._hub.state.bus.publish(event))
            return
        if self._is_observed:
            require_event(event)
            self._observers.publishing(event)
            self._observed[id(event)] = event
        if self._publisher.filters:
            refused = await self._publisher.ask_filters(event, self._plan(event))
            if refused is not None:
                self._told(event, refused)
                return
        await self._put(event)

    def _is_enlisted(self) -> bool:
        transaction = current_transaction.get()
        return transaction is not None and transaction.of(self._hub) is not None

    async def _put(self, event: Event) -> None:
        while len(self._read) >= self._size:
            self._room = anyio.Event()
            await self._room.wait()
        prepared = self._prepared(event)
        self._read.append((event, prepared))
        if len(self._read) == 1:
            self._news.set()

    def _prepared(self, event: Event) -> Placed | None:
        """Make the record of an event that no queue wants, while those before it are written."""
        plan = self._plan(event)
        if self._version != self._hub.state.version:
            self._version = self._hub.state.version
            self._read = [(one, None) for one, _ in self._read]
        if plan.queues or isinstance(event, SystemEvent):
            return None
        return self._hub.publisher.prepare(event, plan, self._outer)

    def _tell(self, event: Event, receipt: PublishReceipt) -> None:
        """Tell the observers, too."""
        if self._observed.pop(id(event), None) is not None:
            self._observers.published(event, receipt)
        self._told_caller(event, receipt)

    # -- writing ---------------------------------------------------------------------------------

    async def _write_all(self, both: anyio.CancelScope) -> None:
        try:
            while True:
                while not self._read:
                    if self._is_all:
                        return
                    self._news = anyio.Event()
                    await self._news.wait()
                events, self._read = self._read, []
                self._room.set()
                await self._write(events, self._version)
        except Exception as error:
            self._failure = error
            both.cancel()

    async def _write(self, events: list[tuple[Event, Placed | None]], version: int) -> None:
        """Place and commit these, in one go if there is room for all.

        Nothing is awaited between the first place and the commit, so the queues have the
        order of the journal, and nobody waits behind a gate for long.
        """
        owned_deliveries(self._outer)  # again: they were prepared some time ago
        placed: list[Placed] = []
        try:
            for event, prepared in events:
                if prepared is not None and version == self._hub.state.version:
                    prepared.plan.totals.admitted += 1
                    placed.append(prepared)
                    continue
                plan = self._plan(event)
                if placed and not _has_room(plan):
                    # To wait with places taken would be to wait for handlers that wait for
                    # this commit.
                    ready, placed = placed, []
                    await self._commit(ready)
                    plan = self._plan(event)
                one = await self._place(event, plan)
                if isinstance(one, PublishReceipt):
                    self._told(event, one)
                else:
                    placed.append(one)
        finally:
            # Also if one was refused: those before it are published.
            if placed:
                await self._commit(placed)

    def _plan(self, event: Event) -> EventPlan:
        # Anew when it is written: handlers may have come or gone, and the bus may have stopped.
        try:
            return self._publisher.prepare(event, self._outer)
        except BusClosedError:
            self._hub.state.counters.event(type(event).__name__).rejected += 1
            raise

    async def _place(self, event: Event, plan: EventPlan) -> Placed | PublishReceipt:
        if isinstance(event, SystemEvent):
            return await self._publisher.admit(event, plan, self._outer)
        return await self._hub.publisher.place(event, plan, self._outer)

    async def _commit(self, placed: list[Placed]) -> None:
        receipts = await self._hub.publisher.commit((), placed)
        for one, receipt in zip(placed, receipts, strict=True):
            self._told(one.event, receipt)


def _has_room(plan: EventPlan) -> bool:
    """Whether one more event neither waits for room nor pushes another out."""
    return all(queue.has_room and not queue.is_backpressured for queue in plan.queues)
