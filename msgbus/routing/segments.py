"""One segment of a topic pattern: the text between two dots.

A segment is `*` (any one segment), `**` (any number of them), plain text, or text with
wildcards for characters: `*` any number, `?` one, `[ab]` one of these, `[!ab]` one other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, final

from msgbus.errors import InvalidTopicError

_STAR: Final = ""
"""The token for any number of characters; every other token is a regular expression."""

_ANY: Final = "."
"""The token for one character."""


class SegmentKind(Enum):
    """What a segment of a pattern stands for."""

    TEXT = "text"
    GLOB = "glob"
    ONE = "*"
    MANY = "**"


@final
class Segment:
    """One segment of a pattern, ready to be compared."""

    # No dataclass: `import msgbus` would pay for making it.
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
        """As it was written."""
        self.text: Final = text
        """What a segment of plain text must be equal to; a glob's plain beginning."""
        self.fits: Final = fits
        """For a glob: whether a segment fits."""

    def takes(self, segment: str) -> bool:
        """Whether it matches this one segment of a topic, folded if the pattern is."""
        if self.kind is SegmentKind.TEXT:
            return segment == self.text
        return self.fits is None or self.fits(segment) is not None


_WILDCARDS: Final = frozenset("*?[")
_ONE: Final = Segment(SegmentKind.ONE, "*")
_MANY: Final = Segment(SegmentKind.MANY, "**")


def fold(text: str) -> str:
    """`text` in lower case, character by character, so that its length stays the same."""
    if text.isascii():
        return text.lower()
    return "".join(low if len(low := one.lower()) == 1 else one for one in text)


def read_segment(pattern: str, start: int, end: int, *, case_sensitive: bool) -> Segment:
    """The segment `pattern[start:end]`.

    Raises:
        InvalidTopicError: It can match nothing, or nobody could say what.
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
        return Segment(SegmentKind.TEXT, source, source if case_sensitive else fold(source))
    if "**" in source:
        at = start + source.index("**")
        problem = "'**' must be a segment of its own, between dots. Inside a segment write '*'."
        raise InvalidTopicError(pattern, at, problem)
    tokens, text = _read_tokens(pattern, start, end, case_sensitive=case_sensitive)
    if len(text) == len(tokens):
        return Segment(SegmentKind.TEXT, source, text)
    fits = re.compile(_expression(tokens), re.DOTALL).fullmatch
    return Segment(SegmentKind.GLOB, source, text, fits)


def _read_tokens(
    pattern: str, start: int, end: int, *, case_sensitive: bool
) -> tuple[list[str], str]:
    """The tokens of a segment, and the plain text it begins with."""
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
                one = characters  # the way to write a wildcard as itself: `[*]`
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
    """The regular expression for the set between two brackets."""
    if pattern[at + 1] == "^":
        problem = "a set that leaves characters out begins with '!', not with '^'."
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
    everyone = map(chr, range(ord(first), ord(last) + 1))
    folded = {low for one in everyone if (low := fold(one)) != one}
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
    # Taking the first place where a middle part fits is always right, so the search never
    # goes back behind it (`(?>`): the time stays bounded whatever the pattern.
    middle = "".join(f"(?>.*?{part})" for part in others[:-1] if part)
    return f"{first}{middle}.*{others[-1]}"
