"""`DurableBus`: everything of one bus that concerns its journal."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeVar, final

from msgbus.bus.durable.command_queue import CommandQueue
from msgbus.bus.durable.fencing import deliveries_of, guards_of, member_of, owned_deliveries
from msgbus.bus.durable.handlers import DurableHandlers
from msgbus.bus.durable.listening import ChangeListener, ClockWatch
from msgbus.bus.durable.publishing import Publisher
from msgbus.bus.durable.recording import JournalRecorder
from msgbus.bus.durable.relaying import Relays
from msgbus.bus.durable.scheduling import Scheduler
from msgbus.bus.durable.startup_report import startup_report
from msgbus.bus.durable.statistics import journal_stats, subscription_stats
from msgbus.bus.durable.tickets import TicketWaiters
from msgbus.bus.durable.transactions import tables_of
from msgbus.bus.phases import Phase
from msgbus.errors import ConfigurationError, JournalError, StoredMessageError
from msgbus.journal.codec import MessageCodec
from msgbus.journal.opening import open_journal
from msgbus.journal.records import DELAYED, State
from msgbus.messages.frame import current_frame
from msgbus.subscriptions.members import Membership
from msgbus.subscriptions.progress import describe_left
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

    from msgbus.bus.bus_state import BusState
    from msgbus.bus.durable.handlers import DurableHandler
    from msgbus.handlers.registration import Registration
    from msgbus.journal.ports import Journal, Tables
    from msgbus.journal.records import Promises, Record
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
        self._url: str | None = None
        if isinstance(journal, str):
            self._url = journal
        else:
            self.journal = journal
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
        self._clock_watch = ClockWatch(self, self._clock_jumped)
        self.relays = Relays(self)
        self._dead_letters = 0
        self._awaited: DurableHandler | None = None
        """The handler that `caught_up` waits for, or waited for last."""

    @cached_property
    def journal(self) -> Journal:
        """The journal, opened at the first use.

        Raises:
            JournalOpenError: It cannot be.
        """
        assert self._url is not None  # noqa: S101 (else it was given)
        self.state.require_open("open the journal of")
        return open_journal(self._url, clock=self.state.clock)

    @property
    def _is_opened(self) -> bool:
        return "journal" in self.__dict__

    def reopen(self) -> None:
        """Open the journal again at the next use, if the last stop of the bus has closed it."""
        if self._is_closed:
            self._is_closed = False
            del self.journal

    @property
    def location(self) -> str:
        """The journal as text, for the log."""
        return self._url or repr(self.journal)

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
        return self.journal.promises if self._is_opened else None

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

    async def _clock_jumped(self) -> None:
        """Look for what is due now, though it was not a moment ago."""
        self.scheduler.wake()
        self.commands.look()
        await self.look()

    def is_acknowledged(self, message_id: str) -> bool:
        """Tell whether a transaction has acknowledged a message that is being handled."""
        deliveries = deliveries_of(current_frame.get())
        ended = [one for one in deliveries if one.is_ended and not one.is_lost]
        return any(one.record.message_id == message_id for one in ended)

    def tell_failed(self, record: Record, handler: Registration, error: BaseException) -> None:
        """Notify observers, if there are any, that a handler has finally failed on a message."""
        if self.state.observers.active:
            with suppress(StoredMessageError):  # then no handler ever got it
                self.state.observers.failed(handler, None, self.codec.decode(record), error)

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
        self._clock_watch.open(runtime)
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
        awaited, self._awaited = self._awaited, None
        for handler in self.handlers:
            progress = handler.progress()
            if progress is not None and (progress.lag or handler is awaited):
                names.append(describe_left(progress))
        return names

    async def caught_up(self, *, is_patient: bool = True) -> None:
        """Wait until every durable handler has done all that there is now.

        So it is with delayed events and enqueued commands that are due, if they are handled
        here. What they publish meanwhile counts too; what others append does not. When the bus
        stops, only those are waited for that work here and get on.

        Args:
            is_patient: Whether to wait for the `resume` of one that is paused or blocked.

        Raises:
            SettleTimeoutError: One is, and only `resume` would let it go on.
        """
        for handler in self.handlers:
            if handler.starting is not None:
                await handler.starting.wait()
        if not self._is_opened and not self.state.accepting:
            return  # it could not be opened, which is told by whoever tried
        target = await self.journal.head()
        while True:
            await self.scheduler.caught_up()
            await self.commands.caught_up()
            for handler in self.handlers:
                await self._handler_caught_up(handler, target, is_patient=is_patient)
            if self.publisher.appended <= target and await self.commands.is_idle():
                break
            target = max(target, self.publisher.appended)
        await self.recorder.flush()
        await self.recount()

    async def _handler_caught_up(
        self, handler: DurableHandler, target: int, *, is_patient: bool
    ) -> None:
        self._awaited = handler
        while handler.loop is not None and (handler.is_active or self.state.accepting):
            if await self.membership.is_done(handler.loop, target, is_patient=is_patient):
                break
        self._awaited = None

    async def stop(self) -> dict[str, int]:
        """Leave the journal to other processes; return what is left to do, at most.

        By durable handler, and the queues of delayed events and of commands handled here.
        """
        await self.relays.close()
        await self._clock_watch.stop()
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
        except Exception as error:  # of the journal, or of a key function of the user
            membership.abandon()
            self._report_failure(error)

    async def _left(self) -> dict[str, int]:
        if not self._is_opened:
            return {}  # it could not be opened
        try:
            await self.recount()
            left = {handler.name: await handler.left() for handler in self.handlers}
            left |= await self.commands.counts()
            left[DELAYED] = self.scheduler.count
        except JournalError as error:
            self._report_failure(error)
            return {}
        return {name: count for name, count in left.items() if count}

    def _report_failure(self, error: Exception) -> None:
        log.error("journal_failed", bus=self.state.config.name, error=redact_exception(error))

    async def close(self) -> None:
        """Write what is buffered, and close a journal that this bus has opened."""
        if not self._is_opened:
            return
        try:
            await self.recorder.close()
        finally:
            if self._url is not None:
                self._is_closed = True
                await self.journal.close()
                self.tickets.close()
