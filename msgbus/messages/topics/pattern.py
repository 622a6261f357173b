"""Topics and topic patterns: syntax, validation and matching.

A topic is text in segments, separated by dots: `shop.orders.placed`. In a pattern

- `*` as a segment matches exactly one segment, `**` zero or more;
- inside a segment `*` matches zero or more characters, `?` one, `[a-c]` one of these and
  `[!a-c]` one other; none of them matches a dot;
- `re:` makes the rest a regular expression for the whole topic;
- anything else matches itself.

Case is ignored by default. The reference page `topics` has a table of examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, final

from msgbus.errors import InvalidTopicError

REGEX_PREFIX: Final = "re:"

_FORBIDDEN: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Control characters and line ends, which no topic may contain."""

_STAR: Final = ""
"""The token for zero or more characters; every other token is a regular expression."""

_ANY: Final = "."
"""The token for one character."""


class SegmentKind(Enum):
    """The kind of a pattern segment: plain text, text with wildcards, `*` or `**`."""

    TEXT = "text"
    GLOB = "glob"
    ONE = "*"
    MANY = "**"


@final
class PatternSegment:
    """One compiled segment of a pattern."""

    # Not a dataclass: `import msgbus` would pay for making it.
    __slots__ = ("fits", "kind", "source", "text")

    def __init__(
        self,
        kind: SegmentKind,
        source: str,
        text: str = "",
        fits: Callable[[str], object] | None = None,
    ) -> None:
        self.kind: Final = kind
        self.source: Final = source
        """The segment as written."""
        self.text: Final = text
        """The plain text, or for a glob the text before its first wildcard."""
        self.fits: Final = fits
        """For a glob: the compiled match."""

    def matches(self, segment: str) -> bool:
        """Return whether one segment of a topic matches; folded if the pattern is."""
        if self.kind is SegmentKind.TEXT:
            return segment == self.text
        return self.fits is None or self.fits(segment) is not None


_WILDCARDS: Final = frozenset("*?[")
_ONE: Final = PatternSegment(SegmentKind.ONE, "*")
_MANY: Final = PatternSegment(SegmentKind.MANY, "**")


def fold(text: str) -> str:
    """Return `text` in lower case, character by character, so that its length stays the same."""
    if text.isascii():
        return text.lower()
    return "".join(low if len(low := one.lower()) == 1 else one for one in text)


def read_segment(pattern: str, start: int, end: int, *, case_sensitive: bool) -> PatternSegment:
    """Compile the segment `pattern[start:end]`.

    Raises:
        InvalidTopicError: It is empty or ambiguous.
    """
    source = pattern[start:end]
    if not source:
        problem = "the segment is empty. Remove a dot, or write '*' for any one segment."
        raise InvalidTopicError(pattern, start, problem)
    if source == "*":
        return _ONE
    if source == "**":
        return _MANY
    if _WILDCARDS.isdisjoint(source):
        return PatternSegment(SegmentKind.TEXT, source, source if case_sensitive else fold(source))
    if "**" in source:
        at = start + source.index("**")
        problem = "'**' must be a segment of its own, between dots. Inside a segment write '*'."
        raise InvalidTopicError(pattern, at, problem)
    tokens, text = _read_tokens(pattern, start, end, case_sensitive=case_sensitive)
    if len(text) == len(tokens):
        return PatternSegment(SegmentKind.TEXT, source, text)
    fits = re.compile(_expression(tokens), re.DOTALL).fullmatch
    return PatternSegment(SegmentKind.GLOB, source, text, fits)


def _read_tokens(
    pattern: str, start: int, end: int, *, case_sensitive: bool
) -> tuple[list[str], str]:
    """Return the tokens of a segment, and the plain text before its first wildcard."""
    tokens: list[str] = []
    plain = ""
    at = start
    while at < end:
        one = pattern[at]
        token: str | None = None
        if one == "*":
            token = _STAR
        elif one == "?":
            token = _ANY
        elif one == "[":
            close = _closing_bracket(pattern, at, end)
            characters = pattern[at + 1 : close]
            if len(characters) == 1:
                one = characters  # how a wildcard is escaped: `[*]`
            else:
                token = _read_set(pattern, at, close, case_sensitive=case_sensitive)
            at = close
        at += 1
        if token is None:
            one = one if case_sensitive else fold(one)
            if len(plain) == len(tokens):
                plain += one
            token = re.escape(one)
        tokens.append(token)
    return tokens, plain


def _closing_bracket(pattern: str, at: int, end: int) -> int:
    # From the second character on: `[]]` is the set of one closing bracket.
    close = pattern.find("]", at + 2, end)
    if close < 0:
        problem = "this '[' is not closed in its segment. Write '[[]' for a bracket itself."
        raise InvalidTopicError(pattern, at, problem)
    return close


def _read_set(pattern: str, at: int, close: int, *, case_sensitive: bool) -> str:
    """Return the regular expression for the set between two brackets."""
    if pattern[at + 1] == "^":
        problem = "a negated set begins with '!', not with '^'."
        raise InvalidTopicError(pattern, at + 1, problem)
    is_negated = pattern[at + 1] == "!"
    ranges: list[tuple[str, str]] = []
    position = at + 1 + is_negated
    while position < close:
        first = last = pattern[position]
        if position + 2 < close and pattern[position + 1] == "-":
            last = pattern[position + 2]
            if last < first:
                problem = f"the range {first}-{last} runs backwards; write {last}-{first}."
                raise InvalidTopicError(pattern, position, problem)
            position += 2
        position += 1
        ranges.append((first, last))
    body = "".join(_range_expression(*one, case_sensitive=case_sensitive) for one in ranges)
    return f"[{'^' if is_negated else ''}{body}]"


def _range_expression(first: str, last: str, *, case_sensitive: bool) -> str:
    body = re.escape(first) if first == last else f"{re.escape(first)}-{re.escape(last)}"
    if case_sensitive:
        return body
    characters = map(chr, range(ord(first), ord(last) + 1))
    folded = {low for one in characters if (low := fold(one)) != one}
    return body + "".join(map(re.escape, sorted(folded)))


def _expression(tokens: Sequence[str]) -> str:
    parts: list[str] = [""]
    for token in tokens:
        if token == _STAR:
            parts.append("")
        else:
            parts[-1] += token
    first, *others = parts
    if not others:
        return first
    # The first match of a middle part is always right, so there is no backtracking into it
    # (`(?>`): the time stays bounded, whatever the pattern.
    middle = "".join(f"(?>.*?{part})" for part in others[:-1] if part)
    return f"{first}{middle}.*{others[-1]}"


class PatternKind(Enum):
    """The kind of a pattern: one topic, wildcards, or a regular expression."""

    EXACT = "exact"
    WILDCARD = "wildcard"
    REGEX = "regex"


@final
class TopicPattern:
    """A compiled topic pattern.

    ```python
    TopicPattern("shop.*.placed").matches("shop.orders.placed")  # True
    ```

    Args:
        pattern: The text of the pattern.
        case_sensitive: Whether `A` and `a` differ; if not, both are compared in lower case.

    Raises:
        InvalidTopicError: `pattern` is not valid; the error shows the position.
    """

    __slots__ = ("_expression", "case_sensitive", "exact_topic", "kind", "pattern", "segments")

    def __init__(self, pattern: str, *, case_sensitive: bool = False) -> None:
        _check_text(pattern)
        self.pattern: Final = pattern
        """The text of the pattern."""
        self.case_sensitive: Final = case_sensitive
        """Whether `A` and `a` differ."""
        self._expression: Final = _read_expression(pattern, case_sensitive=case_sensitive)
        self.segments: Final[tuple[PatternSegment, ...]] = (
            read_segments(pattern, case_sensitive=case_sensitive)
            if self._expression is None
            else ()
        )
        """Its segments; none for a regular expression."""
        self.kind: Final = self._find_kind()
        """The kind of the pattern."""
        self.exact_topic: Final = (
            ".".join(segment.text for segment in self.segments)
            if self.kind is PatternKind.EXACT
            else ""
        )
        """The one topic of an exact pattern, in lower case unless it is case-sensitive."""

    def _find_kind(self) -> PatternKind:
        if self._expression is not None:
            return PatternKind.REGEX
        if all(segment.kind is SegmentKind.TEXT for segment in self.segments):
            return PatternKind.EXACT
        return PatternKind.WILDCARD

    @property
    def is_exact(self) -> bool:
        """Whether it has no wildcards, and so matches one topic only."""
        return self.kind is PatternKind.EXACT

    def matches(self, topic: str) -> bool:
        """Return whether `topic` matches. Text that is not a valid topic never does."""
        folded = topic if self.case_sensitive else fold(topic)
        if self.kind is PatternKind.EXACT:
            return folded == self.exact_topic
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
    """Return whether `text` is a valid topic: no empty segment, no control characters."""
    return (
        bool(text)
        and text[0] != "."
        and text[-1] != "."
        and ".." not in text
        and _FORBIDDEN.search(text) is None
    )


def check_topic(topic: str) -> None:
    """Raise unless `topic` is a valid topic.

    Raises:
        InvalidTopicError: It is not; the error shows the position.
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
        problem = f"it must be text, such as 'shop.orders', not {type(text).__name__}."
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
        problem = "nothing follows 're:'. Write a regular expression after it."
        raise InvalidTopicError(pattern, start, problem)
    try:
        return re.compile(pattern[start:], re.NOFLAG if case_sensitive else re.IGNORECASE)
    except re.error as error:
        problem = f"the regular expression is not valid: {error.msg}."
        raise InvalidTopicError(pattern, start + (error.pos or 0), problem) from None
    except (OverflowError, RecursionError) as error:
        problem = f"the regular expression is too large: {error}."
        raise InvalidTopicError(pattern, start, problem) from None


def read_segments(pattern: str, *, case_sensitive: bool = False) -> tuple[PatternSegment, ...]:
    """Compile the segments of a pattern that is not a regular expression.

    Raises:
        InvalidTopicError: A segment is not valid.
    """
    found: list[PatternSegment] = []
    start = 0
    for source in pattern.split("."):
        end = start + len(source)
        found.append(read_segment(pattern, start, end, case_sensitive=case_sensitive))
        start = end + 1
    return tuple(found)


def match_segments(pattern: Sequence[PatternSegment], topic: Sequence[str]) -> bool:
    """Return whether the segments of a topic, folded if the pattern is, match a pattern's.

    Each `**` matches no segment at first, and one more whenever the rest does not match. Only
    the last one is extended, so the time is bounded by the product of both lengths.
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
            if segment.matches(topic[taken]):
                at += 1
                taken += 1
                continue
        if many < 0:
            return False
        resume += 1
        at, taken = many + 1, resume
    return all(segment.kind is SegmentKind.MANY for segment in pattern[at:])
