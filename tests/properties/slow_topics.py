"""A slow reference implementation of topic matching, and random pairs to compare.

`python -m tests.properties.slow_topics 1000000` compares that many pairs.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from typing import TypeAlias

from msgbus.errors import InvalidTopicError
from msgbus.messages.topics.pattern import TopicPattern

Set: TypeAlias = tuple[bool, list[tuple[str, str]]]
"""Whether it is negated, and its ranges."""

CHARACTERS = "aabbcAB..."
WILD = "ab.*?[]-!^"
RARE = "éÉßİ\u212a\u017f_ /:+()|\\^$#~&,'\n\t"


class WrongPatternError(Exception):
    """The slow reader refuses the pattern."""


def lower(text: str) -> str:
    """Lower case, for each character whose lower case is one character."""
    return "".join(one.lower() if len(one.lower()) == 1 else one for one in text)


def slow_match(pattern: str, topic: str, *, case_sensitive: bool = False) -> bool:
    """By the definition: try everything.

    Raises:
        WrongPatternError: It is not a pattern.
    """
    if is_wrong_text(pattern):
        raise WrongPatternError
    wanted = [read(segment) for segment in pattern.split(".")]
    if is_wrong_text(topic) or "" in topic.split("."):
        return False
    if not case_sensitive:
        topic = lower(topic)
    return segments_match(wanted, topic.split("."), case_sensitive)


def is_wrong_text(text: str) -> bool:
    return not text or any(ord(one) < 32 or 127 <= ord(one) < 160 for one in text)


def read(segment: str) -> list[str | Set]:
    """A segment as a list of `*`, `?`, `**` or sets of characters."""
    if segment == "**":
        return ["**"]
    if not segment or "**" in segment:
        raise WrongPatternError
    found: list[str | Set] = []
    while segment:
        if segment[0] == "[":
            end = segment.find("]", 2)
            if end < 0:
                raise WrongPatternError
            found.append(read_set(segment[1:end]))
            segment = segment[end + 1 :]
        else:
            one = segment[0]
            found.append(one if one in "*?" else (False, [(one, one)]))
            segment = segment[1:]
    return found


def read_set(inside: str) -> Set:
    if len(inside) == 1:
        return False, [(inside, inside)]
    if inside[0] == "^":
        raise WrongPatternError
    is_negated = inside[0] == "!"
    inside = inside[is_negated:]
    ranges: list[tuple[str, str]] = []
    while inside:
        if len(inside) >= 3 and inside[1] == "-":
            if inside[0] > inside[2]:
                raise WrongPatternError
            ranges.append((inside[0], inside[2]))
            inside = inside[3:]
        else:
            ranges.append((inside[0], inside[0]))
            inside = inside[1:]
    return is_negated, ranges


def segments_match(wanted: list[list[str | Set]], topic: list[str], case_sensitive: bool) -> bool:
    if not wanted:
        return not topic
    if wanted[0] == ["**"]:
        return any(
            segments_match(wanted[1:], topic[taken:], case_sensitive)
            for taken in range(len(topic) + 1)
        )
    if not topic:
        return False
    return characters_match(wanted[0], topic[0], case_sensitive) and segments_match(
        wanted[1:], topic[1:], case_sensitive
    )


def characters_match(wanted: list[str | Set], text: str, case_sensitive: bool) -> bool:
    if not wanted:
        return not text
    if wanted[0] == "*":
        return any(
            characters_match(wanted[1:], text[taken:], case_sensitive)
            for taken in range(len(text) + 1)
        )
    if not text:
        return False
    first = wanted[0]
    fits = isinstance(first, str) or in_set(first, text[0], case_sensitive)
    return fits and characters_match(wanted[1:], text[1:], case_sensitive)


def in_set(wanted: Set, one: str, case_sensitive: bool) -> bool:
    is_negated, ranges = wanted
    members = {chr(code) for first, last in ranges for code in range(ord(first), ord(last) + 1)}
    if not case_sensitive:
        members = {lower(member) for member in members}
    return (one in members) != is_negated


# -- random pairs ----------------------------------------------------------------------------


def random_text(chooser: random.Random, alphabet: str, longest: int) -> str:
    if chooser.random() < 0.02:
        alphabet += RARE
    return "".join(chooser.choices(alphabet, k=chooser.randrange(longest + 1)))


def random_pattern(chooser: random.Random) -> str:
    """Often a pattern with every feature, sometimes any text."""
    if chooser.random() < 0.1:
        return random_text(chooser, WILD, 8)
    pieces = ["a", "b", "A", "ab", "*", "?", "[ab]", "[a-c]", "[!a]", "[A-B]", "[*]", "c"]
    segments: list[str] = []
    for _ in range(chooser.randrange(1, 5)):
        kind = chooser.random()
        if kind < 0.2:
            segments.append("*")
        elif kind < 0.4:
            segments.append("**")
        else:
            segments.append("".join(chooser.choices(pieces, k=chooser.randrange(1, 4))))
    return ".".join(segments)


def random_topic(chooser: random.Random, pattern: str) -> str:
    """Often near the pattern, so that a good part of the pairs match."""
    if chooser.random() < 0.5:
        return random_text(chooser, CHARACTERS, 9)
    segments: list[str] = []
    for segment in pattern.split("."):
        if segment == "**":
            segments += chooser.choices(["a", "b", "ab"], k=chooser.randrange(3))
        else:
            replaced = segment.replace("[!a]", "b").replace("[ab]", "a").replace("[a-c]", "C")
            replaced = replaced.replace("[A-B]", "b").replace("[*]", "\0").replace("?", "b")
            replaced = replaced.replace("*", chooser.choice(["", "a", "ab"])).replace("\0", "*")
            segments.append(replaced or "a")
    if chooser.random() < 0.1:
        segments.insert(chooser.randrange(len(segments) + 1), "b")
    topic = ".".join(segments)
    return topic.upper() if chooser.random() < 0.2 else topic


def random_pairs(number: int, seed: int) -> Iterator[tuple[str, str, bool]]:
    """Patterns, topics and whether case counts."""
    chooser = random.Random(seed)
    made = 0
    while made < number:
        pattern = random_pattern(chooser)
        case_sensitive = chooser.random() < 0.3
        for _ in range(min(5, number - made)):
            yield pattern, random_topic(chooser, pattern), case_sensitive
            made += 1


def compare(pattern: str, topic: str, *, case_sensitive: bool) -> bool | None:
    """What both matchers say; nothing if both refuse the pattern."""
    fast: bool | None
    slow: bool | None
    try:
        fast = TopicPattern(pattern, case_sensitive=case_sensitive).matches(topic)
    except InvalidTopicError:
        fast = None
    try:
        slow = slow_match(pattern, topic, case_sensitive=case_sensitive)
    except WrongPatternError:
        slow = None
    assert fast == slow, f"{pattern!r} on {topic!r}, case {case_sensitive}: {fast} and {slow}"
    return fast


def compare_all(number: int, seed: int) -> dict[bool | None, int]:
    """How often both said yes, no, and that it is no pattern."""
    counts: dict[bool | None, int] = {True: 0, False: 0, None: 0}
    for pattern, topic, case_sensitive in random_pairs(number, seed):
        counts[compare(pattern, topic, case_sensitive=case_sensitive)] += 1
    return counts


if __name__ == "__main__":
    began = time.perf_counter()
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    start = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**6)
    found = compare_all(total, start)
    print(
        f"{total:,} pairs agree (seed {start}): {found[True]:,} match, {found[False]:,} do not, "
        f"{found[None]:,} are no pattern; {time.perf_counter() - began:.0f} s"
    )
