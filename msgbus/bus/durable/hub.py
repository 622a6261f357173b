"""`DurableBus`: everything of one bus that concerns its journal."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Literal, TypeVar, final

from msgbus.bus.durable.command_queue import CommandQueue
from msgbus.bus.durable.fencing import deliveries_of, guards_of, member_of, owned_deliveries
from msgbus.bus.durable.handlers import DurableHandlers
from msgbus.bus.durable.listening import ChangeListener
from msgbus.bus.durable.publishing import Publisher
from msgbus.bus.durable.recording import JournalRecorder
from msgbus.bus.durable.relaying import Relays
from msgbus.bus.durable.replay import replay_history
from msgbus.bus.durable.scheduling import Scheduler
from msgbus.bus.durable.startup_report import startup_report
from msgbus.bus.durable.statistics import journal_stats, subscription_stats
from msgbus.bus.durable.tickets import TicketWaiters
from msgbus.bus.durable.transactions import tables_of
from msgbus.bus.phases import Phase
from msgbus.errors import ConfigurationError, JournalError, StoredMessageError
from msgbus.journal.codec import MessageCodec
from msgbus.journal.opening import open_journal
from msgbus.journal.records import State
from msgbus.messages.frame import current_frame
from msgbus.messages.message import metadata_of
from msgbus.subscriptions.members import Membership
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Collection
    from datetime import datetime
    from typing import Any

    from msgbus.bus.bus_state import BusState
    from msgbus.bus.durable.replay import ReplayReport
    from msgbus.bus.subscription import Subscription
    from msgbus.handlers.delivery import StartAt
    from msgbus.handlers.registration import Registration
    from msgbus.journal.ports import Journal, Tables
    from msgbus.journal.records import Promises, Record
    from msgbus.messages.message import Event, Message
    from msgbus.messages.receipts import PublishReceipt
    from msgbus.telemetry.journal_stats import JournalStats, SubscriptionStats

T = TypeVar("T")


@final
class DurableBus:
    """The journal of a bus, and all parts of the bus that write to it or read from it.

    A journal that was named by a URL is opened at the first use and closed when the bus stops;
    the next start opens it again. One that was handed over stays its owner's.
    """

    def __init__(self, state: BusState, journal: str | Journal) -> None:
        self.state = state
        self.codec = MessageCodec()
        self._url = journal if isinstance(journal, str) else None
        self._journal = None if isinstance(journal, str) else journal
        self._is_closed = False
        """The journal was closed when the bus stopped; questions to it still raise so."""
        self._membership: Membership | None = None
        self.recorder = JournalRecorder(self)
        state.observe(self.recorder)
        self.publisher = Publisher(self)
        self.handlers = DurableHandlers(self)
        self.scheduler = Scheduler(self)
        self.tickets = TicketWaiters(self)
        self.commands = CommandQueue(self)
        self._listener = ChangeListener(self, self.scheduler.wake, self.commands.look)
        self.relays = Relays(self)
        self._dead_letters = 0

    @property
    def journal(self) -> Journal:
        """The journal, opened if it was not yet.

        Raises:
            JournalOpenError: It cannot be.
        """
        if self._journal is None or (self._is_closed and self.state.accepting):
            assert self._url is not None  # noqa: S101 (one of the two is given)
            self.state.require_open("open the journal of")
            self._journal = open_journal(self._url, clock=self.state.clock)
            self._is_closed = False
        return self._journal

    @property
    def location(self) -> str:
        """The journal as text, for the log."""
        return self._url or repr(self._journal)

    @property
    def membership(self) -> Membership:
        """This process among those that work on the journal, for one run of the bus."""
        if self._membership is None:
            ttl = self.journal.member_ttl or self.state.config.member_ttl
            self._membership = Membership(self.journal, self.state.clock, ttl=ttl)
        return self._membership

    @property
    def promises(self) -> Promises | None:
        """What the journal promises, if it is open."""
        return None if self._journal is None else self._journal.promises

    @property
    def recorded_attempts(self) -> Literal["all", "failures", "none"]:
        """Attempts of durable handlers that are recorded as deliveries."""
        record = self.state.config.record
        return "none" if record == "messages" else record

    def tables(self, what: str) -> Tables:
        """Return the journal as one that runs SQL.

        Raises:
            ConfigurationError: It does not.
        """
        return tables_of(self.journal, what)

    async def transact(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run SQL in a commit of its own; see `bus.transact`."""
        tables = self.tables("bus.transact()")
        deliveries = owned_deliveries(current_frame.get())
        guards, member = guards_of(deliveries), member_of(deliveries)
        value, _ = await tables.transact(function, guards, member=member)
        return value

    def stats(self) -> tuple[dict[str, SubscriptionStats], JournalStats]:
        """Return how durable handlers and the journal stand."""
        return subscription_stats(self), journal_stats(self)

    def count_dead_letters(self) -> int:
        """Return the number of dead letters in the journal, as last counted."""
        return self._dead_letters

    def dead_lettered(self) -> None:
        """Count a dead letter that this process makes."""
        self._dead_letters += 1

    async def recount(self) -> None:
        """Count the delayed events and dead letters of all processes."""
        await self.scheduler.recount()
        self._dead_letters = (await self.journal.count()).get(State.DEAD, 0)

    async def look(self) -> None:
        """Let subscriptions look for rows that another part of this process has changed."""
        if self._membership is not None:
            await self._membership.look()

    def decode(self, record: Record) -> Message:
        """Return the message of a record, which knows its offset and time.

        Raises:
            StoredMessageError: It does not fit its class.
        """
        message = self.codec.decode(record)
        metadata_of(message).recorded = (record.offset, record.time)
        return message

    def is_acknowledged(self, message_id: str) -> bool:
        """Tell whether a transaction has acknowledged a message that is being handled."""
        deliveries = deliveries_of(current_frame.get())
        ended = [one for one in deliveries if one.is_ended and not one.is_lost]
        return any(one.record.message_id == message_id for one in ended)

    def tell_failed(self, record: Record, handler: Registration, error: BaseException) -> None:
        """Notify observers, if there are any, that a handler has finally failed on a message."""
        if self.state.observers.active:
            with suppress(StoredMessageError):  # then no handler ever got it
                self.state.observers.failed(handler, None, self.decode(record), error)

    # -- history ---------------------------------------------------------------------------------

    async def replay(
        self,
        start: StartAt | int | datetime,
        to: str | Subscription | Callable[..., Any],
        *,
        until: int | datetime | None,
        names: Collection[str] | None,
        topic: str | None,
        emit: bool,
        stop: bool,
        rate: float | None,
        progress: Callable[[ReplayReport], object] | None,
    ) -> ReplayReport:
        """Replay recorded events to one handler; see `bus.replay`."""
        return await replay_history(
            self,
            start,
            to,
            until=until,
            names=names,
            topic=topic,
            emit=emit,
            stop=stop,
            rate=rate,
            progress=progress,
        )

    # -- handlers --------------------------------------------------------------------------------

    def accept(self, registration: Registration, session_id: str | None) -> Registration:
        """Return a handler that is being registered as it is to be used here."""
        for message_type in registration.classes:
            self.codec.register(message_type)
        return self.handlers.accept(registration, session_id)

    def registered(self, registration: Registration, session_id: str | None) -> None:
        """Take note of a handler that was registered."""
        self.handlers.add(registration, session_id)
        if self.state.phase is Phase.RUNNING:
            self.handlers.start_soon(registration)
            self.commands.handlers_changed()

    def is_durable(self, registration: Registration) -> bool:
        """Tell whether a handler reads the journal instead of a queue."""
        return self.handlers.of(registration) is not None

    async def schedule(self, event: Event, delay: float, *, handlers: int) -> PublishReceipt:
        """Keep an event in the journal until it is due."""
        return await self.scheduler.add(event, delay, handlers=handlers)

    async def unschedule(self, message_id: str) -> bool:
        """Cancel an event that is not published yet, or a command that nobody has begun."""
        return await self.scheduler.remove(message_id) or await self.commands.remove(message_id)

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Continue where the last process stopped, and log what was found.

        Raises:
            ConfigurationError: The journal promises less than the bus requires.
            JournalError: It cannot be opened or read.
        """
        runtime = self.state.require_runtime()
        self.require_promise(self.state.config.require_ack, "The bus")
        await self.recount()
        await startup_report(self)
        self.recorder.open(runtime)
        await self.handlers.start()
        await self.commands.start()
        self.scheduler.open(runtime)
        self._listener.open(runtime)
        self.relays.open(runtime)

    def require_promise(self, wanted: str | None, who: str) -> None:
        """Raise if the journal promises less than is wanted."""
        if wanted is not None and not self.journal.promises.meets(wanted):
            message = (
                f"{who} requires require_ack={wanted!r}, but its journal promises only "
                f"{self.journal.promises.level!r}. Use another journal, or require less."
            )
            raise ConfigurationError(message)

    def busy(self) -> list[str]:
        """List durable handlers and enqueued commands that have work left, as text."""
        names = self.commands.busy()
        for handler in self.handlers:
            progress = handler.progress()
            if progress is not None and handler.is_active and progress.lag:
                names.append(f"{handler.name} (up to {progress.lag} messages behind)")
        return names

    async def caught_up(self) -> None:
        """Wait until every durable handler has done all that there is now.

        So it is with delayed events and enqueued commands that are due, if they are handled
        here. What they publish meanwhile counts too; what others append does not. When the bus
        stops, only those are waited for that work here and get on.
        """
        for handler in self.handlers:
            if handler.starting is not None:
                await handler.starting.wait()
        if self._journal is None and not self.state.accepting:
            return  # it could not be opened, which is told by whoever tried
        target = await self.journal.head()
        while True:
            await self.scheduler.caught_up()
            await self.commands.caught_up()
            for handler in self.handlers:
                if handler.loop is not None and (handler.is_active or self.state.accepting):
                    await self.membership.caught_up(handler.loop, target)
            if self.publisher.appended <= target and await self.commands.is_idle():
                break
            target = max(target, self.publisher.appended)
        await self.recorder.flush()
        await self.recount()

    async def stop(self) -> int:
        """Leave the journal to other processes; return what is left to do, at most.

        Delayed events and enqueued commands that are handled here are among it.
        """
        await self.relays.close()
        await self._listener.stop()
        await self.scheduler.stop()
        self.handlers.ending()
        membership, self._membership = self._membership, None
        if membership is not None:
            await self._leave(membership)
        self.commands.ended()
        return await self._left()

    async def _leave(self, membership: Membership) -> None:
        try:
            await membership.stop(0)
        except JournalError as error:
            membership.abandon()
            self._report_failure(error)

    async def _left(self) -> int:
        if self._journal is None:
            return 0  # it could not be opened
        try:
            await self.recount()
            left = await self.commands.count() + self.scheduler.count
            for handler in self.handlers:
                left += await handler.left()
        except JournalError as error:
            self._report_failure(error)
            return 0
        return left

    def _report_failure(self, error: JournalError) -> None:
        log.error("journal_failed", bus=self.state.config.name, error=redact_exception(error))

    async def close(self) -> None:
        """Write what is buffered, and close a journal that this bus has opened."""
        if self._journal is None:
            return
        try:
            await self.recorder.close()
        finally:
            if self._url is not None:
                self._is_closed = True
                await self._journal.close()
                self.tickets.close()
