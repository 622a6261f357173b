"""Topic patterns: syntax, errors, and NATS subjects."""

from __future__ import annotations

import pickle
import time

import pytest

from msgbus import ConfigurationError
from msgbus.errors import InvalidTopicError
from msgbus.messages.topics.pattern import PatternKind
from msgbus.routing import TopicPattern, check_topic, from_nats, is_topic, nats_subjects, to_nats

# -- what matches ----------------------------------------------------------------------------
# The table of docs/reference/topics.md is tested in tests/docs; here are the defects to avoid.


@pytest.mark.parametrize(
    ("pattern", "topic", "expected"),
    [
        pytest.param("a.**", "a", True, id="a trailing ** takes nothing"),
        pytest.param("a.**.b", "a.b", True, id="a ** in the middle takes nothing"),
        pytest.param("**.b", "b", True, id="a leading ** takes nothing"),
        pytest.param("a.**.b", "a.x.y.b", True, id="a ** in the middle takes several"),
        pytest.param("a.**.b", "a.b.b", True, id="a ** gives back what follows it"),
        pytest.param("a.**.b.**.c", "a.b.x.b.c", True, id="two **"),
        pytest.param("a.**.**", "a", True, id="** twice in a row"),
        pytest.param("user.*", "userX", False, id="a dot is a dot"),
        pytest.param("user.*", "userXname", False, id="a dot is a dot, with more"),
        pytest.param("user.*", "user.a.b", False, id="* is one segment"),
        pytest.param("user.*", "user", False, id="* is not none"),
        pytest.param("user.*", "user.", False, id="* is no empty segment"),
        pytest.param("re:user\\.[0-9]+", "user.42", True, id="a + in an expression repeats"),
        pytest.param("re:user", "user.42", False, id="an expression matches the whole topic"),
        pytest.param("re:user|shop", "shop.orders", False, id="also with alternatives"),
        pytest.param("a+b", "a+b", True, id="a + elsewhere is a plus"),
        pytest.param("a+b", "aab", False, id="a + elsewhere does not repeat"),
        pytest.param("a(b)|c$", "a(b)|c$", True, id="everything else stands for itself"),
        pytest.param("^a", "a", False, id="a ^ is no anchor"),
        pytest.param("a]", "a]", True, id="a closing bracket alone is itself"),
    ],
)
def test_a_pattern_matches_segments_and_nothing_else(
    pattern: str, topic: str, expected: bool
) -> None:
    assert TopicPattern(pattern).matches(topic) is expected


@pytest.mark.parametrize(
    "pattern",
    ["shop.orders", "shop.*", "**", "shop.order?", "re:.*", "re:(?s).*", "re:shop\\.\\w+\\s"],
)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\u2028", "\x00", "."])
def test_a_topic_with_a_line_end_or_an_empty_segment_never_matches(pattern: str, end: str) -> None:
    assert not TopicPattern(pattern).matches(f"shop.orders{end}")


def test_the_empty_text_matches_nothing() -> None:
    for pattern in ("**", "*", "re:.*"):
        assert not TopicPattern(pattern).matches("")


def test_case_is_ignored_unless_asked_for() -> None:
    for pattern in ("shop.Orders", "SHOP.*", "shop.o[R]*", "re:shop\\.orders"):
        assert TopicPattern(pattern).matches("Shop.ORDERS")
    for pattern in ("shop.Orders", "SHOP.*", "shop.o[R]*", "re:shop\\.orders"):
        assert not TopicPattern(pattern, case_sensitive=True).matches("Shop.ORDERS")


def test_folding_never_changes_how_many_characters_there_are() -> None:
    assert TopicPattern("stra?e").matches("straße")
    assert TopicPattern("?stanbul").matches("İstanbul")
    assert not TopicPattern("strasse").matches("straße")
    assert TopicPattern("ÉTÉ").matches("été")


def test_a_range_ignores_case_as_everything_does() -> None:
    assert TopicPattern("[A-C]1").matches("b1")
    assert TopicPattern("[a-c]1").matches("B1")
    assert not TopicPattern("[!A-C]1").matches("b1")
    assert not TopicPattern("[A-C]1", case_sensitive=True).matches("b1")


def test_a_set_of_one_character_is_the_character() -> None:
    assert TopicPattern("[*]").kind is PatternKind.EXACT
    for character in "*?[!^-]":
        assert TopicPattern(f"a[{character}]").matches(f"a{character}")
        assert not TopicPattern(f"a[{character}]").matches("ab")


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        ("shop.orders", PatternKind.EXACT),
        ("shop.*", PatternKind.WILDCARD),
        ("shop.order?", PatternKind.WILDCARD),
        ("re:shop", PatternKind.REGEX),
    ],
)
def test_a_pattern_knows_its_kind(pattern: str, kind: PatternKind) -> None:
    made = TopicPattern(pattern)

    assert made.kind is kind
    assert made.is_exact is (kind is PatternKind.EXACT)


def test_a_pattern_is_a_value() -> None:
    one, same = TopicPattern("a.*"), TopicPattern("a.*")

    assert one == same
    assert hash(one) == hash(same)
    assert one != TopicPattern("a.*", case_sensitive=True)
    assert one != "a.*"
    assert str(one) == "a.*"
    assert repr(TopicPattern("a", case_sensitive=True)) == "TopicPattern('a', case_sensitive=True)"
    assert pickle.loads(pickle.dumps(one)) == one


# -- time ------------------------------------------------------------------------------------


def cost(pattern: TopicPattern, topic: str) -> float:
    def once() -> float:
        began = time.process_time()
        assert not pattern.matches(topic)
        return time.process_time() - began

    return min(once() for _ in range(3))


@pytest.mark.parametrize(
    ("pattern", "piece", "end"),
    [
        pytest.param(".".join(["**", "a"] * 12) + ".b", "a.", "a", id="many **"),
        pytest.param("*a" * 12 + "b", "a", "a", id="many * in a segment"),
        pytest.param("*[ab]" * 12 + "c", "a", "b", id="many sets"),
    ],
)
def test_no_pattern_makes_a_long_topic_costly(pattern: str, piece: str, end: str) -> None:
    made = TopicPattern(pattern)

    # 8 times the length: 8 if linear, 64 if quadratic, far beyond if it tries everything.
    growth = cost(made, piece * 8_000 + end) / max(cost(made, piece * 1_000 + end), 1e-5)

    assert growth < 100


# -- what is refused -------------------------------------------------------------------------

REFUSED = [
    ("", 0, "empty"),
    ("a..b", 2, "segment is empty"),
    (".a", 0, "segment is empty"),
    ("a.", 2, "segment is empty"),
    ("a.b**", 3, "segment of its own"),
    ("***", 0, "segment of its own"),
    ("a.[bc", 2, "not closed"),
    ("a.[b.c]", 2, "not closed"),
    ("a.[]", 2, "not closed"),
    ("a.x[c-a]", 4, "runs backwards"),
    ("a.[^bc]", 3, "begins with '!'"),
    ("a\n", 1, "control character"),
    ("re:", 3, "nothing follows"),
    ("re:a(b", 4, "not valid"),
    ("re:a{99999999999999999999}", 3, "too large"),
]


@pytest.mark.parametrize(("pattern", "position", "problem"), REFUSED)
def test_a_bad_pattern_is_refused_with_the_position_of_the_fault(
    pattern: str, position: int, problem: str
) -> None:
    with pytest.raises(InvalidTopicError, match=problem) as caught:
        TopicPattern(pattern)

    assert (caught.value.text, caught.value.position) == (pattern, position)
    assert isinstance(caught.value, ConfigurationError)
    assert isinstance(caught.value, ValueError)


def test_the_text_of_the_error_points_at_the_fault() -> None:
    with pytest.raises(InvalidTopicError) as caught:
        TopicPattern("shop.\tx")

    first, line, caret = str(caught.value).split("\n")
    assert first.startswith(r"'shop.\tx' is not a topic pattern: at position 5, it contains")
    assert line[caret.index("^") :].startswith(r"\tx")


def test_the_error_pickles() -> None:
    error = InvalidTopicError("a..b", 2, "the segment is empty.")
    again = pickle.loads(pickle.dumps(error))

    assert isinstance(again, InvalidTopicError)
    assert (str(again), again.position) == (str(error), 2)


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidTopicError, match="not int"):
        TopicPattern(42)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("topic", "position"), [("", 0), ("a..b", 2), (".a", 0), ("a.b.", 4), ("a\tb", 1)]
)
def test_what_is_no_topic_is_refused_with_the_position(topic: str, position: int) -> None:
    assert not is_topic(topic)
    with pytest.raises(InvalidTopicError, match="is not a topic:") as caught:
        check_topic(topic)

    assert caught.value.position == position


@pytest.mark.parametrize(
    "topic", ["a", "a.b", "a.*", "sensors/kitchen", "Thing[int]", "a b", "é.ß"]
)
def test_a_topic_may_contain_anything_else(topic: str) -> None:
    check_topic(topic)
    assert is_topic(topic)


# -- NATS ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "subjects"),
    [
        ("shop.orders", ("shop.orders",)),
        ("Shop.*.Placed", ("Shop.*.Placed",)),
        ("shop.**", ("shop", "shop.>")),
        ("shop.*.**", ("shop.>",)),
        ("shop.*.*.**", ("shop.*.>",)),
        ("**", (">",)),
        ("*.**", (">",)),
        ("a[?]b.x", ("a?b.x",)),
    ],
)
def test_a_pattern_becomes_subjects(pattern: str, subjects: tuple[str, ...]) -> None:
    assert nats_subjects(pattern) == subjects
    assert nats_subjects(TopicPattern(pattern)) == subjects
    assert to_nats(pattern) == subjects[-1]


@pytest.mark.parametrize(
    ("pattern", "position"),
    [
        ("a.**.b", 2),
        ("**.**", 0),
        ("a.ord*", 2),
        ("a.b?.c", 2),
        ("a.[bc]", 2),
        ("re:a", 0),
        ("a.x y", 2),
        ("a.[*]", 2),
        ("a.>", 2),
        ("a..b", 2),
    ],
)
def test_what_nats_cannot_say_is_refused(pattern: str, position: int) -> None:
    with pytest.raises(InvalidTopicError) as caught:
        nats_subjects(pattern)

    assert caught.value.position == position


@pytest.mark.parametrize(
    ("subject", "pattern"),
    [
        ("shop.orders", "shop.orders"),
        ("shop.*.placed", "shop.*.placed"),
        ("shop.>", "shop.*.**"),
        (">", "*.**"),
        ("a?b.[c]", "a[?]b.[[]c]"),
        ("re:a.b", "[r]e:a.b"),
    ],
)
def test_a_subject_becomes_a_pattern_and_back(subject: str, pattern: str) -> None:
    assert from_nats(subject) == pattern
    assert nats_subjects(pattern) == (subject,)
    assert TopicPattern(pattern).matches(subject.replace(">", "x.y").replace("*", "x"))


@pytest.mark.parametrize(
    ("subject", "position"), [("a.>.b", 2), ("a*", 1), ("a b", 1), ("a..b", 2), ("", 0)]
)
def test_what_is_no_subject_is_refused(subject: str, position: int) -> None:
    with pytest.raises(InvalidTopicError) as caught:
        from_nats(subject)

    assert caught.value.position == position
