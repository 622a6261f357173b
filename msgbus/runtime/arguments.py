"""Argument checks: option names, seconds, members of a protocol. Errors name the fix."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final, cast

from pydantic import BaseModel, ConfigDict, model_validator
from typing_extensions import get_protocol_members

from msgbus.errors import ConfigurationError

_NAMED: Final = 5
"""Missing members that an error lists; the others are counted."""


class Options(BaseModel):
    """Base of all configuration: frozen, and unknown options are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict):
            refuse_unknown(cls.__name__, cast("dict[str, Any]", given), cls.model_fields)
        return cast("Any", given)


def refuse_unknown(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise on an unknown option.

    Raises:
        ConfigurationError: With the nearest known option, else with all.
    """
    for name in given:
        if name in known:
            continue
        from difflib import get_close_matches  # only on an error

        near = get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(sorted(known))}."
        message = f"{what} has no option {name!r}. {hint}"
        raise ConfigurationError(message)


def check_seconds(name: str, value: Any) -> None:
    """Raise unless `value` is a number of seconds, or `None`.

    Raises:
        TypeError: It is something else, such as a timedelta.
    """
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return
    fix = f"{name}=value.total_seconds()" if hasattr(value, "total_seconds") else f"{name}=5.0"
    message = f"{name} is a number of seconds, not a {type(value).__name__}: write {fix}."
    raise TypeError(message)


def missing_members(given: object, protocol: type) -> list[str]:
    """The members of a protocol that an object lacks, sorted.

    Unlike `isinstance`, this finds members that a proxy forwards by `__getattr__`. Dunder methods
    are skipped: Python looks them up on the class, and msgbus calls none of them.
    """
    members = sorted(get_protocol_members(protocol))
    return [name for name in members if name[:2] != "__" and not hasattr(given, name)]


def require_members(given: object, protocol: type, name: str, fix: str) -> None:
    """Raise unless an object, given as `name`, has all members of a protocol.

    Raises:
        ConfigurationError: It lacks some; the text lists them and ends with `fix`.
    """
    missing = missing_members(given, protocol)
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        message = f"{name} is {given!r:.60}, which lacks {', '.join(missing[:_NAMED])}{more}. {fix}"
        raise ConfigurationError(message)


def require_id(what: str, value: object) -> None:
    """Raise unless `value` can be an id or a name.

    Raises:
        ConfigurationError: It is blank or not a string.
    """
    if not isinstance(value, str) or not value.strip():
        message = f"{what} must be text that is not blank, not {value!r:.80}."
        raise ConfigurationError(message)


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
