"""Messages of dead letters: to JSON and back, found by wire name, and changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from pydantic import ValidationError

from msgbus.errors import LetterEditError, UnreadableLetterError
from msgbus.messages.message import Command, Message, metadata_of, set_meta
from msgbus.messages.metadata import Metadata
from msgbus.messages.upcasting import missing_upcasters, upcast
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.resilience.dead_letters.entry import DeadLetterEntry

_MASK: Final = '"**********"'  # what pydantic writes for a secret


def encoded(message: Message) -> str:
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


def described(message: Message) -> dict[str, Any]:
    """Return what a letter says of its message, beside the fields of the message."""
    cls, meta, key = type(message), metadata_of(message), _key(message)
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
        "key": key,
        "offset": 0 if meta.recorded is None else meta.recorded[0],
        "root_id": meta.root_id,
        "depth": meta.depth,
    }


def _key(message: Message) -> str | None:
    try:
        return message.key
    except Exception:  # the border to user code: the letter matters more
        return None


def decoded(letter: DeadLetterEntry) -> Message:
    """Make a letter's message anew.

    Raises:
        UnreadableLetterError: Its class is not imported, or does not take its fields.
    """
    cls = message_class(letter)
    message = _validated(letter, cls, _todays_payload(letter, cls))
    set_meta(message, _metadata(letter, letter.message_id, letter.causation_id))
    return message


def changed(letter: DeadLetterEntry, changes: Mapping[str, Any]) -> Message:
    """Make the letter's message with other values, as a new message that the old one caused.

    Raises:
        LetterEditError: The message would not be valid.
        UnreadableLetterError: The message's class is not imported.
    """
    cls = message_class(letter)
    known = ", ".join(cls.model_fields) or "none"
    unknown = sorted(set(changes) - set(cls.model_fields))
    if unknown or not changes:
        what = f"has no {', '.join(unknown)}" if unknown else "was given nothing to change"
        raise LetterEditError(f"{cls.__name__} {what}. Its fields are: {known}.", fields=unknown)
    try:
        payload = _merged(_todays_payload(letter, cls), changes)
        message = cls.model_validate_json(payload, by_name=True, by_alias=False)
    except ValueError as error:
        names = sorted(changes)
        if isinstance(error, ValidationError):
            faults = error.errors(include_url=False, include_input=False)
            names = sorted({str(fault["loc"][0]) for fault in faults if fault["loc"]})
        text = f"{letter.message_type} cannot be changed so: {redact_exception(error)}."
        raise LetterEditError(text, fields=names) from error
    set_meta(message, _metadata(letter, None, letter.message_id, letter.depth + 1))
    return message


def _metadata(
    letter: DeadLetterEntry, message_id: str | None, cause: str | None, depth: int | None = None
) -> Metadata:
    return Metadata(
        message_id,
        correlation_id=letter.correlation_id,
        causation_id=cause,
        session_id=letter.session_id,
        headers=letter.headers,
        topic=letter.topic,
        fixed=True,
        from_system=letter.from_system,
        root_id=letter.root_id or None,
        depth=letter.depth if depth is None else depth,
    )


def _merged(payload: str, changes: Mapping[str, Any]) -> str:
    from pydantic_core import to_jsonable_python

    stored: object = json.loads(payload)
    data = cast("dict[str, Any]", stored) if isinstance(stored, dict) else {}
    return json.dumps({**data, **to_jsonable_python(dict(changes), round_trip=True)})


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
