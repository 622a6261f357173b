"""Topic patterns as NATS subjects, and back.

NATS has two wildcards: `*` is one token, as here; `>` is one token or more, and only at
the end. So `a.*.**` is `a.>` to the letter, and `a.**`, which also matches `a`, is the two
subjects `a` and `a.>`. Nothing else of the grammar exists there. NATS always minds case.
"""

from __future__ import annotations

import re
from typing import Final

from msgbus.errors import InvalidTopicError
from msgbus.messages.topics.pattern import PatternKind, TopicPattern, check_topic
from msgbus.routing.segments import Segment, SegmentKind

_NOT_IN_TOKENS: Final = re.compile(r"[\s*>]")


def to_nats(pattern: str | TopicPattern) -> str:
    """The one subject nearest to `pattern`: a `**` at the end becomes `>`.

    `>` needs at least one token, so `a.>` leaves out the topic `a` itself, which `a.**`
    matches. Subscribe to all of `nats_subjects` where that matters.

    Raises:
        InvalidTopicError: NATS cannot say this; the error shows which part.
    """
    return nats_subjects(pattern)[-1]


def nats_subjects(pattern: str | TopicPattern) -> tuple[str, ...]:
    """The subjects that together match exactly what `pattern` matches, but for case.

    No topic matches two of them.

    Raises:
        InvalidTopicError: NATS cannot say this; the error shows which part.
    """
    text = pattern if isinstance(pattern, str) else pattern.pattern
    # As it is written: what is folded for comparing would change the subject.
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
    """The pattern that matches the same topics as `subject`, but for case.

    Raises:
        InvalidTopicError: It is not a subject.
    """
    check_topic(subject)
    found: list[str] = []
    tokens = subject.split(".")
    at = 0
    for number, word in enumerate(tokens):
        is_last = number == len(tokens) - 1
        if word == ">" and is_last:
            found.append("*.**")
        elif word == "*":
            found.append(word)
        else:
            found.append(_escaped(subject, at, word))
        at += len(word) + 1
    pattern = ".".join(found)
    return "[r]" + pattern[1:] if pattern.startswith("re:") else pattern


def _tokens(text: str, segments: list[Segment]) -> list[str]:
    tokens: list[str] = []
    at = 0
    for segment in segments:
        tokens.append(_token(text, at, segment))
        at += len(segment.source) + 1
    return tokens


def _token(text: str, at: int, segment: Segment) -> str:
    if segment.kind is SegmentKind.ONE:
        return "*"
    if segment.kind is SegmentKind.MANY:
        raise InvalidTopicError(text, at, "NATS has '**' (its '>') only at the end.")
    if segment.kind is SegmentKind.GLOB:
        raise InvalidTopicError(text, at, "NATS has no wildcards inside a segment.")
    if _NOT_IN_TOKENS.search(segment.text):
        raise InvalidTopicError(text, at, "a NATS token has no spaces, '*' or '>' in it.")
    return segment.text


def _escaped(subject: str, at: int, token: str) -> str:
    if bad := _NOT_IN_TOKENS.search(token):
        problem = "a space, '*' or '>' cannot be part of a token, and '>' is only at the end."
        raise InvalidTopicError(subject, at + bad.start(), problem, what="NATS subject")
    return re.sub(r"[?\[]", r"[\g<0>]", token)
