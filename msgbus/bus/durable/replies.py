"""Replies of enqueued commands: written as JSON, and read back as what the command promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, final

from pydantic import ConfigDict, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import ValidationError, from_json

from msgbus.errors import ConfigurationError, StoredMessageError
from msgbus.journal.examination import examine
from msgbus.journal.payloads import PayloadWriter
from msgbus.messages.message import Command
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.messages.message import Message

# As for messages: JSON has neither infinity nor bytes.
_CONFIG: Final = ConfigDict(
    ser_json_inf_nan="strings", ser_json_bytes="base64", val_json_bytes="base64"
)


@final
class Replies:
    """How the reply of each command class is written and read; found out once."""

    def __init__(self) -> None:
        self._writers: dict[type[Message], PayloadWriter] = {}

    def writer(self, command_type: type[Message]) -> PayloadWriter:
        """What writes and reads replies of this class.

        Raises:
            ConfigurationError: Its type of reply has no JSON.
        """
        writer = self._writers.get(command_type)
        if writer is None:
            adapter = _adapter(command_type)
            examination = examine(adapter.core_schema, cast("dict[str, Any]", _CONFIG))
            writer = PayloadWriter(adapter.serializer, adapter.validator, examination)
            self._writers[command_type] = writer
        return writer

    def dump(self, command_type: type[Message], value: object) -> bytes:
        """The reply as JSON.

        Raises:
            StoredMessageError: It is not what the class promises, or would not come back.
        """
        try:
            return self.writer(command_type).write(value)
        except StoredMessageError as error:
            message = (
                f"{command_type.__name__} was handled, but its reply cannot be kept: {error} "
                f"Return what Command[...] says it replies."
            )
            raise StoredMessageError(message, field=error.field) from error.__cause__

    def load(self, command_type: type[Message] | None, reply: bytes | None) -> Any:
        """The reply; as plain data if this process does not have the class.

        Raises:
            StoredMessageError: It does not fit the class.
        """
        if reply is None:
            return None
        if command_type is None:
            return from_json(reply)
        try:
            return self.writer(command_type).read(reply)
        except ValidationError as error:
            message = (
                f"The reply of {command_type.__name__} is not what the class promises now: "
                f"{redact_exception(error)}"
            )
            raise StoredMessageError(message) from error


def _adapter(command_type: type[Message]) -> TypeAdapter[Any]:
    reply = reply_type(command_type)
    try:
        try:
            return TypeAdapter(reply, config=_CONFIG)
        except PydanticUserError as error:
            if error.code != "type-adapter-config-unused":
                raise
            return TypeAdapter(reply)  # a model has a config of its own
    except PydanticUserError as error:
        message = (
            f"{command_type.__name__} cannot be enqueued: its reply, {reply!r}, has no JSON form. "
            f"Use a type that pydantic knows in Command[...]."
        )
        raise ConfigurationError(message) from error


def reply_type(command_type: type[Message]) -> Any:
    """`R` of a `Command[R]`; anything if the class does not say."""
    known: dict[Any, Any] = {}
    for cls in command_type.__mro__:
        about: dict[str, Any] = cls.__dict__.get("__pydantic_generic_metadata__", {})
        origin: Any = about.get("origin")
        if origin is None:
            continue
        arguments = [_filled_in(argument, known) for argument in about["args"]]
        if origin is Command:
            return arguments[0]
        parameters = origin.__pydantic_generic_metadata__["parameters"]
        known.update(zip(parameters, arguments, strict=False))
    return Any


def _filled_in(argument: Any, known: dict[Any, Any]) -> Any:
    if isinstance(argument, TypeVar):
        return known.get(argument, Any)
    parameters = getattr(argument, "__parameters__", ())
    if not parameters or isinstance(argument, type):
        return argument
    return argument[tuple(known.get(parameter, Any) for parameter in parameters)]
