"""A dead letter: a message that one handler could not handle, and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final, Literal, cast, final

from pydantic import ValidationError

from msgbus.errors import DeadLetterError, UnreadableLetterError
from msgbus.messages.message import Command, Message, metadata_of, set_meta
from msgbus.messages.metadata import NO_HEADERS, Metadata
from msgbus.messages.upcasting import missing_upcasters, upcast
from msgbus.telemetry.redaction import redact, redact_exception
from msgbus.telemetry.tracebacks import redacted_traceback

_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_MASK: Final = '"**********"'  # what pydantic writes for a secret


class LetterStatus(StrEnum):
    """Where a dead letter stands."""

    DEAD = "dead"
    """It waits for somebody to do something about it."""

    REPLAYING = "replaying"
    """A process has claimed it, and is handing its message to the handler."""

    REPLAYED = "replayed"
    """The handler has handled its message."""

    DISCARDED = "discarded"
    """Somebody decided against it; `note` says why."""

    EDITED = "edited"
    """Another letter, with a changed message, stands in for it."""


DONE: Final = frozenset({LetterStatus.REPLAYED, LetterStatus.DISCARDED, LetterStatus.EDITED})
"""Nothing is left to do about letters of these."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterEntry:
    """One message that one handler could not handle. Read-only.

    There is one letter for each message and handler: a message that dies again in the same
    handler updates it. A handler is known by its scope, its name and what it is registered for.
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
    """The message's fields as JSON; always readable, whatever became of its class."""

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
    """When it died, last time."""

    reason: str
    """Why it was given up: `retries exhausted`, `not retried`, `circuit open` and the like."""

    correlation_id: str
    causation_id: str | None = None
    session_id: str | None = None
    topic: str | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS, hash=False)
    answered: bool = False
    """Whether the command's caller saw the failure, and may have acted on it."""

    status: LetterStatus = LetterStatus.DEAD
    note: str | None = None
    """Why it was discarded, or which letter stands in for it."""

    replays: int = 0
    """Replays that were begun, counted before the message is delivered."""

    origin: str = ""
    """Module and name of the message's class where the letter was made."""

    from_system: bool = False
    """Whether a handler of the bus's own events sent the message."""

    scope: str | None = None
    """The session whose handler it is; `None` for a handler of the bus."""

    target: str = ""
    """What the handler is registered for: a wire name, or `topic:` and a pattern. Empty if that
    is not known; then any handler of this name will do."""

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
        """The letter as plain values, ready for JSON; `from_data` reads them."""
        found = {name: getattr(self, name) for name in FIELDS}
        found["first_attempt"] = self.first_attempt.isoformat()
        found["last_attempt"] = self.last_attempt.isoformat()
        found["headers"] = dict(self.headers)
        found["status"] = self.status.value
        return found


FIELDS: Final = tuple(
    one.name for one in fields(DeadLetterEntry) if one.init and one.name[0] != "_"
)


def from_data(data: Mapping[str, Any]) -> DeadLetterEntry:
    """The letter that `DeadLetterEntry.data` wrote.

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


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _are_headers(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    headers = cast("dict[object, object]", value)
    return all(_is_text(key) and _is_text(text) for key, text in headers.items())


_TEXTS: Final = (
    "letter_id",
    "message_id",
    "message_type",
    "payload",
    "handler",
    "error",
    "error_type",
    "traceback",
    "reason",
    "correlation_id",
    "origin",
    "target",
)
_TEXTS_OR_NONE: Final = ("causation_id", "session_id", "topic", "note", "scope")
_CHECKS: Final[dict[str, tuple[Callable[[object], bool], str]]] = {
    **dict.fromkeys(_TEXTS, (_is_text, "text")),
    **dict.fromkeys(_TEXTS_OR_NONE, (_is_text_or_none, "text or null")),
    **dict.fromkeys(("version", "attempts", "replays"), (_is_count, "a whole number, 0 or more")),
    **dict.fromkeys(("answered", "from_system"), (_is_flag, "true or false")),
    "kind": (lambda value: value in ("command", "event"), '"command" or "event"'),
    "headers": (_are_headers, "texts by name"),
}
"""What the values of a letter must be that came from a file."""


def letter_id_of(message_id: str, handler: str, scope: str | None = None, target: str = "") -> str:
    """The one letter of this message and handler."""
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
    """A new letter; secrets are removed here, before anything is stored."""
    meta = metadata_of(message)
    return DeadLetterEntry(
        letter_id=letter_id_of(meta.message_id, handler, scope, target),
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
        **identity(message, meta),
    )


def identity(message: Message, meta: Metadata) -> dict[str, Any]:
    """What a letter says of its message, beside the fields of the message."""
    cls = type(message)
    return {
        "message_id": meta.message_id,
        "message_type": cls.__wire__.name,
        "version": cls.__wire__.version,
        "kind": "command" if isinstance(message, Command) else "event",
        "correlation_id": meta.correlation_id,
        "causation_id": meta.causation_id,
        "session_id": meta.session_id,
        "topic": meta.topic,
        "headers": meta.headers,
        "origin": _origin(cls),
        "from_system": meta.from_system,
    }


def aware(moment: datetime) -> datetime:
    """The same moment in UTC; one without a zone is taken to be in UTC."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def micros(moment: datetime) -> int:
    """Microseconds since the epoch, exactly."""
    return (aware(moment) - _EPOCH) // timedelta(microseconds=1)


def moment(micros_since_epoch: int) -> datetime:
    """The other way round."""
    return _EPOCH + timedelta(microseconds=micros_since_epoch)


def at(seconds: float) -> datetime:
    """A clock's `time()` as a moment."""
    return datetime.fromtimestamp(seconds, UTC)


# -- messages in and out ---------------------------------------------------------------------


def encoded(message: Message) -> str:
    """The message's fields as JSON, by field name; never raises.

    What JSON cannot hold is written as its type: the letter is kept and can be read, but not
    replayed.
    """
    try:
        return message.model_dump_json(round_trip=True, by_alias=False)
    except Exception:
        try:
            return message.model_dump_json(
                round_trip=True, by_alias=False, fallback=lambda value: f"<{type(value).__name__}>"
            )
        except Exception:
            return "null"


def decoded(letter: DeadLetterEntry) -> Message:
    """A letter's message, made anew.

    Raises:
        UnreadableLetterError: Its class is not imported, or does not take its fields.
    """
    cls = message_class(letter)
    message = validated(letter, cls, todays_payload(letter, cls))
    set_meta(
        message,
        Metadata(
            letter.message_id,
            correlation_id=letter.correlation_id,
            causation_id=letter.causation_id,
            session_id=letter.session_id,
            headers=letter.headers,
            topic=letter.topic,
            fixed=True,
            from_system=letter.from_system,
        ),
    )
    return message


def todays_payload(letter: DeadLetterEntry, cls: type[Message]) -> str:
    """A letter's payload, brought up to the class of today if it has all upcasters for that.

    Raises:
        UnreadableLetterError: An upcaster failed.
    """
    if letter.version >= cls.__wire__.version or missing_upcasters(cls, letter.version):
        return letter.payload
    try:
        return json.dumps(upcast(cls, json.loads(letter.payload), letter.version))
    except Exception as error:  # the border to user code
        raise UnreadableLetterError(
            letter.message_type,
            letter.letter_id,
            f"an upcaster of {cls.__name__} failed on its version {letter.version}: "
            f"{redact_exception(error)}. Mend the upcaster; the letter stays as it is.",
        ) from error


def validated(letter: DeadLetterEntry, cls: type[Message], payload: str) -> Message:
    """A message of this class with these fields, without metadata.

    Raises:
        UnreadableLetterError: The class does not take the fields.
    """
    if _MASK in payload:
        raise UnreadableLetterError(
            letter.message_type,
            letter.letter_id,
            "one of its fields is a secret, which is never stored. If it may be, give the field "
            "a serializer (@field_serializer) that writes its value; else send the message anew.",
        )
    try:
        return cls.model_validate_json(payload, by_name=True, by_alias=False)
    except ValidationError as error:
        raise UnreadableLetterError(
            letter.message_type,
            letter.letter_id,
            f"it was stored in version {letter.version}, and {cls.__name__} (now version "
            f"{cls.__wire__.version}) does not take its fields: {redact_exception(error)}. "
            f"Give the fields it wants with dead_letters.edit(letter, field=...), or discard it; "
            f"letter.payload has what was stored.",
        ) from error
    except Exception as error:  # the border to user code: a validator may raise anything
        raise UnreadableLetterError(
            letter.message_type,
            letter.letter_id,
            f"a validator of {cls.__name__} failed on it: {redact_exception(error)}. The letter "
            f"stays as it is.",
        ) from error


def message_class(letter: DeadLetterEntry) -> type[Message]:
    """The imported class of a letter's message.

    Raises:
        UnreadableLetterError: No imported class has this wire name, or several have it.
    """
    found = [cls for cls in message_classes() if cls.__wire__.name == letter.message_type]
    exact = [cls for cls in found if _origin(cls) == letter.origin]
    if exact:
        return exact[-1]
    found = [cls for cls in found if cls.__wire__.version == letter.version] or found
    if len(found) == 1:
        return found[0]
    if not found:
        where = f" It was defined in {letter.origin.partition(':')[0]}." if letter.origin else ""
        fix = f"no class of this name is imported. Import the module that defines it.{where}"
    else:
        names = ", ".join(_origin(cls) for cls in found)
        fix = f"several classes have this name: {names}. Give each its own: name=..."
    raise UnreadableLetterError(letter.message_type, letter.letter_id, fix)


def message_classes(base: type[Message] = Message) -> Iterator[type[Message]]:
    """All imported classes below `base`, each once; those that were defined last come last."""
    seen: set[type[Message]] = set()
    pending = [base]
    while pending:
        for cls in pending.pop(0).__subclasses__():
            if cls not in seen:
                seen.add(cls)
                pending.append(cls)
                yield cls


def wire_names(wanted: type[Message] | str) -> set[str]:
    """The wire names that are meant by a name, or by a class and those below it."""
    if isinstance(wanted, str):
        return {wanted}
    return {wanted.__wire__.name, *(cls.__wire__.name for cls in message_classes(wanted))}


def merged(payload: str, changes: Mapping[str, Any]) -> str:
    """A payload with changed fields, as JSON."""
    from pydantic_core import to_jsonable_python

    stored: object = json.loads(payload)
    data = cast("dict[str, Any]", stored) if isinstance(stored, dict) else {}
    return json.dumps({**data, **to_jsonable_python(dict(changes), round_trip=True)})


def _origin(cls: type[Message]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
