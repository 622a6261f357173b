"""Enqueued commands: kept in the journal, and handled by any process that has their handler."""

from __future__ import annotations

from collections.abc import Mapping
from random import random
from typing import TYPE_CHECKING, Any, cast, final

import anyio

from msgbus.bus.schedule import check_delay
from msgbus.durability.claims import COMMANDS, Claim, opening, taking_back
from msgbus.durability.rounds import GRACE, PAUSE, Rounds
from msgbus.durability.tickets import Ticket
from msgbus.durability.transactions import current_transaction
from msgbus.durability.wire_names import WireNames
from msgbus.errors import (
    CircuitOpenError,
    ConfigurationError,
    JournalClosedError,
    JournalConflictError,
    JournalError,
    MissingHandlerError,
    Refusal,
    StoredMessageError,
    Unhandleable,
    WrongMessageTypeError,
)
from msgbus.journal.records import Scheduled, TicketRow, TicketState
from msgbus.messages.frame import current_frame, fix_in_frame
from msgbus.messages.message import Command, Query, R, metadata_of, require_command
from msgbus.messages.results import FailedResult
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.durability.hub import Durability
    from msgbus.handlers.registration import Registration
    from msgbus.journal.operations import CloseTicket
    from msgbus.runtime.event_loop import Runtime
    from msgbus.subscriptions.config import RetryTiers


@final
class CommandQueue:
    """The commands of a journal, as one bus enqueues and handles them."""

    def __init__(self, hub: Durability) -> None:
        self._hub = hub
        config = hub.state.config
        self._limit = config.command_workers
        self._lease = config.command_lease
        self._rounds = Rounds(hub, "enqueued commands", self._round)
        self._runtime: Runtime | None = None
        self._claims: dict[str, Claim] = {}
        self._version = -1
        self._handled: list[WireNames] = []

    # -- in and out ------------------------------------------------------------------------------

    async def add(
        self, command: Command[R], delay: float | None, headers: Mapping[str, str] | None
    ) -> Ticket[R]:
        """Keep a command for whoever handles it; see `bus.enqueue`."""
        require_command(command)
        if isinstance(command, Query):
            message = (
                f"{type(command).__name__} is a query, and cannot be enqueued: nothing would come "
                f"of it. Ask it with bus.execute, or make it a Command."
            )
            raise WrongMessageTypeError(message)
        hub = self._hub
        seconds = check_delay(delay)
        outer = current_frame.get()
        hub.state.require_open("enqueue a command on", outer)
        fix_in_frame(command, outer, headers=headers)
        hub.tickets.replies.adapter(type(command))  # raises now, not when it is done
        now = hub.state.clock.time()
        record = hub.codec.encode(command, time=now)
        ticket: Ticket[R] = Ticket(hub.tickets, record.message_id, type(command))
        operations = opening(record, now + seconds)
        transaction = current_transaction.get()
        if transaction is not None and transaction.hub is hub:
            transaction.add(*operations)
            hub.state.observers.enqueued(command)
            return ticket
        try:
            await hub.publisher.commit(operations, ())
        except JournalConflictError:
            return ticket  # enqueued before: it is done once
        hub.state.observers.enqueued(command)
        metadata_of(command).recorded = (0, now)
        self._rounds.wake()
        return ticket

    async def remove(self, message_id: str) -> bool:
        """Take a command back that nobody has begun; false if somebody has."""
        now = self._hub.state.clock.time()
        operations = taking_back(message_id, now)
        try:
            await self._hub.publisher.commit(operations, ())
        except JournalConflictError:
            return False
        self._hub.state.observers.unscheduled(message_id)
        self._tell(cast("CloseTicket", operations[1]))
        return True

    def _tell(self, closing: CloseTicket | None) -> None:
        """Tell those who wait here; the journal tells the others."""
        if closing is not None:
            state = TicketState.DONE if closing.error is None else TicketState.FAILED
            row = TicketRow(closing.message_id, state, closing.result, closing.error, closing.time)
            self._hub.tickets.tell(row)

    # -- life ------------------------------------------------------------------------------------

    def open(self, runtime: Runtime) -> None:
        """Begin to handle commands, if this bus has a handler for any."""
        self._runtime = runtime
        self.handlers_changed()

    def handlers_changed(self) -> None:
        """There may be a first handler."""
        if self._runtime is not None and self._names():
            self._rounds.open(self._runtime)
            self._rounds.wake()

    def wake(self) -> None:
        """Look whether there is something new."""
        self._rounds.wake()

    def busy(self) -> list[str]:
        """What is in hand."""
        return [f"enqueued {claim.record.name}" for claim in self._claims.values()]

    async def caught_up(self) -> None:
        """Wait until all that is due now, and is handled here, is done or tried in vain."""
        while self._rounds.is_open and (self._claims or await self._is_due()):
            await self._rounds.next()
            while self._claims:
                await self._rounds.news()

    async def is_idle(self) -> bool:
        """Whether nothing is in hand or due."""
        return not self._rounds.is_open or not (self._claims or await self._is_due())

    async def _is_due(self) -> bool:
        names = self._names()
        if not names or not self._hub.state.accepting:
            return False
        due = await self._hub.journal.next_due(subscription=COMMANDS, names=names)
        return due is not None and due <= self._hub.state.clock.time()

    async def stop(self) -> None:
        """Give back what is in hand, and take nothing more."""
        for claim in self._claims.values():
            claim.scope.cancel()
        with anyio.move_on_after(GRACE):
            while self._claims:
                await self._rounds.news()
        await self._rounds.stop()

    async def count(self) -> int:
        """How many wait that this bus handles, for others or the next start."""
        names = self._names()
        return (
            0
            if not names
            else await self._hub.journal.count_scheduled(subscription=COMMANDS, names=names)
        )

    # -- rounds ----------------------------------------------------------------------------------

    def _names(self) -> set[str]:
        """Wire names of the commands that this bus handles."""
        state = self._hub.state
        if self._version != state.version:
            self._version = state.version
            self._handled = [
                WireNames(registration.message_type, self._hub.codec)
                for session_id, registration in state.registry.registrations()
                if session_id is None
                and registration.is_command
                and not issubclass(registration.message_type, Query)
            ]
        return {name for names in self._handled for name in names}

    async def _round(self) -> float | None:
        """Renew what is in hand, and take more while there is room."""
        clock, journal = self._hub.state.clock, self._hub.journal
        await self._renew()
        names = self._names()
        room = self._limit - len(self._claims)
        if room <= 0 or not names or not self._hub.state.accepting:
            return self._until_renewal()
        # Those that are about to be taken are still due.
        limit = room + sum(claim.until is None for claim in self._claims.values())
        entries = await journal.due(clock.time(), limit, subscription=COMMANDS, names=names)
        fresh = [one for one in entries if one.record.message_id not in self._claims]
        for entry in fresh[: self._limit - len(self._claims)]:
            self._begin(entry)
        due = await journal.next_due(subscription=COMMANDS, names=names)
        renewal = self._until_renewal()
        if renewal is not None and renewal <= 0:
            return 0.0
        pauses = [renewal, None if due is None else due - clock.time()]
        # What is due and not begun is in hand, or there is no room: news of that will come.
        return min((pause for pause in pauses if pause is not None and pause > 0), default=None)

    def _until_renewal(self) -> float | None:
        times = [claim.renew_at() for claim in self._claims.values()]
        first = min((time for time in times if time is not None), default=None)
        return None if first is None else first - self._hub.state.clock.time()

    async def _renew(self) -> None:
        now = self._hub.state.clock.time()
        for claim in list(self._claims.values()):
            time = claim.renew_at()
            if time is not None and time <= now:
                await claim.renew()

    # -- one command -----------------------------------------------------------------------------

    def _begin(self, entry: Scheduled) -> None:
        runtime = self._runtime
        if runtime is None or not self._hub.state.accepting:
            return
        claim = Claim(self._hub, entry, self._lease)
        self._claims[entry.record.message_id] = claim
        runtime.spawn(self._run, claim, name=f"msgbus command {entry.record.name}")

    async def _run(self, claim: Claim) -> None:
        try:
            await self._try(claim)
        except JournalClosedError:
            self._runtime = None  # its lease will be over some time, and nothing else begins
        except Exception as error:  # as above, if it was taken
            log.error("enqueued_command_interrupted", **self._about(claim, error))
            # It stays in hand meanwhile: what failed now would only fail again.
            await self._hub.state.clock.sleep(PAUSE)
        finally:
            del self._claims[claim.record.message_id]
            self._rounds.wake()
            self._rounds.tell()

    async def _try(self, claim: Claim) -> None:
        state = self._hub.state
        message_id, attempt = claim.record.message_id, claim.attempt
        if attempt > 1:
            ticket = await self._hub.journal.ticket(message_id)
            if ticket is not None and ticket.state is not TicketState.PENDING:
                await claim.drop()
                return
        try:
            command, tiers = self._prepared(claim)
        except MissingHandlerError:
            return  # its handler has just gone
        except (StoredMessageError, ConfigurationError) as error:
            await self._bury(claim, error, attempt - 1, reason="not to be retried")
            return
        if attempt > tiers.max_attempts:
            times = "once" if attempt == 2 else f"{attempt - 1} times"
            ended = RuntimeError(f"Its process ended while it was being handled, {times}.")
            await self._bury(claim, ended, attempt - 1)
            return
        if not await claim.take():
            return
        self._rounds.wake()  # it is to be renewed
        if state.accepting:
            await self._handle(claim, command, tiers)
        else:
            await claim.give_back()

    def _prepared(self, claim: Claim) -> tuple[Command[Any], RetryTiers]:
        state = self._hub.state
        command = self._hub.decode(claim.record)
        registration = state.registry.command_handler(type(command), None)
        if registration is None:
            raise MissingHandlerError(type(command))
        self._hub.tickets.replies.adapter(type(command))
        return cast("Command[Any]", command), state.assembly.retry_tiers(registration)

    async def _handle(self, claim: Claim, command: Command[Any], tiers: RetryTiers) -> None:
        failure: BaseException | None = None
        reply: bytes | None = None
        try:
            with claim.scope:
                result = await self._hub.state.command_runner.perform(
                    command, attempt=claim.attempt, retried=tiers.max_attempts > 1
                )
                if isinstance(result, FailedResult):
                    failure = result.peek_exception()
                else:
                    reply = self._hub.tickets.replies.dump(type(command), result.value)
        except StoredMessageError as error:
            failure = Unhandleable(str(error))  # it was handled: another try would do it again
            failure.__cause__ = error
        except BaseException as error:
            assert self._runtime is not None  # noqa: S101 (it has started this task)
            if self._runtime.is_ending(error):
                raise
            failure = error
        if claim.scope.cancel_called and reply is None:
            failure = None  # whatever a handler makes of its cancellation
        await self._write_end(claim, reply, failure, tiers)

    async def _write_end(
        self,
        claim: Claim,
        reply: bytes | None,
        failure: BaseException | None,
        tiers: RetryTiers,
    ) -> None:
        """What was done must be known: a full disk may have room again."""
        while True:
            try:
                await self._end(claim, reply, failure, tiers)
            except JournalClosedError:
                raise
            except JournalError as error:
                log.error(
                    "journal_task_failed",
                    bus=self._hub.state.config.name,
                    task="enqueued commands",
                    error=redact_exception(error),
                )
                await self._hub.state.clock.sleep(PAUSE)
            else:
                return

    async def _end(
        self,
        claim: Claim,
        reply: bytes | None,
        failure: BaseException | None,
        tiers: RetryTiers,
    ) -> None:
        """Write down how a try ended."""
        if reply is not None:
            self._tell(await claim.succeed(reply))
        elif failure is not None:
            await self._fail(claim, failure, tiers)
        elif not claim.is_lost:
            await claim.give_back()  # it was cut off, as the bus stops
        if claim.is_lost:
            log.warning("enqueued_command_lost", **self._ids(claim))

    async def _fail(self, claim: Claim, failure: BaseException, tiers: RetryTiers) -> None:
        if isinstance(failure, Refusal):
            self._end_failed(claim, await claim.refuse(redact_exception(failure)), failure)
        elif isinstance(failure, CircuitOpenError):
            # Nothing was tried, so nothing is counted: an outage burns no tries.
            await claim.postpone(max(failure.retry_after, tiers.initial_delay), counts=False)
        elif claim.attempt >= tiers.max_attempts:
            await self._bury(claim, failure, claim.attempt)
        elif isinstance(failure, Exception) and not tiers.allows(failure):
            await self._bury(claim, failure, claim.attempt, reason="not to be retried")
        else:
            await self._try_later(claim, failure, tiers.delay(claim.attempt, random()))

    async def _try_later(self, claim: Claim, failure: BaseException, delay: float) -> None:
        await claim.postpone(delay, counts=True)
        log.warning("enqueued_command_retried", delay=delay, **self._about(claim, failure))

    async def _bury(
        self,
        claim: Claim,
        error: BaseException,
        attempts: int,
        *,
        reason: str = "retries exhausted",
    ) -> None:
        handler = self._handler_of(claim)
        closing = await claim.bury(error, attempts=attempts, reason=reason, handler=handler)
        self._end_failed(claim, closing, error)
        if closing is not None:
            log.error("enqueued_command_failed", **self._about(claim, error))

    def _handler_of(self, claim: Claim) -> Registration | None:
        message_type = self._hub.codec.type_of(claim.record.name)
        if message_type is None:
            return None
        return self._hub.state.registry.command_handler(message_type, None)

    def _end_failed(self, claim: Claim, closing: CloseTicket | None, error: BaseException) -> None:
        """Tell of a command that will not be tried again, unless another process has it."""
        handler = self._handler_of(claim)
        if closing is not None and handler is not None:
            self._hub.tell_failed(claim.record, handler, error)
        self._tell(closing)

    def _about(self, claim: Claim, error: BaseException) -> dict[str, object]:
        return {
            **self._ids(claim),
            "error": redact_exception(error),
            "traceback": error,
        }

    def _ids(self, claim: Claim) -> dict[str, object]:
        record = claim.record
        return {
            "bus": self._hub.state.config.name,
            "message_type": record.name,
            "message_id": record.message_id,
            "correlation_id": record.correlation_id,
            "session_id": record.session_id,
            "attempt": claim.attempt,
        }
