"""Options given by keyword: misspelt names and wrong kinds of values, with the fix."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, model_validator

from msgbus.errors import ConfigurationError


class Options(BaseModel):
    """Base of all configuration: frozen, and an option that it does not have is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict):
            refuse_unknown(cls.__name__, cast("dict[str, Any]", given), cls.model_fields)
        return cast("Any", given)


def refuse_unknown(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise if an option is not among those that there are.

    Raises:
        ConfigurationError: With the nearest of them, else with all.
    """
    for name in given:
        if name in known:
            continue
        from difflib import get_close_matches  # only where there is something wrong

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
