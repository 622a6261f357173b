"""Values that a journal stores and returns. All are read-only."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple, final
from zlib import crc32

from msgbus.errors import ConfigurationError
from msgbus.messages.metadata import NO_HEADERS

DELAYED: Final = "msgbus.delayed"
"""Queue of delayed events: rows that hold the message until it is due."""

LETTERS: Final = "msgbus.letters"
"""Queue of dead letters that no subscription has: rows that hold the message."""


class Kind(StrEnum):
    """Kind of a recorded message."""

    EVENT = "event"
    COMMAND = "command"
    CONTROL = "control"
    """A request to the processes of this journal, or the record of one; no handler gets it."""


class Outcome(StrEnum):
    """Outcome of one delivery."""

    OK = "ok"
    FAILED = "failed"
    REFUSED = "refused"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    DEAD_LETTERED = "dead_lettered"
    DROPPED = "dropped"


class State(StrEnum):
    """State of a pending row."""

    WAITING = "waiting"
    """Waits until `due`, then a member may claim it."""

    CLAIMED = "claimed"
    """In flight in the process of the member `owner`."""

    PARKED = "parked"
    """Waits for an earlier row of its key."""

    DEAD = "dead"
    """Dead-lettered; waits for a replay or a discard."""

    DONE = "done"
    """Acknowledged ahead of the cursor; deleted when the cursor passes it."""

    KEPT = "kept"
    """Acknowledged, and kept to recognise a repetition (`idempotent=True`)."""

    DAMAGED = "damaged"
    """The row or its message cannot be read."""


HOLDING: Final = frozenset({State.WAITING, State.CLAIMED, State.DEAD, State.DAMAGED})
"""States in which a row with a key holds back the parked rows of that key."""


class Order(StrEnum):
    """Which messages of a subscription are handled one after another."""

    LOG = "log"
    """All of them, in the order of the log."""

    KEY = "key"
    """Those of one key."""

    NONE = "none"


class Record(NamedTuple):
    """One message as it is stored: its envelope, and its fields as bytes."""

    message_id: str
    name: str
    """Wire name of its class."""
    version: int
    """Schema version of the payload."""
    topic: str
    key: str | None
    kind: Kind
    time: float
    """Seconds since the epoch, by the clock of the process that recorded it."""
    correlation_id: str
    causation_id: str | None
    root_id: str
    """Id of the first message of its causation chain."""
    depth: int
    """Number of messages before it in that chain."""
    session_id: str | None
    headers: Mapping[str, str]
    payload: bytes
    from_system: bool = False
    """Whether one of the bus's own events is among its causes."""
    offset: int = 0
    """Position in the log, given by the journal; 0 until then."""

    def json(self) -> Any:
        """Return the payload as plain data, also if this process lacks its class."""
        return json.loads(self.payload)

    def envelope(self) -> str:
        """Return all fields but the payload as JSON; `from_envelope` reads it."""
        fields = {**self._asdict(), "headers": dict(self.headers)}
        del fields["payload"]
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_envelope(cls, envelope: str, payload: bytes) -> Record:
        """Make the record of an `envelope()` and its payload."""
        fields: dict[str, Any] = json.loads(envelope)
        headers = fields.pop("headers")
        fields["headers"] = MappingProxyType(headers) if headers else NO_HEADERS
        fields["kind"] = Kind(fields["kind"])
        return cls(payload=payload, **fields)


def slot_of(record: Record) -> int:
    """Hash the key, or the id of a message without one, to 16 bits; it chooses the partition."""
    return crc32((record.message_id if record.key is None else record.key).encode()) & 0xFFFF


class Appended(NamedTuple):
    """Result of one `Append`."""

    offset: int
    """Offset in the log; of a delayed event, the number of its row."""
    is_duplicate: bool = False
    """The journal had the message, or an active row of its `unique` key: `offset` is that one."""


class Cursor(NamedTuple):
    """One partition of a subscription.

    What is at or below `acked` is done or has a pending row. Nothing beyond `fetched` was ever
    given to a handler.
    """

    name: str
    partition: int
    acked: int
    fetched: int
    owner: int | None
    """Id of the member that owns the partition; always `None` for `Order.NONE`."""
    epoch: int
    """Grows with every owner; what was written under an older one is refused."""
    selection: str = ""
    """`Selection.text` of the members that may deliver it."""


class Pending(NamedTuple):
    """One message of one subscription whose state its cursor cannot describe."""

    subscription: str
    offset: int
    partition: int
    key: str | None
    """The key whose later messages have to wait for it; `None` if none has to."""
    state: State
    attempt: int
    """Attempts counted so far."""
    due: float | None
    """Seconds since the epoch; set exactly while it is `WAITING`."""
    owner: int | None
    """Id of the member that claimed it."""
    version: int
    """Grows with every change; guards the next one.

    It begins at 1 again if the row is made anew, after a `Seek`, say. A claim of before is refused
    all the same: the owner is another then, and ids of members are never used again.
    """
    alone: bool
    """It was in flight when its process ended: nothing may run beside it."""
    error: str | None
    time: float
    """Seconds since the epoch of its last change."""
    body: Record | None = None
    """The message, if it is not in the log."""
    unique: str | None = None
    """Of the rows of a subscription that are not dead, at most one has this key."""

    def holds(self, unique: str) -> bool:
        """Tell whether the row keeps another of this unique key out."""
        return self.unique == unique and self.state is not State.DEAD

    def moved(self, state: State, *, time: float, **changes: Any) -> Pending:
        """Return the row as its next version; `due` and `owner` are those given, or none."""
        changes = {"due": None, "owner": None, **changes}
        return self._replace(version=self.version + 1, state=state, time=time, **changes)


class Letter(NamedTuple):
    """Description of a dead letter, beside its row."""

    error_type: str
    reason: str
    first_attempt: float
    """Seconds since the epoch."""
    last_attempt: float
    traceback: str = ""
    handler: str = ""
    """Name of the handler, if it is not the subscription's."""
    target: str = ""
    """What the handler is registered for."""
    scope: str | None = None
    """Id of the session whose handler it is."""
    answered: bool = False
    """Whether the caller of a command saw the failure."""
    replays: int = 0
    """Replays that were begun."""
    note: str | None = None
    status: str = "dead"
    """`LetterStatus`; whoever replays a letter or is done with it writes it with the row."""
    earlier: int = 0
    """Attempts before its last replay; the row counts those since."""
    origin: str = ""
    """Module and name of the message's class, where that is known."""

    def after(self, known: Letter) -> Letter:
        """Return the letter with the history of the one it replaces."""
        return self._replace(
            first_attempt=min(self.first_attempt, known.first_attempt),
            replays=max(self.replays, known.replays),
            earlier=max(self.earlier, known.earlier),
        )


class DeliveryRecord(NamedTuple):
    """One attempt to handle one message, and its outcome: history, never read as truth."""

    message_id: str
    handler: str
    attempt: int
    outcome: Outcome
    wait: float
    """Seconds between publish and attempt."""
    run: float
    """Seconds in the handler."""
    time: float
    """Seconds since the epoch at the end."""
    error: str | None = None
    """Text of the error, redacted."""
    offset: int | None = None


class Result(NamedTuple):
    """Reply of an enqueued command, or its error."""

    message_id: str
    body: bytes | None
    """The reply as JSON."""
    error: str | None
    """Text of the error, redacted; set if the command failed."""
    time: float


class Instance(NamedTuple):
    """State of one long-running process, by name and key."""

    name: str
    key: str
    state: bytes
    wake: float | None
    """Seconds since the epoch at which it wants to be called."""
    version: int
    """Grows with every `Save`; guards the next one."""


class Member(NamedTuple):
    """A process at work on the journal. What it owns is its own as long as its row exists."""

    id: int
    """Never used again."""
    process: str
    """Identity of the process, to tell whether it has ended."""
    serves: Mapping[str, str]
    """Names of its subscriptions, with the text of their selection."""
    renewals: int
    """Grows while the process lives."""


LEVELS: Final = ("memory", "os", "fsync", "quorum", "quorum_fsync")
"""Values of `require_ack`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """Promises of an engine for a commit that returned."""

    survives_kill: bool = False
    survives_power_cut: bool = False
    survives_node_loss: bool = False
    dedupe_window: float | None
    """Seconds during which a message id is recognised; `None` for as long as it is stored."""
    failover: float
    """Seconds after which the work of a silent process goes to others, beside the TTL."""
    is_ordered: bool
    """Whether offsets are in the order of commits."""

    def meets(self, require: str) -> bool:
        """Tell whether a commit that returned has reached what `require_ack` asks for.

        Args:
            require: `memory`: the process has it. `os`: it survives a kill of the process.
                `fsync`: it survives a power cut. `quorum`: it survives the loss of a node.
                `quorum_fsync`: both of these.

        Raises:
            ConfigurationError: There is no such level.
        """
        if require not in LEVELS:
            message = f"{require!r} is no level of require_ack. Levels are: {', '.join(LEVELS)}."
            raise ConfigurationError(message)
        if require == "memory":
            return True
        if require == "os":
            return self.survives_kill
        has_quorum = self.survives_node_loss or not require.startswith("quorum")
        return has_quorum and (self.survives_power_cut or not require.endswith("fsync"))

    @property
    def level(self) -> str:
        """The highest level of `require_ack` that it meets."""
        return [level for level in LEVELS if self.meets(level)][-1]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which messages a subscription takes, and in which order."""

    names: Collection[str] | None = None
    """Wire names; `None` for all. It may grow."""
    matches: Callable[[Record], bool] | None = None
    """Asked for each record that `names` lets through."""
    kind: Kind = Kind.EVENT
    order: Order = Order.LOG
    partitions: int = 1
    key: Callable[[Record], str | None] | None = None
    """The key of a message, instead of that in its record."""
    parks: bool = False
    """Whether a dead letter holds back later messages of its key."""
    keeps_done: bool = False
    """Whether rows of acknowledged messages are `KEPT`, so that none is delivered again."""
    text: str = ""
    """Describes the selection; stored with the cursor, so that two versions do not mix."""

    def takes(self, record: Record) -> bool:
        """Tell whether a record belongs to the subscription."""
        return (
            record.kind is self.kind
            and (self.names is None or record.name in self.names)
            and (self.matches is None or self.matches(record))
        )

    def order_key(self, record: Record) -> str | None:
        """Return the key within which the record keeps its order."""
        if self.order is Order.LOG:
            return ""
        if self.order is Order.NONE:
            return None
        return record.key if self.key is None else self.key(record)

    def partition(self, record: Record) -> int:
        """Return the partition of a record."""
        if self.partitions == 1:
            return 0
        if self.key is not None:
            record = record._replace(key=self.key(record))
        return slot_of(record) % self.partitions

    def holds(self, state: State) -> bool:
        """Tell whether a row in this state holds back later messages of its key."""
        return state in HOLDING and (self.parks or state is not State.DEAD)
