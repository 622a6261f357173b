"""From an outbox to the journal: publish what is pending, then have it marked as done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import anyio

from msgbus.bus.durable.batching import Batch
from msgbus.bus.durable.transactions import current_transaction
from msgbus.errors import BusClosedError, BusStateError, StoredMessageError
from msgbus.journal.codec import WireNames
from msgbus.messages.frame import current_frame
from msgbus.messages.message import Event, metadata_of
from msgbus.messages.receipts import PublishReceipt, PublishStatus
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.bus.durable.hub import DurableBus
    from msgbus.bus.durable.outbox import Outbox, OutboxEntry
    from msgbus.runtime.event_loop import Runtime, Task, Waker

GRACE: Final = 1.0
"""Real seconds for a pass that is under way when the bus stops."""

REMEMBERED: Final = 10_000
"""Refused entries that are not logged again."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RelayReport:
    """What became of the entries of one pass."""

    published: int = 0
    duplicates: int = 0
    """Entries whose event the journal had already: published before a crash, then not marked."""
    filtered: int = 0
    """Entries whose event a filter of the bus turned away; marked as done."""
    rejected: int = 0
    """Entries that no queue had room for; they stay, and are tried again."""
    refused: tuple[tuple[str, str], ...] = ()
    """Ids of entries that cannot be published as they are, each with the reason; they stay."""
    oldest: float = 0.0
    """Seconds that the oldest of those published had waited, if entries say when they began."""

    @property
    def done(self) -> int:
        """Entries that were marked as done."""
        return self.published + self.duplicates + self.filtered


@final
class Relays:
    """All relays of one bus."""

    def __init__(self, hub: DurableBus) -> None:
        self._hub = hub
        self._relays: list[Relay] = []
        self._known = WireNames(Event, hub.codec)
        self._refused: dict[str, None] = {}

    def __iter__(self) -> Iterator[Relay]:
        return iter(list(self._relays))

    def add(self, outbox: Outbox, every: float, limit: int) -> Relay:
        """A relay, which begins when the bus does."""
        self._hub.state.require_open("relay to")
        relay = Relay(self, self._hub, outbox, every, limit)
        self._relays.append(relay)
        if self._hub.state.runtime is not None:
            relay.open(self._hub.state.runtime)
        return relay

    def open(self, runtime: Runtime) -> None:
        """Begin with those that were made before the start."""
        for relay in self._relays:
            relay.open(runtime)

    async def close(self) -> None:
        """End all of them until the next start."""
        async with anyio.create_task_group() as group:
            for relay in self._relays:
                group.start_soon(relay.rest)

    async def once(self, outbox: Outbox, limit: int) -> RelayReport:
        """Publish what is pending, once; see `bus.relay_once`."""
        state = self._hub.state
        state.require_open("relay to", current_frame.get())
        transaction = current_transaction.get()
        if transaction is not None and (transaction := transaction.of(self._hub)) is not None:
            message = (
                "bus.relay_once() inside bus.transaction() would mark entries as done before "
                "they are published. Call it outside."
            )
            raise BusStateError(message)
        entries = list(await outbox.pending(limit))
        events, refused = self._read(entries)
        receipts: dict[str, PublishReceipt] = {}

        def told(event: Event, receipt: PublishReceipt) -> None:
            receipts.setdefault(metadata_of(event).message_id, receipt)

        if events:
            await Batch(self._hub, told).publish([event for _, event in events])
        done: list[OutboxEntry] = []
        counts = Counter[str]()
        for entry, event in events:
            kind = _kind(receipts[metadata_of(event).message_id])
            counts[kind] += 1
            if kind != "rejected":
                done.append(entry)
        if done:
            await outbox.done(done)
        times = [entry.time for entry in done if entry.time is not None]
        oldest = max(state.clock.time() - min(times), 0.0) if times else 0.0
        return RelayReport(
            published=counts["published"],
            duplicates=counts["duplicates"],
            filtered=counts["filtered"],
            rejected=counts["rejected"],
            refused=tuple(refused),
            oldest=oldest,
        )

    def _read(
        self, entries: list[OutboxEntry]
    ) -> tuple[list[tuple[OutboxEntry, Event]], list[tuple[str, str]]]:
        len(self._known)  # makes the classes known that were defined meanwhile
        events: list[tuple[OutboxEntry, Event]] = []
        refused: list[tuple[str, str]] = []
        for entry in entries:
            try:
                events.append((entry, entry.event(self._hub.codec)))
            except StoredMessageError as error:
                reason = redact_exception(error)
                refused.append((entry.id, reason))
                self._tell(entry, reason)
        return events, refused

    def _tell(self, entry: OutboxEntry, reason: str) -> None:
        if entry.id in self._refused:
            return
        self._refused[entry.id] = None
        if len(self._refused) > REMEMBERED:
            del self._refused[next(iter(self._refused))]
        log.error(
            "outbox_entry_refused",
            bus=self._hub.state.config.name,
            entry=entry.id,
            message_type=entry.name,
            error=reason,
        )


@final
class Relay:
    """Looks into one outbox again and again, as long as the bus runs, until it is closed."""

    def __init__(
        self, relays: Relays, hub: DurableBus, outbox: Outbox, every: float, limit: int
    ) -> None:
        self._relays = relays
        self._hub = hub
        self._outbox = outbox
        self._every = every
        self._limit = limit
        self._task: Task | None = None
        self._waker: Waker | None = None
        self._is_woken = False
        self._is_closed = False
        self._ended: anyio.Event | None = None
        """Set when the task has ended; there while it is to go on."""
        self.passes = 0
        """Times that it has looked."""
        self.published = 0
        """Events that it has published; those that were there already do not count."""
        self.failures = 0
        """Times that the outbox or the journal could not be read or written."""
        self.last: RelayReport | None = None
        """What the last pass did."""

    def open(self, runtime: Runtime) -> None:
        """Begin; for the bus's parts."""
        if self._task is None and not self._is_closed:
            self._waker = runtime.waker()
            self._ended = anyio.Event()
            self._task = runtime.spawn(self._work, self._ended, name="msgbus outbox relay")

    def wake(self) -> None:
        """Look now: an entry has just been committed. On the bus's event loop only."""
        self._is_woken = True
        if self._waker is not None:
            self._waker.wake()

    async def close(self) -> None:
        """Finish the pass that is under way, and look no more."""
        self._is_closed = True
        await self.rest()

    async def rest(self) -> None:
        """The same, until the next start of the bus; for the bus's parts."""
        ended, self._ended = self._ended, None
        task, self._task = self._task, None
        self.wake()
        if task is None or ended is None:
            return
        with anyio.move_on_after(GRACE):
            await ended.wait()
        task.cancel()

    async def _work(self, ended: anyio.Event) -> None:
        try:
            while self._ended is ended:
                if await self._pass():
                    continue
                await self._pause()
        except BusClosedError:
            pass  # what is pending is for the next start
        finally:
            ended.set()

    async def _pass(self) -> bool:
        """Publish what is pending; whether there is certainly more."""
        try:
            report = await self._relays.once(self._outbox, self._limit)
        except BusClosedError:
            raise
        except Exception as error:
            self.failures += 1
            log.error(
                "outbox_failed",
                bus=self._hub.state.config.name,
                failures=self.failures,
                error=redact_exception(error),
            )
            return False
        self.passes += 1
        self.published += report.published
        self.last = report
        # A page of nothing but refused entries would be read again and again.
        return report.done > 0 and report.done + len(report.refused) >= self._limit

    async def _pause(self) -> None:
        assert self._waker is not None  # noqa: S101 (made before the task)
        if not self._is_woken:
            with self._hub.state.clock.cancel_after(self._every):
                await self._waker.wait()
        self._is_woken = False


def _kind(receipt: PublishReceipt) -> str:
    if receipt.duplicate:
        return "duplicates"
    if receipt.status is PublishStatus.FILTERED:
        return "filtered"
    return "published" if receipt.accepted else "rejected"
