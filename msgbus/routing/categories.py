"""What sort of message a topic carries: its category."""

from __future__ import annotations

from enum import Enum
from typing import Final


class MessageCategory(Enum):
    """The four sorts of messages that a dispatch engine tells apart."""

    EVENT = "event"
    """A fact; any number of dispatchers."""

    COMMAND = "command"
    """Something to do."""

    INTENT = "intent"
    """A wish that somebody has yet to turn into commands."""

    PROJECTION = "projection"
    """A view, made from other messages."""

    # Enum's own is written in Python, and a dispatch asks for it several times.
    __hash__ = object.__hash__

    @classmethod
    def from_topic(cls, topic: str) -> MessageCategory | None:
        """The category that a segment of `topic` names, as `events` in `shop.events.v1`.

        The first such segment counts, in any case. `None` if there is none: then the
        envelope's own category holds, and without one the message is an event.
        """
        for segment in topic.lower().split("."):
            category = _SEGMENTS.get(segment)
            if category is not None:
                return category
        return None

    @property
    def segment(self) -> str:
        """The segment of a topic that names this category."""
        return f"{self.value}s"


_SEGMENTS: Final = {category.segment: category for category in MessageCategory}
