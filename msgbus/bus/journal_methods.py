"""Methods of `MessageBus` that need a journal.

What implements them is imported only for a bus that has one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from typing_extensions import override

from msgbus.bus.protocols import SendingMethods
from msgbus.errors import ConfigurationError
from msgbus.messages.message import R
from msgbus.runtime.arguments import require_members

if TYPE_CHECKING:
    import sqlite3
    from datetime import datetime

    from msgbus.bus.bus_state import BusState
    from msgbus.bus.durable.hub import DurableBus
    from msgbus.bus.durable.outbox import Outbox
    from msgbus.bus.durable.relaying import Relay, RelayReport
    from msgbus.bus.durable.replay import ReplayReport
    from msgbus.bus.durable.tickets import Ticket
    from msgbus.bus.durable.transactions import Transaction
    from msgbus.bus.subscription import Subscription
    from msgbus.handlers.delivery import StartAt
    from msgbus.journal.ports import Journal
    from msgbus.messages.message import Command

T = TypeVar("T")


class JournalMethods(SendingMethods):
    """`journal`, `transaction`, `replay`, `relay` and `enqueue`, as part of `MessageBus`."""

    _state: BusState

    def _open_journal_methods(self, journal: str | Journal | None) -> None:
        if journal is None:
            return
        from msgbus.bus.durable.hub import DurableBus
        from msgbus.journal.ports import Journal

        if not isinstance(journal, str):
            fix = 'Give a URL such as "sqlite:///shop.db", or all that msgbus.journal.Journal has.'
            require_members(journal, Journal, "The journal", fix)
        self._state.durability = DurableBus(self._state, journal)

    def _durability(self, what: str) -> DurableBus:
        if self._state.durability is None:
            message = (
                f"{what} needs a journal, and this bus has none. "
                f'Make it with MessageBus(journal="sqlite:///shop.db").'
            )
            raise ConfigurationError(message)
        return self._state.durability

    @property
    def journal(self) -> Journal | None:
        """The journal that records messages and deliveries, if any; opened at first use."""
        durability = self._state.durability
        return None if durability is None else durability.journal

    def transaction(self) -> Transaction:
        """SQL statements and events in one commit: `async with bus.transaction() as tx:`.

        `tx.execute(sql, parameters)` and every `publish` in the block are written together
        when it ends, and not at all if it raises. Blocks of one bus cannot be inside each other.

        Raises:
            ConfigurationError: The bus has no journal.
        """
        from msgbus.bus.durable.transactions import Transaction

        return Transaction(self._durability("bus.transaction()"))

    async def transact(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Call `function(connection)` in a transaction of the journal's file.

        For reading and writing in one step. It runs on the journal's own thread, so it cannot
        be a coroutine function. It cannot end the transaction; if it raises, nothing is written.

        Raises:
            ConfigurationError: The bus has no journal.
            ForbiddenStatementError: It tried to commit, attach, change settings or our tables, or
                used the connection on another thread or after its end.
            StaleError: Called in a durable handler whose message another process has now.
        """
        return await self._durability("bus.transact()").transact(function)

    async def replay(
        self,
        start: StartAt | int | datetime,
        to: str | Subscription | Callable[..., Any],
        *,
        until: int | datetime | None = None,
        names: Collection[str] | None = None,
        topic: str | None = None,
        rate: float | None = None,
        emit: bool = False,
        on_error: Literal["continue", "stop"] = "continue",
        progress: Callable[[ReplayReport], object] | None = None,
    ) -> ReplayReport:
        """Replay recorded events to one handler only, in the order of the journal.

        Nothing is recorded and no cursor moves. What the handler itself publishes, executes
        or writes happens again; it can check `context.is_replay`.

        Args:
            start: The first offset, a time, or a `StartAt`.
            to: A function, whose annotation says which events it gets; it may ask for
                dependencies. Or the name or handle of a registered handler, which is then
                called inside its middleware and its timeout.
            until: The last offset; or a time, before which all of it was recorded. Never
                more than there is at the call.
            names: Only events of these wire names.
            topic: Only events whose topic fits this pattern.
            rate: Events a second, at most.
            emit: Publish what the handler emits. Otherwise it is only counted: it was
                published when the events were new.
            on_error: `"stop"` ends the replay at the first event that fails or cannot be read,
                so that `report.next` is that event; `"continue"` counts and lists it.
            progress: Called with a report about once a second, and at the end.

        Raises:
            ConfigurationError: The bus has no journal, or no such handler.
            HandlerSignatureError: The function cannot be called with events.
            BusNotStartedError: The bus was not started, so resources of handlers are not open.
            JournalError: The journal cannot be read.
        """
        durability = self._durability("bus.replay()")
        if on_error not in ("continue", "stop"):
            message = f"on_error must be 'continue' or 'stop', not {on_error!r}."
            raise ValueError(message)
        if rate is not None and not rate > 0:
            message = f"rate must be more than 0 events a second, not {rate}."
            raise ValueError(message)
        from msgbus.bus.durable.replay import replay_history

        return await replay_history(
            durability,
            start,
            to,
            until=until,
            names=names,
            topic=topic,
            emit=emit,
            stop=on_error == "stop",
            rate=rate,
            progress=progress,
        )

    def relay(self, outbox: Outbox, *, every: float = 0.5, limit: int = 1000) -> Relay:
        """Publish the entries of an outbox in your own database, as long as the bus runs.

        Each entry is marked as done after its event is in the journal. A crash in between
        publishes it again under the same id, which the journal recognizes: no handler gets it
        twice, as long as the journal still has the first.

        Args:
            outbox: Where the entries are.
            every: Seconds between two passes; `relay.wake()` starts one at once.
            limit: Entries per pass.

        Raises:
            ConfigurationError: The bus has no journal, or `outbox` is no outbox.
            BusClosedError: The bus has stopped.
        """
        relays = self._durability("bus.relay()").relays
        _check_outbox(outbox, limit)
        if not every > 0:
            message = f"every must be more than 0 seconds, not {every}."
            raise ValueError(message)
        return relays.add(outbox, every, limit)

    async def relay_once(self, outbox: Outbox, *, limit: int = 1000) -> RelayReport:
        """Publish at most `limit` pending entries of an outbox now, and mark them as done.

        Raises:
            ConfigurationError: The bus has no journal, or `outbox` is no outbox.
            BusStateError: Called inside `bus.transaction()`.
            JournalError: The journal could not write them; they are still pending.
        """
        relays = self._durability("bus.relay_once()").relays
        _check_outbox(outbox, limit)
        return await relays.once(outbox, limit)

    async def _journal_opened(self) -> None:
        """Hook for subclasses: the journal is open, and nothing is read from it yet."""

    async def _journal_closing(self) -> None:
        """Hook for subclasses: the last moment to write to the journal."""

    @override
    async def enqueue(
        self,
        command: Command[R],
        delay: float | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        unique: str | None = None,
        on_duplicate: Literal["join", "refuse"] = "join",
    ) -> Ticket[R]:
        return await self._durability("bus.enqueue()").commands.add(
            command, delay, headers, unique=unique, on_duplicate=on_duplicate
        )

    async def ticket(self, message_id: str) -> Ticket[Any]:
        """Get the ticket of a command enqueued by this process or another.

        Raises:
            ConfigurationError: The bus has no journal.
            TicketNotFoundError: No such command was enqueued.
        """
        return await self._durability("bus.ticket()").tickets.find(message_id)


def _check_outbox(outbox: object, limit: int) -> None:
    from msgbus.bus.durable.outbox import Outbox

    require_members(outbox, Outbox, "The outbox", "See msgbus.bus.durable.Outbox for what they do.")
    if limit < 1:
        message = f"limit must be at least 1, not {limit}."
        raise ValueError(message)
