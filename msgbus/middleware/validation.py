"""A second look at messages that may have been built without one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast, final

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails

from msgbus.errors import ConfigurationError
from msgbus.messages.message import Message
from msgbus.middleware.chain import CallNext
from msgbus.middleware.delivery import messages_in

Check: TypeAlias = Callable[[Any], object]
"""Takes a message and raises if it is wrong; may be async. What it returns is ignored."""


@final
class ValidationMiddleware:
    """Validates every message once more before it is handled, then runs your own checks.

    pydantic checks a message when it is made, unless it is made by `model_construct` or
    `model_copy(update=...)`, which check nothing. This fails such a message with pydantic's
    `ValidationError` if its class would not have taken its fields as they are; `"5"` is no
    `int` here, as nothing is converted: the handler gets the same object.

    Validators of the class run again, on values they have already seen. A nested model is
    taken as valid if it is of the right class, unless that class says
    `revalidate_instances="always"`.

    In a list for a batch handler every event is checked, and a wrong one fails the list;
    the bus then hands over the events one by one, so that only the wrong ones are lost.

    Args:
        validators: Your checks, by message class; subclasses are checked too. All that
            apply run, in the order given.

    Raises:
        ConfigurationError: A key is no message class, or a value cannot be called.
    """

    batch: Final = True

    def __init__(self, *, validators: Mapping[type[Message], Check] | None = None) -> None:
        self._validators = dict(validators or {})
        for message_type, check in self._validators.items():
            _require_usable(message_type, check)
        self._by_type: dict[type[Message], tuple[Check, ...]] = {}

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        """Call on, if the message is valid.

        Raises:
            ValidationError: Its class would not have taken these values.
        """
        for one in messages_in(message):
            _revalidate(one)
            for check in self._checks_of(type(one)):
                pending = check(one)
                if inspect.isawaitable(pending):
                    await pending
        return await call_next(message)

    def _checks_of(self, message_type: type[Message]) -> tuple[Check, ...]:
        checks = self._by_type.get(message_type)
        if checks is None:
            checks = self._by_type[message_type] = tuple(
                check for cls, check in self._validators.items() if issubclass(message_type, cls)
            )
        return checks


def _require_usable(message_type: object, check: object) -> None:
    if not (isinstance(message_type, type) and issubclass(message_type, Message)):
        message = f"validators= takes message classes as keys, not {message_type!r}."
        raise ConfigurationError(message)
    if not callable(check):
        message = f"The validator of {message_type.__name__} is {check!r}, which cannot be called."
        raise ConfigurationError(message)


def _revalidate(message: Message) -> None:
    cls, given = type(message), _given(message)
    try:
        again = cls.model_validate(given, strict=True, by_alias=False, by_name=True)
    except ValidationError:
        if not _keeps_values(cls, given):
            raise
        return
    faults = [
        fault
        for name, value in given.items()
        for fault in _unbuilt(value, getattr(again, name), (name,))
    ]
    if faults:
        raise ValidationError.from_exception_data(cls.__name__, faults, hide_input=True)


def _given(message: Message) -> dict[str, Any]:
    """The values that somebody gave; a default is what its class says, and not checked."""
    values: dict[str, Any] = dict(message.model_extra or {})
    for name, field in type(message).model_fields.items():
        if name in message.__dict__ and (name in message.model_fields_set or field.is_required()):
            values[name] = message.__dict__[name]
    return values


def _keeps_values(message_type: type[Message], given: dict[str, Any]) -> bool:
    """Whether the class takes the values without converting any.

    Strictness alone would be too strict: with `use_enum_values` a field holds a plain value
    that only the lax mode takes.
    """
    try:
        again = message_type.model_validate(given, by_alias=False, by_name=True)
    except ValidationError:
        return False
    return all(
        type(value) is type(getattr(again, name)) and value == getattr(again, name)
        for name, value in given.items()
    )


def _unbuilt(given: Any, again: Any, path: tuple[int | str, ...]) -> Iterator[InitErrorDetails]:
    """Dictionaries that stand where a model should: the one thing strictness converts."""
    if isinstance(again, BaseModel) and not isinstance(given, BaseModel):
        name = type(again).__name__
        yield {"type": "model_type", "loc": path, "input": given, "ctx": {"class_name": name}}
    elif given is again:
        return
    elif isinstance(given, dict) and isinstance(again, dict):
        values = cast("Mapping[Any, Any]", given)
        built = cast("Mapping[Any, Any]", again)
        for key in values.keys() & built.keys():
            yield from _unbuilt(values[key], built[key], (*path, str(key)))
    elif isinstance(given, list | tuple) and isinstance(again, list | tuple):
        pairs = zip(cast("Sequence[Any]", given), cast("Sequence[Any]", again), strict=False)
        for place, (one, built_one) in enumerate(pairs):
            yield from _unbuilt(one, built_one, (*path, place))
