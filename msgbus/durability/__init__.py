"""What connects a bus with a journal: `MessageBus(journal="sqlite:///shop.db")`.

Loaded only by a bus that has one.
"""

from msgbus.durability.hub import Durability
from msgbus.durability.outbox import Outbox, OutboxEntry
from msgbus.durability.relaying import Relay, RelayReport
from msgbus.durability.replaying import ReplayFailure, ReplayReport
from msgbus.durability.tickets import Ticket, TicketResult
from msgbus.durability.transactions import Transaction

__all__ = [
    "Durability",
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
