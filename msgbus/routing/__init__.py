"""Routing: topics and who gets what is sent to them."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msgbus.routing.topics import TopicPattern, check_topic, is_topic

__all__ = [
    "TopicPattern",
    "check_topic",
    "is_topic",
]

_MODULES = {
    "TopicPattern": "topics",
    "check_topic": "topics",
    "is_topic": "topics",
}


def __getattr__(name: str) -> object:
    # Only on first use: message classes import this package for the grammar of topics, and
    # the rest of it stands above them.
    module = _MODULES.get(name)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value: object = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
