"""A bus and its journal: `MessageBus(journal="sqlite:///shop.db")`.

Publishing, recording, durable handlers, delayed events, enqueued commands, transactions, replay
and outbox. Part of the bus; imported only by a bus that has a journal.
"""

from msgbus.bus.durable.outbox import Outbox, OutboxEntry
from msgbus.bus.durable.relaying import Relay, RelayReport
from msgbus.bus.durable.replay import ReplayFailure, ReplayReport
from msgbus.bus.durable.tickets import Ticket, TicketResult
from msgbus.bus.durable.transactions import Transaction

__all__ = [
    "Outbox",
    "OutboxEntry",
    "Relay",
    "RelayReport",
    "ReplayFailure",
    "ReplayReport",
    "Ticket",
    "TicketResult",
    "Transaction",
]
