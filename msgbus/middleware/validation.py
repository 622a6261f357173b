"""Validation of messages before they are handled."""

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
"""Takes a message and raises if it is invalid; may be async. The return value is ignored."""


@final
class ValidationMiddleware:
    """Validate every message again before it is handled, then run your own checks.

    pydantic validates a message when it is made, but not one made by `model_construct` or
    `model_copy(update=...)`. This fails such a message with pydantic's `ValidationError` if
    its class would not accept its fields as they are; `"5"` is not an `int` here, as nothing
    is converted: the handler gets the same object.

    Validators of the class run again, on values they have already seen. A nested model is
    valid if it is of the right class, unless that class has
    `revalidate_instances="always"`.

    In a list for a batch handler every event is checked, and an invalid one fails the list;
    the bus then delivers the events one by one, so that only the invalid ones fail.

    Args:
        validators: Your checks by message class; subclasses are checked too. All that
            apply run, in the order given.

    Raises:
        ConfigurationError: A key is not a message class, or a value is not callable.
    """

    batch: Final = True

    def __init__(self, *, validators: Mapping[type[Message], Check] | None = None) -> None:
        self._validators = dict(validators or {})
        for message_type, check in self._validators.items():
            _require_usable(message_type, check)
        self._by_type: dict[type[Message], tuple[Check, ...]] = {}

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        """Call the handler if the message is valid.

        Raises:
            ValidationError: Its class does not accept these values.
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
    """The values that were given; defaults are not checked."""
    values: dict[str, Any] = dict(message.model_extra or {})
    for name, field in type(message).model_fields.items():
        if name in message.__dict__ and (name in message.model_fields_set or field.is_required()):
            values[name] = message.__dict__[name]
    return values


def _keeps_values(message_type: type[Message], given: dict[str, Any]) -> bool:
    """Whether the class accepts the values without converting any.

    Strict mode alone is too strict: with `use_enum_values` a field holds a plain value that
    only the lax mode accepts.
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
    """Find dicts in place of models: the one thing that strict mode converts."""
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
        for index, (one, built_one) in enumerate(pairs):
            yield from _unbuilt(one, built_one, (*path, index))
