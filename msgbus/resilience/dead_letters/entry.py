"""`DeadLetterEntry`: a message that one handler could not handle, and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final, Literal, cast, final

from msgbus.errors import DeadLetterError
from msgbus.messages.message import Message, metadata_of
from msgbus.messages.metadata import NO_HEADERS
from msgbus.resilience.dead_letters.contents import changed, decoded, described, encoded
from msgbus.telemetry.redaction import redact, redact_exception
from msgbus.telemetry.tracebacks import redacted_traceback


class LetterStatus(StrEnum):
    """Status of a dead letter."""

    DEAD = "dead"
    """Waits for a replay, an edit or a discard."""

    REPLAYING = "replaying"
    """A process has claimed it and delivers its message once more."""

    REPLAYED = "replayed"
    """The handler has handled its message."""

    DISCARDED = "discarded"
    """Discarded; `note` says why."""

    EDITED = "edited"
    """Another letter, with a changed message, stands in for it."""


DONE: Final = frozenset({LetterStatus.REPLAYED, LetterStatus.DISCARDED, LetterStatus.EDITED})
"""Nothing is left to do about letters of these."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterEntry:
    """One message that one handler could not handle. Read-only.

    There is one letter for each message and handler: a message that is dead-lettered again by
    the same handler updates it. A handler is known by its scope, its name and its target.
    """

    letter_id: str
    """Made of the message's id, and scope, name and target of the handler: the same everywhere."""

    message_id: str
    message_type: str
    """Wire name of the message's class."""

    version: int
    """Schema version of the message's class."""

    kind: Literal["command", "event"]
    payload: str
    """The message's fields as JSON; always readable, also without its class."""

    handler: str
    """Its name; of a durable handler its name in the journal."""

    error: str
    """`Type: text` of the last failure, secrets removed."""

    error_type: str
    traceback: str
    """Of the last failure: secrets removed, frames of msgbus folded."""

    attempts: int
    """Deliveries in all, replays included."""

    first_attempt: datetime
    last_attempt: datetime
    """When it was last dead-lettered."""

    reason: str
    """Why it was dead-lettered: `retries exhausted`, `not retried`, `circuit open`, ..."""

    correlation_id: str
    causation_id: str | None = None
    session_id: str | None = None
    topic: str | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS, hash=False)
    answered: bool = False
    """Whether the command's caller saw the failure, and may have acted on it."""

    status: LetterStatus = LetterStatus.DEAD
    note: str | None = None
    """Why it was discarded, which letter stands in for it, or that its last replay failed."""

    replays: int = 0
    """Replays that were begun, counted before the message is delivered."""

    origin: str = ""
    """Module and name of the message's class where the letter was made."""

    from_system: bool = False
    """Whether a handler of the bus's own events sent the message."""

    scope: str | None = None
    """Id of the session whose handler it is; `None` for a handler of the bus."""

    target: str = ""
    """What the handler is registered for: a wire name, or `topic:` and a pattern. Empty if that
    is not known; then any handler of this name will do."""

    key: str | None = None
    """Key of the message."""

    offset: int = 0
    """Offset of the message in the journal; 0 if it is not there."""

    root_id: str = ""
    """Id of the first message of its causation chain."""

    depth: int = 0
    """Number of messages before it in that chain."""

    subscription: str = ""
    """Subscription or command queue of the journal that has the message and delivers it once
    more; empty for a handler in process, and for a letter that is done."""

    _message: Message | None = field(default=None, repr=False, compare=False)

    @property
    def message(self) -> Message:
        """The message itself, with its own id, cause, session and headers.

        Raises:
            UnreadableLetterError: Its class is not imported, or does not take its fields.
        """
        if self._message is None:
            object.__setattr__(self, "_message", decoded(self))
        message = self._message
        assert message is not None  # noqa: S101 (set above)
        return message

    def data(self) -> dict[str, Any]:
        """Return the letter as plain values, ready for JSON; `from_data` reads them."""
        found = {name: getattr(self, name) for name in FIELDS}
        found["first_attempt"] = self.first_attempt.isoformat()
        found["last_attempt"] = self.last_attempt.isoformat()
        found["headers"] = dict(self.headers)
        found["status"] = self.status.value
        return found


FIELDS: Final = tuple(
    one.name for one in fields(DeadLetterEntry) if one.init and one.name[0] != "_"
)


def letter_id_of(message_id: str, handler: str, scope: str | None = None, target: str = "") -> str:
    """Return the id of the one letter of this message and handler."""
    identity = json.dumps([scope, handler, target])
    return f"{message_id}-{blake2b(identity.encode(), digest_size=6).hexdigest()}"


def letter_about(
    message: Message,
    *,
    handler: str,
    error: BaseException,
    attempts: int,
    first_attempt: datetime,
    last_attempt: datetime,
    reason: str,
    answered: bool = False,
    scope: str | None = None,
    target: str = "",
) -> DeadLetterEntry:
    """Make a new letter; secrets are removed here, before anything is stored."""
    message_id = metadata_of(message).message_id
    return DeadLetterEntry(
        letter_id=letter_id_of(message_id, handler, scope, target),
        payload=encoded(message),
        handler=handler,
        scope=scope,
        target=target,
        error=redact_exception(error),
        error_type=type(error).__name__,
        traceback=redacted_traceback(error),
        attempts=attempts,
        first_attempt=aware(first_attempt),
        last_attempt=aware(last_attempt),
        reason=redact(reason),
        answered=answered,
        _message=message,
        **described(message),
    )


def edited_letter(old: DeadLetterEntry, changes: Mapping[str, Any]) -> DeadLetterEntry:
    """Make the letter that stands in for `old`: for the same handler, with a changed message.

    Raises:
        LetterEditError: The message would not be valid.
        UnreadableLetterError: The message's class is not imported.
    """
    message = changed(old, changes)
    message_id = metadata_of(message).message_id
    return replace(
        old,
        letter_id=letter_id_of(message_id, old.handler, old.scope, old.target),
        payload=encoded(message),
        attempts=0,
        replays=0,
        reason=f"edited from {old.letter_id}",
        status=LetterStatus.DEAD,
        note=None,
        subscription="",
        _message=message,
        **described(message),
    )


def aware(moment: datetime) -> datetime:
    """Return the same moment in UTC; one without a zone is taken to be in UTC."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def at(seconds: float) -> datetime:
    """Return a clock's `time()` as a moment, to the microsecond."""
    return datetime.fromtimestamp(round(seconds, 6), UTC)


# -- letters from files ------------------------------------------------------------------------


def from_data(data: Mapping[str, Any]) -> DeadLetterEntry:
    """Make the letter that `DeadLetterEntry.data` wrote.

    Raises:
        DeadLetterError: These are not the values of a letter.
    """
    unknown = sorted(set(data) - set(FIELDS))
    if unknown:
        raise DeadLetterError(f"A dead letter has no {', '.join(unknown)}.")
    values = dict(data)
    try:
        for name in ("first_attempt", "last_attempt"):
            values[name] = aware(datetime.fromisoformat(values[name]))
        values["status"] = LetterStatus(values.get("status", "dead"))
        for name, (is_right, wanted) in _CHECKS.items():
            if name in values and not is_right(values[name]):
                raise DeadLetterError(f"{name} of a dead letter is {wanted}.")
        values["headers"] = MappingProxyType(dict(values.get("headers", {})))
        letter = DeadLetterEntry(**values)
        identity = (letter.message_id, letter.handler, letter.scope, letter.target)
        if letter.letter_id != letter_id_of(*identity):
            raise DeadLetterError("letter_id is not that of message_id, handler, scope and target.")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DeadLetterError(f"Not a dead letter: {redact_exception(error)}") from error
    return letter


def _is_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False  # half a character, which no file can hold
    return True


def _is_text_or_none(value: object) -> bool:
    return value is None or _is_text(value)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _are_headers(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    headers = cast("dict[object, object]", value)
    return all(_is_text(key) and _is_text(text) for key, text in headers.items())


_TEXTS: Final = (
    *("letter_id", "message_id", "message_type", "payload", "handler", "error", "error_type"),
    *("traceback", "reason", "correlation_id", "origin", "target", "root_id", "subscription"),
)
_TEXTS_OR_NONE: Final = ("causation_id", "session_id", "topic", "note", "scope", "key")
_COUNTS: Final = ("version", "attempts", "replays", "offset", "depth")
_CHECKS: Final[dict[str, tuple[Callable[[object], bool], str]]] = {
    **dict.fromkeys(_TEXTS, (_is_text, "text")),
    **dict.fromkeys(_TEXTS_OR_NONE, (_is_text_or_none, "text or null")),
    **dict.fromkeys(_COUNTS, (_is_count, "a whole number, 0 or more")),
    **dict.fromkeys(
        ("answered", "from_system"), (lambda value: type(value) is bool, "true or false")
    ),
    "kind": (lambda value: value in ("command", "event"), '"command" or "event"'),
    "headers": (_are_headers, "texts by name"),
}
"""Checks of the values of a letter that came from a file."""
