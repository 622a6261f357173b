"""`Durability`: everything of one bus that concerns its journal."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, cast, final

from msgbus.bus.phases import Phase
from msgbus.durability.audience import Audience
from msgbus.durability.enqueued import CommandQueue
from msgbus.durability.figures import journal_stats, subscription_stats
from msgbus.durability.finding import find
from msgbus.durability.publishing import Publisher
from msgbus.durability.recording import JournalRecorder
from msgbus.durability.relaying import Relays
from msgbus.durability.replaying import Replay
from msgbus.durability.rounds import Listener
from msgbus.durability.scheduling import Scheduler
from msgbus.durability.subscribers import Subscribers
from msgbus.durability.tickets import TicketDesk
from msgbus.errors import ConfigurationError, JournalError, StoredMessageError
from msgbus.handlers.delivery import StartAt
from msgbus.journal.codec import MessageCodec
from msgbus.journal.letters import LetterJournal
from msgbus.journal.opening import open_journal
from msgbus.journal.port import Journal
from msgbus.journal.records import AckLevel
from msgbus.messages.message import metadata_of
from msgbus.resilience.stores import LetterFilter
from msgbus.runtime.arguments import missing_members
from msgbus.subscriptions.engine import first_offset
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from datetime import datetime
    from typing import Any

    from msgbus.bus.bus_state import BusState
    from msgbus.bus.subscription import Subscription
    from msgbus.durability.replaying import ReplayReport
    from msgbus.handlers.registration import Registration
    from msgbus.journal.records import Record
    from msgbus.messages.message import Event, Message
    from msgbus.messages.receipts import PublishReceipt
    from msgbus.telemetry.journal_stats import JournalStats, SubscriptionStats


@final
class Durability:
    """The journal of a bus, and all who write to it and read from it on the bus's behalf.

    A journal that was named by a URL is opened at the first use and closed when the bus stops;
    the next start opens it again. One that was handed over stays its owner's.
    """

    def __init__(self, state: BusState, journal: str | Journal) -> None:
        self.state = state
        self.codec = MessageCodec()
        self._url = journal if isinstance(journal, str) else None
        self._journal = None if isinstance(journal, str) else journal
        self._is_let_go = False
        """Whether the journal was closed when the bus stopped; it can still be asked for."""
        self.recorder = JournalRecorder(self)
        state.observe(self.recorder)
        self.publisher = Publisher(self)
        self.subscribers = Subscribers(self)
        self.scheduler = Scheduler(self)
        self.tickets = TicketDesk(self)
        self.commands = CommandQueue(self)
        self._listener = Listener(self, self.scheduler.wake, self.commands.wake)
        self.relays = Relays(self)
        self._dead_letters = 0

    @property
    def journal(self) -> Journal:
        """The journal, opened if it was not yet.

        Raises:
            JournalOpenError: It cannot be.
        """
        if self._journal is None or (self._is_let_go and self.state.accepting):
            assert self._url is not None  # noqa: S101 (one of the two is given)
            self.state.require_open("open the journal of")
            self._journal = open_journal(self._url, clock=self.state.clock)
            self._is_let_go = False
        return self._journal

    @property
    def level(self) -> AckLevel | None:
        """What the journal promises, if it is open."""
        return None if self._journal is None else self._journal.level

    def stats(self) -> tuple[dict[str, SubscriptionStats], JournalStats]:
        """How durable handlers and the journal stand."""
        return subscription_stats(self), journal_stats(self)

    def count_dead_letters(self) -> int:
        """How many there are in the journal; the last number known once it is closed.

        Opens nothing: 0 before the first use.
        """
        if self._journal is not None and not missing_members(self._journal, LetterJournal):
            journal = cast("LetterJournal", self._journal)
            with suppress(JournalError):
                self._dead_letters = journal.read_letters_now(
                    lambda rows: rows.count(LetterFilter())
                )
        return self._dead_letters

    def decode(self, record: Record) -> Message:
        """The message of a record, which knows where it was recorded.

        Raises:
            StoredMessageError: It does not fit its class.
        """
        message = self.codec.decode(record)
        metadata_of(message).recorded = (record.offset, record.time)
        return message

    def tell_failed(self, record: Record, handler: Registration, error: BaseException) -> None:
        """Tell observers, if there are any, that a handler failed on a message for good."""
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
        """As `bus.replay`."""
        self.state.require_own_thread("replay on")
        self.state.require_runtime()
        begin, end = StartAt.of(start), None if until is None else StartAt.of(until)
        audience = Audience(self, to, names=names, topic=topic)
        # What was executed before is in the journal before it is read.
        await self.recorder.flush()
        last = await self.journal.head()
        if end is not None:
            bound = end.offset
            if end.time is not None:
                bound = await self.journal.offset_at(end.time) - 1
            last = min(last, last if bound is None else bound)
        first = max(await first_offset(self.journal, begin), await self.journal.first())
        replay = Replay(
            self, audience, first, last, emit=emit, stop=stop, rate=rate, progress=progress
        )
        return await replay.run()

    # -- handlers --------------------------------------------------------------------------------

    def accept(self, registration: Registration, session_id: str | None) -> Registration:
        """A handler that is being registered, as it is to be used here."""
        for message_type in registration.classes:
            self.codec.register(message_type)
        return self.subscribers.accept(registration, session_id)

    def registered(self, registration: Registration, session_id: str | None) -> None:
        """A handler has been registered."""
        self.subscribers.add(registration, session_id)
        if self.state.phase is Phase.RUNNING:
            self.subscribers.start_soon(registration)
            self.commands.handlers_changed()

    def is_durable(self, registration: Registration) -> bool:
        """Whether a handler reads the journal instead of being handed what is published."""
        return self.subscribers.of(registration) is not None

    async def schedule(self, event: Event, delay: float, *, handlers: int) -> PublishReceipt:
        """Keep an event in the journal until its time has come."""
        return await self.scheduler.add(event, delay, handlers=handlers)

    async def unschedule(self, message_id: str) -> bool:
        """Take back an event that is not published yet, or a command that nobody has begun."""
        return await self.scheduler.remove(message_id) or await self.commands.remove(message_id)

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Go on where the last process stopped, and say what was found.

        Raises:
            ConfigurationError: The journal promises less than the bus requires.
            JournalError: It cannot be opened or read.
        """
        runtime = self.state.require_runtime()
        self._check_level()
        await self._say_what_is_there()
        self.recorder.open(runtime)
        await self.subscribers.start()
        self.scheduler.open(runtime)
        self.commands.open(runtime)
        self._listener.open(runtime)
        self.relays.open(runtime)

    def _check_level(self) -> None:
        wanted = self.state.config.require_ack
        if wanted is not None and self.journal.level < AckLevel[wanted.upper()]:
            message = (
                f"The bus requires require_ack={wanted!r}, but its journal promises only "
                f"{self.journal.level.name.lower()!r}. Use another journal, or require less."
            )
            raise ConfigurationError(message)

    async def _say_what_is_there(self) -> None:
        found = await find(self)
        log.info(
            "journal_opened",
            bus=self.state.config.name,
            journal=self._url or repr(self._journal),
            messages_up_to=found.head,
            subscriptions=found.subscriptions,
            behind=found.behind,
            in_doubt=found.in_doubt,
            unclean=found.unclean,
            unattended=found.unattended,
            scheduled=found.scheduled,
            overdue=found.overdue,
            next_due=found.next_due,
            enqueued=found.enqueued,
        )

    def busy(self) -> list[str]:
        """Durable handlers and enqueued commands that are not done with what there is."""
        names = self.commands.busy()
        for handler in self.subscribers:
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
        for handler in self.subscribers:
            if handler.starting is not None:
                await handler.starting.wait()
        if self._journal is None and not self.state.accepting:
            return  # it could not be opened, which is told by whoever tried
        target = await self.journal.head()
        while True:
            await self.scheduler.caught_up()
            await self.commands.caught_up()
            for handler in self.subscribers:
                wanted = handler.is_active or self.state.accepting
                if handler.subscription is not None and wanted:
                    await handler.subscription.caught_up(target)
            if self.publisher.appended <= target and await self.commands.is_idle():
                break
            target = max(target, self.publisher.appended)
        await self.recorder.flush()

    async def stop(self) -> int:
        """Write all cursors; how many pairs, at most, are left for the next start.

        Delayed events and enqueued commands that are handled here are among them.
        """
        await self.relays.close()
        await self._listener.stop()
        await self.scheduler.stop()
        await self.commands.stop()
        await self.subscribers.close()
        stands = [handler.progress() for handler in self.subscribers]
        behind = sum(one.lag + one.scheduled for one in stands if one is not None)
        return behind + await self._waiting()

    async def _waiting(self) -> int:
        if self._journal is None:
            return 0  # it could not be opened
        try:
            return await self.commands.count() + await self.scheduler.recount()
        except JournalError as error:
            log.error("journal_failed", bus=self.state.config.name, error=redact_exception(error))
            return 0

    async def close(self) -> None:
        """Write what is buffered, and let go of a journal that this bus has opened."""
        if self._journal is None:
            return
        self.count_dead_letters()  # the last that can be known
        try:
            await self.recorder.close()
        finally:
            if self._url is not None:
                self._is_let_go = True
                await self._journal.close()
                self.tickets.close()
