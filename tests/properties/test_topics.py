"""Topic patterns and routes against a slow reference implementation.

`python -m tests.properties.slow_topics 1000000` compares a million pairs.
"""

from __future__ import annotations

import random

from hypothesis import given, settings, strategies as st

from msgbus.messages.topics.pattern import TopicPattern, check_topic, is_topic
from msgbus.routing import PatternRouter, Route, nats_subjects
from tests.properties.slow_topics import compare, compare_all, random_pairs, slow_match

PIECES = ["a", "b", "A", "*", "**", "a*", "*b", "?", "[ab]", "[!a]", "a?b", "[a-b]x*", "c*d*e"]
WORDS = ["a", "b", "c", "A", "ab", "aab", "axb", "cde", "cxdxe", "bx"]

patterns = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(".".join)
topics = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(".".join)
anything = st.text(st.sampled_from("abAB.*?[]!-^é\n"), max_size=10)


def test_twenty_thousand_random_pairs_agree() -> None:
    counts = compare_all(20_000, random.randrange(10**9))

    assert counts[True] > 2_000
    assert counts[False] > 2_000
    assert counts[None] > 200


@given(anything, anything, st.booleans())
@settings(max_examples=500)
def test_any_two_texts_agree(pattern: str, topic: str, case_sensitive: bool) -> None:
    if not pattern.startswith("re:"):
        compare(pattern, topic, case_sensitive=case_sensitive)


@given(anything)
@settings(max_examples=300)
def test_a_topic_is_what_the_pattern_of_everything_matches(text: str) -> None:
    assert TopicPattern("**").matches(text) == is_topic(text)
    try:
        check_topic(text)
    except ValueError:
        assert not is_topic(text)
    else:
        assert is_topic(text)


# -- the router against a list ---------------------------------------------------------------

registrations = st.tuples(st.just("add"), patterns, st.integers(-2, 2))
removals = st.tuples(st.just("remove"), st.integers(0, 30), st.just(0))
questions = st.tuples(st.just("ask"), topics, st.just(0))


def in_order(model: list[tuple[Route, str]], topic: str) -> list[Route]:
    """Higher priority first, then as registered: said once, in the plainest way."""
    found = [route for route, pattern in model if slow_match(pattern, topic)]
    ordered: list[Route] = []
    for priority in sorted({route.priority for route in found}, reverse=True):
        ordered += [route for route in found if route.priority == priority]
    return ordered


@given(st.lists(st.one_of(registrations, removals, questions), max_size=60))
@settings(max_examples=300)
def test_a_router_answers_as_a_plain_list_would(steps: list[tuple[str, object, int]]) -> None:
    router = PatternRouter(cache_size=4)
    model: list[tuple[Route, str]] = []
    asked: list[str] = []
    for kind, value, priority in steps:
        if kind == "add":
            pattern = str(value)
            model.append((router.register_route(pattern, pattern, priority), pattern))
        elif kind == "ask":
            asked.append(str(value))
        elif model:
            assert isinstance(value, int)
            route, _ = model.pop(value % len(model))
            assert router.unregister(route)
        # Everything that was ever asked is asked again: a stale answer would show.
        for topic in asked:
            expected = in_order(model, topic)
            assert router.find_all_routes(topic) == expected
            assert router.find_route(topic) is (expected[0] if expected else None)
    assert list(router.routes) == [route for route, _ in model]


def test_many_patterns_at_once_agree_with_each_alone() -> None:
    for seed in range(3):
        pairs = list(random_pairs(300, seed))
        router = PatternRouter()
        for pattern, _, _ in pairs:
            try:
                router.register_route(pattern, pattern)
            except ValueError:
                continue
        for topic in {topic for _, topic, _ in pairs}:
            expected = [route for route in router.routes if slow_match(route.pattern, topic)]
            assert router.find_all_routes(topic) == expected


# -- NATS --------------------------------------------------------------------------------------


def nats_match(subject: str, topic: str) -> bool:
    """The rules of NATS: `*` is one token, `>` at the end is one or more."""
    wanted, given_tokens = subject.split("."), topic.split(".")
    if wanted[-1] == ">":
        if len(given_tokens) < len(wanted):
            return False
        wanted, given_tokens = wanted[:-1], given_tokens[: len(wanted) - 1]
    return len(wanted) == len(given_tokens) and all(
        want in ("*", token) for want, token in zip(wanted, given_tokens, strict=True)
    )


@given(st.lists(st.sampled_from(["a", "b", "*"]), max_size=3), st.booleans(), topics)
@settings(max_examples=300)
def test_the_subjects_of_a_pattern_match_what_it_matches_each_topic_once(
    segments: list[str], ends_in_many: bool, topic: str
) -> None:
    if ends_in_many or not segments:
        segments = [*segments, "**"]
    pattern = ".".join(segments)

    hits = [subject for subject in nats_subjects(pattern) if nats_match(subject, topic)]

    assert len(hits) == TopicPattern(pattern, case_sensitive=True).matches(topic)
