"""Convert topic patterns to NATS subjects and back.

NATS has two wildcards: `*` matches one token, as here; `>` matches one or more, at the end
only. So `a.*.**` is `a.>`, and `a.**`, which also matches `a`, needs the two subjects `a` and
`a.>`. The rest of the syntax has no equivalent. NATS subjects are case-sensitive.
"""

from __future__ import annotations

import re
from typing import Final

from msgbus.errors import InvalidTopicError
from msgbus.messages.topics.pattern import (
    PatternKind,
    PatternSegment,
    SegmentKind,
    TopicPattern,
    check_topic,
)

_NOT_IN_TOKENS: Final = re.compile(r"[\s*>]")


def to_nats(pattern: str | TopicPattern) -> str:
    """Return the one subject closest to `pattern`: a `**` at the end becomes `>`.

    `>` needs at least one token, so `a.>` does not match the topic `a`, which `a.**` matches.
    Subscribe to all of `nats_subjects` where that matters.

    Raises:
        InvalidTopicError: A part has no equivalent in NATS; the error shows which.
    """
    return nats_subjects(pattern)[-1]


def nats_subjects(pattern: str | TopicPattern) -> tuple[str, ...]:
    """Return the subjects that together match what `pattern` matches, except for case.

    No topic matches two of them.

    Raises:
        InvalidTopicError: A part has no equivalent in NATS; the error shows which.
    """
    text = pattern if isinstance(pattern, str) else pattern.pattern
    # As written: folding would change the subject.
    checked = TopicPattern(text, case_sensitive=True)
    if checked.kind is PatternKind.REGEX:
        raise InvalidTopicError(text, 0, "NATS has no regular expressions.")
    *others, last = checked.segments
    tokens = _tokens(text, others)
    if last.kind is not SegmentKind.MANY:
        start = len(text) - len(last.source)
        return (".".join([*tokens, _token(text, start, last)]),)
    if tokens and tokens[-1] == "*":
        return (".".join([*tokens[:-1], ">"]),)
    deeper = ".".join([*tokens, ">"])
    return (".".join(tokens), deeper) if tokens else (deeper,)


def from_nats(subject: str) -> str:
    """Return the pattern that matches the same topics as `subject`, except for case.

    Raises:
        InvalidTopicError: `subject` is not valid.
    """
    check_topic(subject)
    found: list[str] = []
    tokens = subject.split(".")
    at = 0
    for number, part in enumerate(tokens):
        is_last = number == len(tokens) - 1
        if part == ">" and is_last:
            found.append("*.**")
        elif part == "*":
            found.append(part)
        else:
            found.append(_escaped(subject, at, part))
        at += len(part) + 1
    pattern = ".".join(found)
    return "[r]" + pattern[1:] if pattern.startswith("re:") else pattern


def _tokens(text: str, segments: list[PatternSegment]) -> list[str]:
    tokens: list[str] = []
    at = 0
    for segment in segments:
        tokens.append(_token(text, at, segment))
        at += len(segment.source) + 1
    return tokens


def _token(text: str, at: int, segment: PatternSegment) -> str:
    if segment.kind is SegmentKind.ONE:
        return "*"
    if segment.kind is SegmentKind.MANY:
        raise InvalidTopicError(text, at, "NATS has '**' (its '>') only at the end.")
    if segment.kind is SegmentKind.GLOB:
        raise InvalidTopicError(text, at, "NATS has no wildcards inside a segment.")
    if _NOT_IN_TOKENS.search(segment.text):
        raise InvalidTopicError(text, at, "a NATS token cannot contain spaces, '*' or '>'.")
    return segment.text


def _escaped(subject: str, at: int, token: str) -> str:
    if bad := _NOT_IN_TOKENS.search(token):
        problem = "a token cannot contain spaces, '*' or '>'; '>' is allowed at the end only."
        raise InvalidTopicError(subject, at + bad.start(), problem, what="NATS subject")
    return re.sub(r"[?\[]", r"[\g<0>]", token)
