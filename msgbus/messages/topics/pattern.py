"""The grammar of topics: what a topic is, and which topics a pattern matches.

A topic is text in segments, split by dots: `shop.orders.placed`. In a pattern

- `*` is exactly one segment, `**` any number of them, none included, at any place;
- inside a segment `*` is any number of characters, `?` one, `[a-c]` one of these and
  `[!a-c]` one other; none of them ever matches a dot;
- `re:` makes the rest a regular expression for the whole topic;
- everything else stands for itself.

Case is ignored unless asked for. The reference page `topics` has the table of examples.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from typing import Final, final

from msgbus.errors import InvalidTopicError
from msgbus.routing.segments import Segment, SegmentKind, fold, read_segment

REGEX_PREFIX: Final = "re:"

_FORBIDDEN: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Control characters and line ends: they are in no topic, so nothing matches them."""


class PatternKind(Enum):
    """How a pattern is compared."""

    EXACT = "exact"
    WILDCARD = "wildcard"
    REGEX = "regex"


@final
class TopicPattern:
    """A pattern, checked and compiled once.

    ```python
    TopicPattern("shop.*.placed").matches("shop.orders.placed")  # True
    ```

    Args:
        pattern: The text of the pattern.
        case_sensitive: Whether `A` and `a` are different; if not, both are compared in
            lower case.

    Raises:
        InvalidTopicError: It is not a pattern; the error shows the position of the fault.
    """

    __slots__ = ("_expression", "_folded", "case_sensitive", "kind", "pattern", "segments")

    def __init__(self, pattern: str, *, case_sensitive: bool = False) -> None:
        _check_text(pattern)
        self.pattern: Final = pattern
        """The text it was made from."""
        self.case_sensitive: Final = case_sensitive
        """Whether `A` and `a` are different."""
        self._expression: Final = _read_expression(pattern, case_sensitive=case_sensitive)
        self.segments: Final[tuple[Segment, ...]] = (
            read_segments(pattern, case_sensitive=case_sensitive)
            if self._expression is None
            else ()
        )
        """Its segments; none for a regular expression."""
        self.kind: Final = self._find_kind()
        """How it is compared."""
        self._folded: Final = (
            ".".join(segment.text for segment in self.segments)
            if self.kind is PatternKind.EXACT
            else ""
        )

    def _find_kind(self) -> PatternKind:
        if self._expression is not None:
            return PatternKind.REGEX
        if all(segment.kind is SegmentKind.TEXT for segment in self.segments):
            return PatternKind.EXACT
        return PatternKind.WILDCARD

    @property
    def is_exact(self) -> bool:
        """Whether it matches one topic only (in any case, unless case counts)."""
        return self.kind is PatternKind.EXACT

    @property
    def exact_topic(self) -> str:
        """The one topic an exact pattern matches, in lower case unless case counts."""
        return self._folded

    def matches(self, topic: str) -> bool:
        """Whether `topic` matches. Text that is no topic never does."""
        folded = topic if self.case_sensitive else fold(topic)
        if self.kind is PatternKind.EXACT:
            return folded == self._folded
        if not is_topic(topic):
            return False
        if self._expression is not None:
            return self._expression.fullmatch(topic) is not None
        return match_segments(self.segments, folded.split("."))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TopicPattern):
            return NotImplemented
        return (self.pattern, self.case_sensitive) == (other.pattern, other.case_sensitive)

    def __hash__(self) -> int:
        return hash((self.pattern, self.case_sensitive))

    def __reduce__(self) -> tuple[object, ...]:
        return _make_pattern, (self.pattern, self.case_sensitive)

    def __str__(self) -> str:
        return self.pattern

    def __repr__(self) -> str:
        case = ", case_sensitive=True" if self.case_sensitive else ""
        return f"TopicPattern({self.pattern!r}{case})"


def _make_pattern(pattern: str, case_sensitive: bool) -> TopicPattern:
    return TopicPattern(pattern, case_sensitive=case_sensitive)


def is_topic(text: str) -> bool:
    """Whether `text` is a topic: segments that are not empty, no control characters."""
    return (
        bool(text)
        and text[0] != "."
        and text[-1] != "."
        and ".." not in text
        and _FORBIDDEN.search(text) is None
    )


def check_topic(topic: str) -> None:
    """Raise unless `topic` is one that an event can be published under.

    Raises:
        InvalidTopicError: It is not; the error shows the position of the fault.
    """
    if type(topic) is str and is_topic(topic):
        return
    _check_text(topic, what="topic")
    position = 0
    for segment in topic.split("."):
        if not segment:
            problem = "the segment is empty. Remove a dot."
            raise InvalidTopicError(topic, position, problem, what="topic")
        position += len(segment) + 1


def _check_text(text: object, what: str = "topic pattern") -> None:
    if not isinstance(text, str):
        problem = f"it is text, such as 'shop.orders', not {type(text).__name__}."
        raise InvalidTopicError(repr(text), 0, problem, what=what)
    if not text:
        problem = "it is empty. Write a topic, such as 'shop.orders'."
        raise InvalidTopicError(text, 0, problem, what=what)
    bad = _FORBIDDEN.search(text)
    if bad is not None:
        problem = f"it contains the control character {bad.group()!r}. Remove it."
        raise InvalidTopicError(text, bad.start(), problem, what=what)


def _read_expression(pattern: str, *, case_sensitive: bool) -> re.Pattern[str] | None:
    if not pattern.startswith(REGEX_PREFIX):
        return None
    start = len(REGEX_PREFIX)
    if len(pattern) == start:
        problem = "nothing follows 're:'. Write a regular expression behind it."
        raise InvalidTopicError(pattern, start, problem)
    try:
        return re.compile(pattern[start:], re.NOFLAG if case_sensitive else re.IGNORECASE)
    except re.error as error:
        problem = f"the regular expression is not valid: {error.msg}."
        raise InvalidTopicError(pattern, start + (error.pos or 0), problem) from None
    except (OverflowError, RecursionError) as error:
        problem = f"the regular expression is too large: {error}."
        raise InvalidTopicError(pattern, start, problem) from None


def read_segments(pattern: str, *, case_sensitive: bool = False) -> tuple[Segment, ...]:
    """The segments of a pattern that is no regular expression.

    Raises:
        InvalidTopicError: It is not a pattern.
    """
    found: list[Segment] = []
    start = 0
    for source in pattern.split("."):
        end = start + len(source)
        found.append(read_segment(pattern, start, end, case_sensitive=case_sensitive))
        start = end + 1
    return tuple(found)


def match_segments(pattern: Sequence[Segment], topic: Sequence[str]) -> bool:
    """Whether the segments of a topic, folded if the pattern is, match a pattern's.

    Each `**` first takes nothing, then one more whenever what follows does not fit. Only
    the last one seen is ever tried again, so the time is bounded by the product of both
    lengths.
    """
    at = taken = 0
    many = -1
    resume = 0
    while taken < len(topic):
        if at < len(pattern):
            segment = pattern[at]
            if segment.kind is SegmentKind.MANY:
                many, resume = at, taken
                at += 1
                continue
            if segment.takes(topic[taken]):
                at += 1
                taken += 1
                continue
        if many < 0:
            return False
        resume += 1
        at, taken = many + 1, resume
    return all(segment.kind is SegmentKind.MANY for segment in pattern[at:])
