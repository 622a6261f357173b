"""Tickets: what `bus.enqueue` gives, to wait for a command that is handled later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, final

import anyio

from msgbus.durability.replies import Replies
from msgbus.durability.rounds import REST
from msgbus.durability.wire_names import type_named
from msgbus.errors import (
    BusClosedError,
    JournalClosedError,
    JournalError,
    TicketFailedError,
    TicketNotFoundError,
    TicketTimeoutError,
)
from msgbus.journal.records import TicketRow, TicketState
from msgbus.messages.message import Command, R
from msgbus.runtime.event_loop import current_runtime
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.durability.hub import Durability
    from msgbus.messages.message import Message


@final
@dataclass(frozen=True, slots=True)
class TicketResult(Generic[R]):
    """How an enqueued command ended."""

    message_id: str
    success: bool
    value: R | None
    """The handler's reply; `None` if the command failed."""

    error: str | None
    """Why it failed for good, with secrets removed; `None` on success."""

    time: float
    """Seconds since the epoch when it ended."""


@final
class Ticket(Generic[R]):
    """An enqueued command, wherever it is handled. `bus.ticket(message_id)` finds it again."""

    def __init__(
        self, desk: TicketDesk, message_id: str, command_type: type[Message] | None
    ) -> None:
        self._desk = desk
        self._type = command_type
        self.message_id = message_id
        """The id of the command."""

    async def result(self, timeout: float | None = None) -> R:
        """The handler's reply, as soon as the command is handled, by whichever process.

        Raises:
            TicketFailedError: It failed for good, or was refused.
            TicketTimeoutError: There is no result after `timeout` seconds.
            TicketNotFoundError: Retention has removed it.
            BusClosedError: The bus stopped, and let go of its journal.
            StoredMessageError: The reply does not fit the class of the command any more.
        """
        outcome = await self.wait(timeout)
        if outcome.error is not None:
            name = "The command" if self._type is None else self._type.__name__
            raise TicketFailedError(self.message_id, outcome.error, message_type=name)
        value: Any = outcome.value
        return value  # type: ignore[no-any-return]

    async def wait(self, timeout: float | None = None) -> TicketResult[R]:
        """How it ended, as soon as it has; a failure is told, not raised.

        Raises:
            TicketTimeoutError: It has not after `timeout` seconds.
            TicketNotFoundError: Retention has removed it.
            BusClosedError: The bus stopped, and let go of its journal.
        """
        row = await self._desk.closed(self.message_id, timeout)
        value = None
        if row.state is TicketState.DONE:
            value = self._desk.replies.load(self._type, row.result)
        return TicketResult(
            row.message_id, row.state is TicketState.DONE, value, row.error, row.time
        )

    async def state(self) -> TicketState:
        """How it stands now.

        Raises:
            TicketNotFoundError: Retention has removed it.
        """
        return (await self._desk.look_up(self.message_id)).state

    def __repr__(self) -> str:
        name = "command" if self._type is None else self._type.__name__
        return f"<Ticket of {name} {self.message_id}>"


@final
class TicketDesk:
    """Where those wait who have a ticket; one task looks for all of them."""

    def __init__(self, hub: Durability) -> None:
        self._hub = hub
        self._waiting: dict[str, list[anyio.Event]] = {}
        self._closed: dict[str, TicketRow] = {}
        self._scope: anyio.CancelScope | None = None
        self.replies = Replies()

    async def find(self, message_id: str) -> Ticket[Any]:
        """The ticket of a command that was enqueued, by whichever process.

        Raises:
            TicketNotFoundError: There is none.
        """
        await self.look_up(message_id)
        record = await self._hub.journal.message(message_id)
        command_type = None
        if record is not None:
            command_type = type_named(record.name, Command, self._hub.codec)
        return Ticket(self, message_id, command_type)

    async def look_up(self, message_id: str) -> TicketRow:
        """How a ticket stands.

        Raises:
            TicketNotFoundError: There is none.
        """
        row = await self._hub.journal.ticket(message_id)
        if row is None:
            raise TicketNotFoundError(message_id)
        return row

    async def closed(self, message_id: str, timeout: float | None) -> TicketRow:
        """How it ended, once it has.

        Raises:
            TicketTimeoutError: It has not after `timeout` seconds.
            BusClosedError: The bus let go of its journal before.
        """
        self._hub.state.require_own_thread("wait for a command of")
        if timeout is None:
            return await self._closed_row(message_id)
        with self._hub.state.clock.cancel_after(timeout):
            return await self._closed_row(message_id)
        raise TicketTimeoutError(message_id, seconds=timeout)

    async def _closed_row(self, message_id: str) -> TicketRow:
        event = anyio.Event()
        self._waiting.setdefault(message_id, []).append(event)
        try:
            # Asked only now that somebody is known to wait: whatever comes later is told.
            row = await self.look_up(message_id)
            if row.state is not TicketState.PENDING:
                return row
            self._watch()
            await event.wait()
            if message_id not in self._closed:
                raise _stopped_before(message_id)
            return self._closed[message_id]
        except JournalClosedError:  # by a stop, while it was asked
            raise _stopped_before(message_id) from None
        finally:
            self._leave(message_id, event)

    def _leave(self, message_id: str, event: anyio.Event) -> None:
        waiting = self._waiting[message_id]
        waiting.remove(event)
        if not waiting:
            del self._waiting[message_id]
            self._closed.pop(message_id, None)
        if not self._waiting and self._scope is not None:
            self._scope.cancel()

    def tell(self, row: TicketRow) -> None:
        """A ticket is closed."""
        waiting = self._waiting.get(row.message_id)
        if waiting:
            self._closed.setdefault(row.message_id, row)
            for event in waiting:
                event.set()

    def close(self) -> None:
        """The journal is gone: nobody will hear of anything any more."""
        for waiting in self._waiting.values():
            for event in waiting:
                event.set()

    # -- other processes -------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._scope is None:
            self._scope = anyio.CancelScope()
            current_runtime().spawn(self._work, self._scope, name="msgbus tickets")

    async def _work(self, scope: anyio.CancelScope) -> None:
        since = -1
        try:
            with scope:
                while True:
                    since = await self._look(since)
        finally:
            self._scope = None
        if self._waiting:
            self._watch()  # somebody came while it ended

    async def _look(self, since: int) -> int:
        """Look at all tickets that somebody waits for, once the journal has changed."""
        journal = self._hub.journal
        try:
            since = await journal.changed(since)
            for row in await journal.tickets(list(self._waiting)):
                if row.state is not TicketState.PENDING:
                    self.tell(row)
        except JournalClosedError:
            self.close()
        except JournalError as error:
            log.error(
                "journal_task_failed",
                bus=self._hub.state.config.name,
                task="tickets",
                error=redact_exception(error),
            )
        # In real seconds, as it is about the work that a busy journal would make.
        await anyio.sleep(REST)
        return since


def _stopped_before(message_id: str) -> BusClosedError:
    return BusClosedError(
        f"The bus stopped before command {message_id} had a result. It is in the journal: ask for "
        f"it with bus.ticket(...) after the next start."
    )
