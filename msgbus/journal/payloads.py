"""Writing of messages and replies as JSON, so that what is stored is what was sent."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, final
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from msgbus.errors import StoredMessageError
from msgbus.journal.differences import Difference, difference
from msgbus.journal.examination import LONGEST, Care, TypeExamination, examine_message
from msgbus.messages.message import Message
from msgbus.telemetry.redaction import redact, redact_exception

if TYPE_CHECKING:
    from pydantic.plugin._schema_validator import PluggableSchemaValidator
    from pydantic_core import SchemaSerializer, SchemaValidator


@final
class PayloadWriter:
    """Writes values of one type as JSON, and reads them."""

    __slots__ = (
        "_has_moments",
        "_is_compared",
        "_is_fixed",
        "_to_json",
        "_validator",
        "examination",
    )

    def __init__(
        self,
        serializer: SchemaSerializer,
        validator: SchemaValidator | PluggableSchemaValidator,
        examination: TypeExamination,
    ) -> None:
        self.examination = examination
        self._is_fixed = examination.is_fixed
        self._has_moments = bool(examination.datetimes)
        self._is_compared = examination.care is Care.COMPARE
        self._to_json = serializer.to_json
        self._validator = validator

    def write(self, value: Any, *, is_valid: bool = False) -> bytes:
        """Return the value as JSON, by field name.

        Args:
            value: What to write.
            is_valid: Its type has made it, and so has checked all that cannot change since.

        Raises:
            StoredMessageError: It is no JSON, or would not be read back as it is.
        """
        if self._is_compared:
            return self._write_and_compare(value)
        is_trusted = is_valid and self._is_fixed
        try:
            # round_trip: without computed fields, which the class would refuse on reading.
            if is_trusted:
                payload = self._to_json(value, round_trip=True, by_alias=False, warnings=False)
                if not self._has_moments and len(payload) <= LONGEST:
                    return payload
                care = self.examination.of_trusted(value, payload)
            else:
                payload = self._to_json(value, round_trip=True, by_alias=False, warnings="error")
                care = self.examination.of_payload(value, payload)
        except ValueError:
            return self._write_and_compare(value)  # it may be equal to what is read
        if care:
            self._check(value, payload, care)
        return payload

    def read(self, payload: bytes) -> Any:
        """Return the value of what was written.

        Raises:
            ValidationError: It does not fit the type.
        """
        # By field name, as it was written, whatever aliases the class has.
        return self._validator.validate_json(payload, by_alias=False, by_name=True)

    def _write_and_compare(self, value: Any) -> bytes:
        try:
            payload = self._to_json(value, round_trip=True, by_alias=False, warnings=False)
        except ValueError as error:
            field = self._unwritable(value)
            text = f"{_named(field)}cannot be written as JSON: {redact_exception(error)}."
            raise StoredMessageError(text + _cure(error), field=field) from error
        self._check(value, payload, Care.COMPARE)
        return payload

    def _check(self, value: Any, payload: bytes, care: Care) -> None:
        try:
            read = self.read(payload)
        except Exception as error:  # the border to user code: validators
            raise self._unreadable(value, error) from error
        found = None if care is Care.READ else difference(value, read)
        if found is not None:
            raise StoredMessageError(_explain(found), field=found.field or None)

    def _unreadable(self, value: Any, error: Exception) -> StoredMessageError:
        field, cure = None, _UNVALIDATED
        if isinstance(error, ValidationError):
            fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
            field = _path(fault["loc"]) or None
            if fault["type"] == "json_invalid":
                field = self._unwritable(value)
                cure = " Send fewer levels, or a long number as text."
        text = f"{_named(field)}could not be read back: {redact_exception(error)}.{cure}"
        return StoredMessageError(text, field=field)

    def _unwritable(self, value: Any) -> str | None:
        """Return the field of a model that is no JSON which can be read."""
        if not isinstance(value, BaseModel):
            return None
        for name in type(value).__pydantic_fields__:
            try:
                from_json(
                    self._to_json(
                        value, round_trip=True, by_alias=False, warnings=False, include={name}
                    )
                )
            except ValueError:
                return name
        return None


_UNVALIDATED: Final = (
    " Send what its class takes: model_construct, model_copy(update=...) and changes in place are "
    "not validated."
)

_lock: Final = Lock()
_writers: Final = WeakKeyDictionary[type[Message], PayloadWriter]()


def writer_of(message_type: type[Message]) -> PayloadWriter:
    """Return what writes messages of a class, which is examined the first time."""
    with _lock:
        writer = _writers.get(message_type)
        if writer is None:
            writer = _writers[message_type] = PayloadWriter(
                message_type.__pydantic_serializer__,
                message_type.__pydantic_validator__,
                examine_message(message_type.__pydantic_core_schema__),
            )
    return writer


def _named(field: str | None) -> str:
    return "it " if field is None else f"{redact(field)} "


def _path(location: Iterable[str | int]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return "".join(steps).removeprefix(".")


def _cure(error: ValueError) -> str:
    text = str(error)
    if "surrogates" in text:
        return " Text with half a character is in no file: repair it, or send it as bytes."
    if "utf-8" in text:
        return (
            " For bytes that are no text, set ser_json_bytes and val_json_bytes to 'base64' in "
            "its model_config."
        )
    return ""


def _explain(found: Difference) -> str:
    sent, read = type(found.sent).__name__, type(found.read).__name__
    what = f"{_named(found.field or None)}would not come back as it was sent"
    if sent == read:
        return (
            f"{what}, but with another value. Leave nothing of it out, and let its serializer and "
            f"its validator undo each other."
        )
    if isinstance(found.sent, type(found.read)):
        return (
            f"{what}: a {sent} is written as a {read}, without what it has beyond that. Annotate "
            f"the field with all classes that it may hold: {read} | {sent}."
        )
    return (
        f"{what}: a {sent} goes in, and a {read} comes out. Annotate the field with the type that "
        f"it holds, or give it a serializer and a validator that undo each other."
    )
