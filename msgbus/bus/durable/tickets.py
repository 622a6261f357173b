"""Tickets: returned by `bus.enqueue`, to wait for a command that is handled later."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Generic, final

import anyio

from msgbus.bus.durable.listening import PAUSE, REST
from msgbus.bus.durable.replies import Replies
from msgbus.errors import (
    BusClosedError,
    JournalClosedError,
    TicketFailedError,
    TicketNotFoundError,
    TicketTimeoutError,
)
from msgbus.journal.codec import type_named
from msgbus.journal.records import Kind, State
from msgbus.messages.message import Command, R
from msgbus.runtime.event_loop import current_runtime
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.bus.durable.hub import DurableBus
    from msgbus.journal.records import Pending, Record, Result
    from msgbus.messages.message import Message

PREFIX: Final = "commands:"


def queue_of(name: str) -> str:
    """Return the queue of the commands of one wire name."""
    return f"{PREFIX}{name}"


class TicketState(StrEnum):
    """State of an enqueued command."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@final
@dataclass(frozen=True, slots=True)
class TicketResult(Generic[R]):
    """Result of an enqueued command, good or bad."""

    message_id: str
    success: bool
    value: R | None
    """The handler's reply; `None` if the command failed."""

    error: str | None
    """Why it finally failed, redacted; `None` on success."""

    time: float
    """Seconds since the epoch when it ended."""


@final
class Ticket(Generic[R]):
    """An enqueued command, wherever it is handled. `bus.ticket(message_id)` finds it again."""

    def __init__(
        self, waiters: TicketWaiters, message_id: str, command_type: type[Message] | None
    ) -> None:
        self._waiters = waiters
        self._type = command_type
        self.message_id = message_id
        """The id of the command."""

    async def result(self, timeout: float | None = None) -> R:
        """Return the handler's reply, once the command is handled, by whichever process.

        Raises:
            TicketFailedError: It finally failed, or was refused.
            TicketTimeoutError: There is no result after `timeout` seconds.
            TicketNotFoundError: Retention has removed it.
            BusClosedError: The bus stopped, and has closed its journal.
            StoredMessageError: The reply does not fit the class of the command any more.
        """
        outcome = await self.wait(timeout)
        if outcome.error is not None:
            name = "The command" if self._type is None else self._type.__name__
            raise TicketFailedError(self.message_id, outcome.error, message_type=name)
        value: Any = outcome.value
        return value  # type: ignore[no-any-return]

    async def wait(self, timeout: float | None = None) -> TicketResult[R]:
        """Return the result once there is one; a failure is returned, not raised.

        Raises:
            TicketTimeoutError: There is none after `timeout` seconds.
            TicketNotFoundError: Retention has removed it.
            BusClosedError: The bus stopped, and has closed its journal.
            StoredMessageError: The reply does not fit the class of the command any more.
        """
        result = await self._waiters.result(self.message_id, timeout)
        value = None
        if result.error is None:
            value = self._waiters.replies.load(self._type, result.body)
        return TicketResult(
            result.message_id, result.error is None, value, result.error, result.time
        )

    async def state(self) -> TicketState:
        """Return the state now.

        Raises:
            TicketNotFoundError: Retention has removed it.
        """
        result = await self._waiters.look_up(self.message_id)
        if result is None:
            return TicketState.PENDING
        return TicketState.DONE if result.error is None else TicketState.FAILED

    def __repr__(self) -> str:
        name = "command" if self._type is None else self._type.__name__
        return f"<Ticket of {name} {self.message_id}>"


@final
class TicketWaiters:
    """Waiters for results of commands; one task looks for all of them."""

    def __init__(self, hub: DurableBus) -> None:
        self._hub = hub
        self._waiting: dict[str, list[anyio.Event]] = {}
        self._results: dict[str, Result] = {}
        self._scope: anyio.CancelScope | None = None
        self._hurry = anyio.Event()
        self.replies = Replies()

    async def find(self, message_id: str) -> Ticket[Any]:
        """Return the ticket of a command that was enqueued, by whichever process.

        Raises:
            TicketNotFoundError: There is none.
        """
        await self.look_up(message_id)
        record = await self._record(message_id)
        command_type = None
        if record is not None:
            command_type = type_named(record.name, Command, self._hub.codec)
        return Ticket(self, message_id, command_type)

    async def look_up(self, message_id: str) -> Result | None:
        """Return the result of a command that was enqueued; `None` while it is pending.

        Raises:
            TicketNotFoundError: No such command was enqueued.
        """
        journal = self._hub.journal
        result = await journal.result(message_id)
        if result is None and await self.row_of(message_id) is None:
            result = await journal.result(message_id)  # it may have ended in between
            if result is None:
                raise TicketNotFoundError(message_id)
        return result

    async def row_of(self, message_id: str) -> Pending | None:
        """Return the row of an enqueued command, if it is pending."""
        record = await self._record(message_id)
        if record is None or record.kind is not Kind.COMMAND:
            return None
        row = await self._hub.journal.row(queue_of(record.name), record.offset)
        return None if row is None or row.state is State.DEAD else row

    async def _record(self, message_id: str) -> Record | None:
        return await self._hub.journal.message(message_id)

    async def result(self, message_id: str, timeout: float | None) -> Result:
        """Wait for the result of a command.

        Raises:
            TicketNotFoundError: No such command was enqueued.
            TicketTimeoutError: There is none after `timeout` seconds.
            BusClosedError: The bus closed its journal before.
        """
        self._hub.state.require_own_thread("wait for a command of")
        if timeout is None:
            return await self._wait(message_id)
        with self._hub.state.clock.cancel_after(timeout):
            return await self._wait(message_id)
        raise TicketTimeoutError(message_id, seconds=timeout)

    async def _wait(self, message_id: str) -> Result:
        event = anyio.Event()
        self._waiting.setdefault(message_id, []).append(event)
        try:
            # Asked only now that somebody is known to wait: a later result is not missed.
            result = await self.look_up(message_id)
            if result is not None:
                return result
            self._watch()
            await event.wait()
            if message_id not in self._results:
                raise _stopped_before(message_id)
            return self._results[message_id]
        except JournalClosedError:  # by a stop, while it was asked
            raise _stopped_before(message_id) from None
        finally:
            self._leave(message_id, event)

    def _leave(self, message_id: str, event: anyio.Event) -> None:
        waiting = self._waiting[message_id]
        waiting.remove(event)
        if not waiting:
            del self._waiting[message_id]
            self._results.pop(message_id, None)
        if not self._waiting and self._scope is not None:
            self._scope.cancel()

    def look(self) -> None:
        """Look for results at once; called on the event loop after a commit of this process."""
        self._hurry.set()

    def close(self) -> None:
        """Wake all who wait, as the journal is closed."""
        for waiting in self._waiting.values():
            for event in waiting:
                event.set()

    # -- the task --------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._scope is None:
            self._scope = anyio.CancelScope()
            self._hurry = anyio.Event()  # the last one may be of another event loop
            current_runtime().spawn(self._work, self._scope, name="msgbus tickets")

    async def _work(self, scope: anyio.CancelScope) -> None:
        since = -1
        try:
            with scope:
                while True:
                    since = await self._look(since)
                    # In real seconds, as it is about the work that a busy journal would make.
                    with anyio.move_on_after(REST):
                        await self._hurry.wait()
                    self._hurry = anyio.Event()
        finally:
            self._scope = None
        if self._waiting:
            self._watch()  # somebody came while it ended

    async def _look(self, since: int) -> int:
        """Look for all results that somebody waits for, once the journal is not at `since`."""
        journal = self._hub.journal
        try:
            since = await journal.changed(since)
            for result in await journal.results(list(self._waiting)):
                self._notify(result)
        except JournalClosedError:
            self.close()
        except Exception as error:  # nothing may end this task: others wait for it
            log.error(
                "journal_task_failed",
                bus=self._hub.state.config.name,
                task="tickets",
                error=redact_exception(error),
            )
            await anyio.sleep(PAUSE)
            return -1  # the change was not looked at
        return since

    def _notify(self, result: Result) -> None:
        waiting = self._waiting.get(result.message_id)
        if waiting:
            self._results.setdefault(result.message_id, result)
            for event in waiting:
                event.set()


def _stopped_before(message_id: str) -> BusClosedError:
    return BusClosedError(
        f"The bus stopped before command {message_id} had a result. It is in the journal: ask for "
        f"it with bus.ticket(...) after the next start."
    )
