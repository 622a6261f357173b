"""The journal: every message a row, durable, in order, to be read again.

`open_journal(url)` opens one. What is written beside messages, in the same transaction, is in
`msgbus.journal.operations`; what is read is in `msgbus.journal.records`.
"""

from msgbus.journal.codec import MessageCodec, PayloadCodec, RawMessage
from msgbus.journal.leases import LeaseWatch
from msgbus.journal.memory import MemoryJournal
from msgbus.journal.opening import open_journal
from msgbus.journal.operations import Operation
from msgbus.journal.port import Journal
from msgbus.journal.records import (
    Ack,
    AckLevel,
    Cursor,
    DeadLetter,
    DeliveryRecord,
    FlowNode,
    Kind,
    Lease,
    Outcome,
    Page,
    Record,
    Retention,
    Scheduled,
    TicketRow,
    TicketState,
    TrimReport,
    VerifyReport,
)
from msgbus.journal.sqlite import SqliteJournal
from msgbus.messages.upcasting import upcasts

__all__ = [
    "Ack",
    "AckLevel",
    "Cursor",
    "DeadLetter",
    "DeliveryRecord",
    "FlowNode",
    "Journal",
    "Kind",
    "Lease",
    "LeaseWatch",
    "MemoryJournal",
    "MessageCodec",
    "Operation",
    "Outcome",
    "Page",
    "PayloadCodec",
    "RawMessage",
    "Record",
    "Retention",
    "Scheduled",
    "SqliteJournal",
    "TicketRow",
    "TicketState",
    "TrimReport",
    "VerifyReport",
    "open_journal",
    "upcasts",
]
