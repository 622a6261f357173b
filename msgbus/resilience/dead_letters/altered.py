"""The mark in the payload of a letter whose message would not come back as it was sent."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Final, cast

from msgbus.journal.differences import difference
from msgbus.messages.message import Message

_MARK: Final = "msgbus:altered"
"""Key of the field's path; no field can have such a name."""


def marked(message: Message, payload: str) -> str:
    """Return the payload, with a mark if it would be read as another message."""
    try:
        read = type(message).model_validate_json(payload, by_name=True, by_alias=False)
    except Exception:  # the border to user code; such a letter is refused when it is read
        return payload
    found = difference(message, read)
    if found is None or not payload.startswith("{"):
        return payload
    rest = payload[1:] if payload == "{}" else f",{payload[1:]}"
    return f'{{"{_MARK}":{json.dumps(found.field)}{rest}'


def altered_field(payload: str) -> str | None:
    """Return the path of the field that is marked, if there is one."""
    data: object = json.loads(payload) if _MARK in payload else None
    fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
    return fields.get(_MARK)


def remove_mark(data: dict[str, Any], given: Collection[str]) -> None:
    """Remove the mark if the field is among those that are given anew."""
    field = str(data.get(_MARK, ""))
    if field.replace("[", ".").partition(".")[0] in given:
        del data[_MARK]
