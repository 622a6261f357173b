"""Options in the URL of a journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgbus.errors import JournalOpenError


def seconds(text: str) -> float:
    """Read a span of time; raise `ValueError` if it is none, or not above zero."""
    value = float(text)
    if not 0 < value < float("inf"):
        message = f"{text!r} is no number of seconds above 0"
        raise ValueError(message)
    return value


def parse_options(
    text: Mapping[str, str], known: Mapping[str, Callable[[str], Any]], url: str
) -> dict[str, Any]:
    """Return options with their types.

    Args:
        text: The options as they are written.
        known: How to read each that may be there.
        url: Where they were found.

    Raises:
        JournalOpenError: An option is unknown, or its value makes no sense.
    """
    try:
        return {name: known[name](value) for name, value in text.items()}
    except (KeyError, ValueError) as error:
        message = (
            f"{url!r} has an option that makes no sense ({error}). Known are: {', '.join(known)}."
        )
        raise JournalOpenError(message) from error
