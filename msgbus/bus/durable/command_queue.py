"""Enqueued commands: stored in the journal, handled by any process that has their handler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, final

from msgbus.bus.durable.fencing import owned_deliveries
from msgbus.bus.durable.served_queues import ServedQueues
from msgbus.bus.durable.tickets import Ticket, queue_of
from msgbus.bus.durable.transactions import current_transaction
from msgbus.bus.schedule import check_delay
from msgbus.errors import (
    ConfigurationError,
    DuplicateCommandError,
    StaleError,
    StoredMessageError,
    WrongMessageTypeError,
)
from msgbus.journal.operations import Append, Drop, Reply
from msgbus.journal.records import Kind, Record, Selection, State
from msgbus.messages.frame import current_frame, fix_in_frame
from msgbus.messages.message import Command, Query, R, metadata_of, require_command

if TYPE_CHECKING:
    from msgbus.bus.durable.hub import DurableBus

OnDuplicate = Literal["join", "refuse"]


@final
class CommandQueue:
    """The enqueued commands of a journal, as one bus adds and handles them."""

    def __init__(self, hub: DurableBus) -> None:
        self._hub = hub
        self._served = ServedQueues(hub)

    async def add(
        self,
        command: Command[R],
        delay: float | None,
        headers: Mapping[str, str] | None,
        *,
        unique: str | None = None,
        on_duplicate: OnDuplicate = "join",
    ) -> Ticket[R]:
        """Store a command for a process that handles it; see `bus.enqueue`."""
        hub = self._hub
        append = self._append(command, delay, headers, unique, on_duplicate)
        transaction = current_transaction.get()
        if transaction is not None and (transaction := transaction.of(hub)) is not None:
            if unique is not None:
                message = (
                    f"{type(command).__name__} cannot be enqueued with unique={unique!r} inside "
                    f"bus.transaction(): another one of the key would be found only when the "
                    f"block has ended. Enqueue it before or after the block."
                )
                raise ConfigurationError(message)
            transaction.add(append)
            hub.state.observers.enqueued(command)
            return Ticket(hub.tickets, append.record.message_id, type(command))
        self._served.update_soon()
        message_id = append.record.message_id
        (appended,) = await hub.publisher.append([append])
        if appended.is_duplicate and unique is not None:
            message_id = await self._holder(append, appended.offset)
        if message_id != append.record.message_id and on_duplicate == "refuse":
            assert unique is not None  # noqa: S101 (only then is another one found)
            raise DuplicateCommandError(message_id, unique, message_type=type(command).__name__)
        if not appended.is_duplicate:
            hub.state.observers.enqueued(command)
            metadata_of(command).recorded = (appended.offset, append.record.time)
        return Ticket(hub.tickets, message_id, type(command))

    def _append(
        self,
        command: Command[Any],
        delay: float | None,
        headers: Mapping[str, str] | None,
        unique: str | None,
        on_duplicate: OnDuplicate,
    ) -> Append:
        require_command(command)
        if isinstance(command, Query):
            message = (
                f"{type(command).__name__} is a query, and cannot be enqueued: nothing would come "
                f"of it. Ask it with bus.execute, or make it a Command."
            )
            raise WrongMessageTypeError(message)
        if on_duplicate not in ("join", "refuse"):
            message = f"on_duplicate must be 'join' or 'refuse', not {on_duplicate!r}."
            raise ValueError(message)
        hub = self._hub
        seconds = check_delay(delay)
        outer = current_frame.get()
        hub.state.require_open("enqueue a command on", outer)
        owned_deliveries(outer)
        fix_in_frame(command, outer, headers=headers)
        hub.tickets.replies.writer(type(command))  # raises now, not when it is done
        handler = hub.state.registry.command_handler(type(command), None)
        if handler is not None:
            self._served.require_storable_retry(handler)
        now = hub.state.clock.time()
        record = hub.codec.encode(command, time=now)
        due = now + seconds if seconds else None
        return Append(record, queue_of(record.name), due, unique)

    async def _holder(self, append: Append, offset: int) -> str:
        """Return the id of the command at an offset, which has the unique key."""
        scan = await self._hub.journal.read(offset - 1, 1, Selection(kind=Kind.COMMAND))
        found = [one for one in scan.records if isinstance(one, Record) and one.offset == offset]
        if found:
            return found[0].message_id
        message = (
            f"{append.record.name} was not enqueued: the command at offset {offset}, which waits "
            f"or runs with unique={append.unique!r}, cannot be read. Check the journal."
        )
        raise StoredMessageError(message)

    async def remove(self, message_id: str) -> bool:
        """Cancel a command that nobody has begun; false if somebody has."""
        hub = self._hub
        row = await hub.tickets.row_of(message_id)
        if row is None or row.state is not State.WAITING or row.attempt or row.alone:
            return False
        error = "It was taken back before it began."
        reply = Reply(message_id, hub.state.clock.time(), error=error)
        try:
            await hub.publisher.append([Drop(row), reply])
        except StaleError:
            return False
        hub.state.observers.unscheduled(message_id)
        hub.tickets.look()
        return True

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to handle commands, if this bus has a handler for any."""
        await self._served.start()

    def handlers_changed(self) -> None:
        """Serve the queues of new handlers, and leave those whose handler is gone."""
        self._served.update_soon()

    def look(self) -> None:
        """Look for work that had to wait; called on the event loop after a change."""
        self._served.look()

    def ended(self) -> None:
        """Take note that the membership has ended."""
        self._served.ended()

    def busy(self) -> list[str]:
        """List the commands in flight here, as text."""
        return [f"enqueued {one.record.name}" for one in self._served.in_flight()]

    async def caught_up(self) -> None:
        """Wait until all that is due now, and is handled here, is done or waits for a retry."""
        await self._served.caught_up()

    async def is_idle(self) -> bool:
        """Tell whether nothing is in flight or due here."""
        return not await self._served.is_busy()

    async def counts(self) -> dict[str, int]:
        """Count the commands that wait and that this bus handles, by queue."""
        found: dict[str, int] = {}
        for queue in map(queue_of, self._served.names()):
            counts = await self._hub.journal.count(queue)
            found[queue] = counts.get(State.WAITING, 0) + counts.get(State.CLAIMED, 0)
        return found
