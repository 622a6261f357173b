"""Changing the message of a dead letter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from msgbus.errors import LetterEditError
from msgbus.messages.message import Message, metadata_of, set_meta
from msgbus.messages.metadata import Metadata
from msgbus.resilience.letters import (
    DeadLetterEntry,
    LetterStatus,
    encoded,
    identity,
    letter_id_of,
    merged,
    message_class,
    todays_payload,
)
from msgbus.telemetry.redaction import redact_exception


def changed_letter(old: DeadLetterEntry, changes: Mapping[str, Any]) -> DeadLetterEntry:
    """The letter that stands in for `old`: for the same handler, with a changed message.

    Raises:
        LetterEditError: The message would not be valid.
        UnreadableLetterError: The message's class is not imported.
    """
    message = _changed(old, changes)
    meta = metadata_of(message)
    return replace(
        old,
        letter_id=letter_id_of(meta.message_id, old.handler, old.scope, old.target),
        payload=encoded(message),
        attempts=0,
        replays=0,
        reason=f"edited from {old.letter_id}",
        status=LetterStatus.DEAD,
        note=None,
        _message=message,
        **identity(message, meta),
    )


def _changed(letter: DeadLetterEntry, changes: Mapping[str, Any]) -> Message:
    """The letter's message with other values, as a new message that the old one caused."""
    cls = message_class(letter)
    known = ", ".join(cls.model_fields) or "none"
    unknown = sorted(set(changes) - set(cls.model_fields))
    if unknown or not changes:
        what = f"has no {', '.join(unknown)}" if unknown else "was given nothing to change"
        raise LetterEditError(f"{cls.__name__} {what}. Its fields are: {known}.", fields=unknown)
    try:
        message = cls.model_validate_json(
            merged(todays_payload(letter, cls), changes), by_name=True, by_alias=False
        )
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        fields = sorted({str(fault["loc"][0]) for fault in faults if fault["loc"]})
        raise LetterEditError(
            f"{letter.message_type} cannot be changed so: {redact_exception(error)}.", fields=fields
        ) from error
    except ValueError as error:
        raise LetterEditError(
            f"{letter.message_type} cannot be changed so: {redact_exception(error)}.",
            fields=sorted(changes),
        ) from error
    meta = Metadata(
        correlation_id=letter.correlation_id,
        causation_id=letter.message_id,
        session_id=letter.session_id,
        headers=letter.headers,
        topic=letter.topic,
        fixed=True,
        from_system=letter.from_system,
    )
    set_meta(message, meta)
    return message
