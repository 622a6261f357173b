"""`DeadLetterEntry`: a message that one handler could not handle, and why; made and read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final, Literal, cast, final

from pydantic import ValidationError

from msgbus.errors import DeadLetterError, LetterEditError, UnreadableLetterError
from msgbus.messages.message import Command, Message, metadata_of, set_meta
from msgbus.messages.metadata import NO_HEADERS, Metadata
from msgbus.messages.upcasting import missing_upcasters, upcast
from msgbus.resilience.dead_letters.altered import altered_field, marked, remove_mark
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

    def stored_payload(self) -> str:
        """Return the payload for a store; it says which field would not come back as it was."""
        return self.payload if self._message is None else marked(self._message, self.payload)

    def data(self) -> dict[str, Any]:
        """Return the letter as plain values, ready for JSON; `from_data` reads them."""
        found = {name: getattr(self, name) for name in FIELDS}
        found["payload"] = self.stored_payload()
        found["first_attempt"] = self.first_attempt.isoformat()
        found["last_attempt"] = self.last_attempt.isoformat()
        found["headers"] = dict(self.headers)
        found["status"] = self.status.value
        return found


FIELDS: Final = {
    one.name: str(one.type) for one in fields(DeadLetterEntry) if one.name != "_message"
}
"""What is written to files, by name; with its type."""


def letter_id_of(message_id: str, handler: str, scope: str | None = None, target: str = "") -> str:
    """Return the id of the one letter of this message and handler."""
    identity = json.dumps([scope, handler, target])
    return f"{message_id}-{blake2b(identity.encode(), digest_size=6).hexdigest()}"


def moment(given: datetime | float) -> datetime:
    """Return a time in UTC, to the microsecond: a clock's `time()`, or a datetime."""
    if not isinstance(given, datetime):
        return datetime.fromtimestamp(round(given, 6), UTC)
    return given.replace(tzinfo=UTC) if given.tzinfo is None else given.astimezone(UTC)


# -- letters of messages -----------------------------------------------------------------------

_MASK: Final = '"**********"'  # what pydantic writes for a secret


def letter_about(
    message: Message,
    *,
    handler: str,
    error: BaseException,
    attempts: int,
    first_attempt: datetime | float,
    last_attempt: datetime | float,
    reason: str,
    answered: bool = False,
    scope: str | None = None,
    target: str = "",
) -> DeadLetterEntry:
    """Make a new letter; secrets are removed here, before anything is stored."""
    about = _described(message)
    return DeadLetterEntry(
        letter_id=letter_id_of(about["message_id"], handler, scope, target),
        handler=handler,
        scope=scope,
        target=target,
        error=redact_exception(error),
        error_type=type(error).__name__,
        traceback=redacted_traceback(error),
        attempts=attempts,
        first_attempt=moment(first_attempt),
        last_attempt=moment(last_attempt),
        reason=redact(reason),
        answered=answered,
        **about,
    )


def _described(message: Message) -> dict[str, Any]:
    """Return what a letter says of its message."""
    cls, meta = type(message), metadata_of(message)
    message_id, correlation_id, root_id = meta.ids()
    try:
        key = message.key
    except Exception:  # the border to user code: the letter matters more
        key = None
    return {
        "message_id": message_id,
        "message_type": cls.__wire__.name,
        "version": cls.__wire__.version,
        "kind": "command" if issubclass(type(message), Command) else "event",
        "payload": _encoded(message),
        "correlation_id": correlation_id,
        "causation_id": meta.causation_id,
        "session_id": meta.session_id,
        "topic": meta.topic,
        "headers": meta.headers,
        "origin": _origin(cls),
        "from_system": meta.from_system,
        "key": key,
        "offset": 0 if meta.recorded is None else meta.recorded[0],
        "root_id": root_id,
        "depth": meta.depth,
        "_message": message,
    }


def _encoded(message: Message) -> str:
    """Return the message's fields as JSON, by field name; never raises.

    What JSON cannot hold is written as its type: such a letter can be read, but not replayed.
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


def edited_letter(old: DeadLetterEntry, changes: Mapping[str, Any]) -> DeadLetterEntry:
    """Make the letter that stands in for `old`: for the same handler, with a changed message.

    The new message has an id of its own, and the old one as its cause.

    Raises:
        LetterEditError: The message would not be valid.
        UnreadableLetterError: The message's class is not imported.
    """
    cls = message_class(old)
    known = ", ".join(cls.model_fields) or "none"
    unknown = sorted(set(changes) - set(cls.model_fields))
    if unknown or not changes:
        what = f"has no {', '.join(unknown)}" if unknown else "was given nothing to change"
        raise LetterEditError(f"{cls.__name__} {what}. Its fields are: {known}.", fields=unknown)
    try:
        payload = _merged(_todays_payload(old, cls), changes)
        _require_as_sent(old, payload)
        message = cls.model_validate_json(payload, by_name=True, by_alias=False)
    except ValueError as error:
        names = sorted(changes)
        if isinstance(error, ValidationError):
            faults = error.errors(include_url=False, include_input=False)
            names = sorted({str(fault["loc"][0]) for fault in faults if fault["loc"]})
        text = f"{old.message_type} cannot be changed so: {redact_exception(error)}."
        raise LetterEditError(text, fields=names) from error
    _set_metadata(message, old, None, old.message_id, old.depth + 1)
    about = _described(message)
    return replace(
        old,
        letter_id=letter_id_of(about["message_id"], old.handler, old.scope, old.target),
        attempts=0,
        replays=0,
        reason=f"edited from {old.letter_id}",
        status=LetterStatus.DEAD,
        note=None,
        subscription="",
        **about,
    )


def _merged(payload: str, changes: Mapping[str, Any]) -> str:
    from pydantic_core import to_jsonable_python

    stored: object = json.loads(payload)
    data = cast("dict[str, Any]", stored) if isinstance(stored, dict) else {}
    remove_mark(data, changes)
    return json.dumps({**data, **to_jsonable_python(dict(changes), round_trip=True)})


# -- messages of letters -----------------------------------------------------------------------


def decoded(letter: DeadLetterEntry) -> Message:
    """Make a letter's message anew.

    Raises:
        UnreadableLetterError: Its class is not imported, or does not take its fields.
    """
    cls = message_class(letter)
    message = _validated(letter, cls, _todays_payload(letter, cls))
    _set_metadata(message, letter, letter.message_id, letter.causation_id, letter.depth)
    return message


def _set_metadata(
    message: Message,
    letter: DeadLetterEntry,
    message_id: str | None,
    cause: str | None,
    depth: int,
) -> None:
    meta = Metadata(
        message_id,
        correlation_id=letter.correlation_id,
        causation_id=cause,
        session_id=letter.session_id,
        headers=letter.headers,
        topic=letter.topic,
        fixed=True,
        from_system=letter.from_system,
        root_id=letter.root_id or None,
        depth=depth,
    )
    set_meta(message, meta)


def _todays_payload(letter: DeadLetterEntry, cls: type[Message]) -> str:
    """Bring a payload up to the class of today, if it has all upcasters for that."""
    if letter.version >= cls.__wire__.version or missing_upcasters(cls, letter.version):
        return letter.payload
    try:
        return json.dumps(upcast(cls, json.loads(letter.payload), letter.version))
    except Exception as error:  # the border to user code
        problem = (
            f"an upcaster of {cls.__name__} failed on its version {letter.version}: "
            f"{redact_exception(error)}. Mend the upcaster; the letter stays as it is."
        )
        raise UnreadableLetterError(letter.message_type, letter.letter_id, problem) from error


def _validated(letter: DeadLetterEntry, cls: type[Message], payload: str) -> Message:
    if _MASK in payload:
        problem = (
            "one of its fields is a secret, which is never stored. If it may be, give the field "
            "a serializer (@field_serializer) that writes its value; else send the message anew."
        )
        raise UnreadableLetterError(letter.message_type, letter.letter_id, problem)
    _require_as_sent(letter, payload)
    try:
        return cls.model_validate_json(payload, by_name=True, by_alias=False)
    except Exception as error:  # the border to user code: a validator may raise anything
        problem = (
            f"a validator of {cls.__name__} failed on it: {redact_exception(error)}. The letter "
            f"stays as it is."
        )
        if isinstance(error, ValidationError):
            problem = (
                f"it was stored in version {letter.version}, and {cls.__name__} (now version "
                f"{cls.__wire__.version}) does not take its fields: {redact_exception(error)}. "
                f"Give the fields it wants with dead_letters.edit(letter, field=...), or discard "
                f"it; letter.payload has what was stored."
            )
        raise UnreadableLetterError(letter.message_type, letter.letter_id, problem) from error


def _require_as_sent(letter: DeadLetterEntry, payload: str) -> None:
    field = altered_field(payload)
    if field is not None:
        problem = (
            f"its {field} is not stored as it was sent. Give that field with "
            f"dead_letters.edit(letter, field=...), or send the message anew."
        )
        raise UnreadableLetterError(letter.message_type, letter.letter_id, problem)


def message_class(letter: DeadLetterEntry) -> type[Message]:
    """Return the imported class of a letter's message.

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
    """Iterate over all imported classes below `base`, each once, the last defined last."""
    seen: set[type[Message]] = set()
    pending = [base]
    while pending:
        for cls in pending.pop(0).__subclasses__():
            if cls not in seen:
                seen.add(cls)
                pending.append(cls)
                yield cls


def wire_names(wanted: type[Message] | str) -> set[str]:
    """Return the wire names meant by a name, or by a class and those below it."""
    if isinstance(wanted, str):
        return {wanted}
    return {wanted.__wire__.name, *(cls.__wire__.name for cls in message_classes(wanted))}


def _origin(cls: type[Message]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


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
            values[name] = moment(datetime.fromisoformat(values[name]))
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


_CHECKS_BY_TYPE: Final[dict[str, tuple[Callable[[object], bool], str]]] = {
    "str": (_is_text, "text"),
    "str | None": (_is_text_or_none, "text or null"),
    "int": (_is_count, "a whole number, 0 or more"),
    "bool": (lambda value: type(value) is bool, "true or false"),
    "Literal['command', 'event']": (
        lambda value: value in ("command", "event"),
        '"command" or "event"',
    ),
    "Mapping[str, str]": (_are_headers, "texts by name"),
}
_CHECKS: Final = {
    name: _CHECKS_BY_TYPE[kind]
    for name, kind in FIELDS.items()
    if kind not in ("datetime", "LetterStatus")  # their own constructors check them
}
"""Checks of the values of a letter that came from a file, by field."""
