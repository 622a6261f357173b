"""Checks of what is registered: each raises where the value was given, not when it is used."""

from __future__ import annotations

from msgbus.errors import ConfigurationError
from msgbus.routing.categories import MessageCategory


def require_id(what: str, value: object) -> None:
    """Raise unless `value` can be an id or a name.

    Raises:
        ConfigurationError: It is empty, blank, or no text.
    """
    if not isinstance(value, str) or not value.strip():
        message = f"{what} must be text that is not blank, not {value!r:.80}."
        raise ConfigurationError(message)


def require_category(what: str, value: object) -> None:
    """Raise unless `value` is a category.

    Raises:
        ConfigurationError: It is text, another enum, or anything else.
    """
    if not isinstance(value, MessageCategory):
        raise ConfigurationError(not_a_category(what, value))


def not_a_category(what: str, value: object) -> str:
    """Says that `value`, given as the category of `what`, is none."""
    names = ", ".join(f"MessageCategory.{one}" for one in MessageCategory.__members__)
    return f"category={value!r:.80} of {what} is not a MessageCategory. Give one of: {names}."


def require_priority(what: str, value: object) -> None:
    """Raise unless `value` is a whole number.

    Raises:
        ConfigurationError: It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        message = f"priority={value!r:.80} of {what} must be a whole number."
        raise ConfigurationError(message)


def require_timeout(what: str, value: object) -> None:
    """Raise unless `value` is a number of seconds above 0, or `None`.

    Raises:
        ConfigurationError: It is not.
    """
    if value is None or (isinstance(value, int | float) and value > 0):
        return
    message = f"timeout={value!r:.80} of {what} must be a number of seconds above 0."
    raise ConfigurationError(message)
