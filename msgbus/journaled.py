"""The durable side of a bus: what it can do because it has a journal.

What it takes to do so is loaded only for a bus that has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from msgbus.errors import ConfigurationError
from msgbus.messages import R

if TYPE_CHECKING:
    import sqlite3

    from msgbus.core import BusCore
    from msgbus.durability.hub import Durability
    from msgbus.durability.tickets import Ticket
    from msgbus.durability.transactions import Transaction
    from msgbus.journal.port import Journal
    from msgbus.messages import Command
    from msgbus.registrations import Registration
    from msgbus.subscriptions.config import RetryTiers

T = TypeVar("T")


class JournalSide:
    """`journal`, `transaction` and what else needs one, as part of `MessageBus`."""

    _core: BusCore

    def _open_journal_side(self, journal: str | object | None) -> None:
        if journal is None:
            return
        from msgbus.durability.hub import Durability
        from msgbus.journal.port import Journal

        if not isinstance(journal, str | Journal):
            message = (
                f"journal={journal!r:.60} is no journal. Give a URL such as "
                f'"sqlite:///shop.db", or an object with the methods of msgbus.journal.Journal.'
            )
            raise ConfigurationError(message)
        self._core.durability = Durability(self._core, journal)

    def _durability(self, what: str) -> Durability:
        if self._core.durability is None:
            message = (
                f"{what} needs a journal, and this bus has none. "
                f'Make it with MessageBus(journal="sqlite:///shop.db").'
            )
            raise ConfigurationError(message)
        return self._core.durability

    @property
    def journal(self) -> Journal | None:
        """Where messages and deliveries are recorded, if anywhere; opened at the first use."""
        durability = self._core.durability
        return None if durability is None else durability.journal

    def transaction(self) -> Transaction:
        """Statements and events in one commit: `async with bus.transaction() as tx:`.

        `tx.execute(sql, parameters)` and every `publish` in the block are written together
        when it ends, and not at all if it raises.

        Raises:
            ConfigurationError: The bus has no journal.
        """
        from msgbus.durability.transactions import Transaction

        return Transaction(self._durability("bus.transaction()"))

    async def transact(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """The value of `function(connection)`, called in a transaction of the journal's file.

        For reading and writing in one step. It runs on the journal's own thread, so it is no
        coroutine; it cannot end the transaction; if it raises, nothing of it is kept.

        Raises:
            ConfigurationError: The bus has no journal.
            ForbiddenStatementError: It tried to commit, attach or change settings.
        """
        return await self._durability("bus.transact()").journal.transact(function)

    async def _journal_opened(self) -> None:
        """For subclasses: the bus is about to begin to read the journal."""

    async def _journal_closing(self) -> None:
        """For subclasses: the last moment at which there is a journal to write to."""

    async def enqueue(
        self,
        command: Command[R],
        delay: float | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> Ticket[R]:
        """Keep `command` in the journal, to be handled later by whoever handles such commands.

        When this returns it is durable: this process or another on the same journal handles
        it, at least once, and tries again if it fails or if its process dies. The handler may
        run more than once, so it should be idempotent. Enqueuing a command twice does it once.

        Args:
            command: What to do; its reply is kept as JSON for the ticket.
            delay: Seconds before it may begin.
            headers: Text that flows with it to everything it causes.

        Raises:
            ConfigurationError: The bus has no journal, or the reply has no JSON form.
            WrongMessageTypeError: It is no command, or a query, which nobody wants to know later.
            StoredMessageError: It cannot be written as JSON.
            BusClosedError: The bus is stopping or has stopped.
            JournalError: The journal did not take it.
        """
        return await self._durability("bus.enqueue()").commands.add(command, delay, headers)

    async def ticket(self, message_id: str) -> Ticket[Any]:
        """The ticket of a command that was enqueued, by this process or another.

        Raises:
            ConfigurationError: The bus has no journal.
            TicketNotFoundError: No such command was enqueued.
        """
        return await self._durability("bus.ticket()").tickets.find(message_id)

    def retry_tiers(self, registration: Registration) -> RetryTiers:  # noqa: ARG002 (for subclasses)
        """How often a durable handler, or that of an enqueued command, tries again.

        A durable handler may say so itself, by `retry=`.
        """
        from msgbus.subscriptions.config import RetryTiers

        return RetryTiers()
