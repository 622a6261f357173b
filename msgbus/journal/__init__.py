"""The journal: a log of messages, and what each subscription has done with them.

`open_journal(url)` opens one. `ports` has the protocols that an engine implements, `records` and
`operations` the values they exchange. Imported by subscriptions, the bus and the pipeline.
"""

from msgbus.errors import MemberEndedError, StaleError
from msgbus.journal.codec import MessageCodec, PayloadCodec, RawMessage
from msgbus.journal.memory import MemoryJournal
from msgbus.journal.opening import open_journal
from msgbus.journal.operations import Operation
from msgbus.journal.ports import (
    CommitParticipant,
    Deliveries,
    Journal,
    Log,
    Members,
    Questions,
    Rows,
    Tables,
)
from msgbus.journal.records import (
    Appended,
    Cursor,
    DeliveryRecord,
    Instance,
    Kind,
    Letter,
    Member,
    Order,
    Outcome,
    Pending,
    Promises,
    Record,
    Result,
    Selection,
    State,
)
from msgbus.journal.reports import (
    DeliveryCount,
    FlowNode,
    Page,
    Retention,
    TrimReport,
    VerifyReport,
)
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.messages.upcasting import upcasts

__all__ = [
    "Appended",
    "CommitParticipant",
    "Cursor",
    "Deliveries",
    "DeliveryCount",
    "DeliveryRecord",
    "FlowNode",
    "Instance",
    "Journal",
    "Kind",
    "Letter",
    "Log",
    "Member",
    "MemberEndedError",
    "Members",
    "MemoryJournal",
    "MessageCodec",
    "Operation",
    "Order",
    "Outcome",
    "Page",
    "PayloadCodec",
    "Pending",
    "Promises",
    "Questions",
    "RawMessage",
    "Record",
    "Result",
    "Retention",
    "Rows",
    "Selection",
    "SqliteJournal",
    "StaleError",
    "State",
    "Tables",
    "TrimReport",
    "VerifyReport",
    "open_journal",
    "upcasts",
]
