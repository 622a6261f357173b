"""The page of a report, from plain values: no Spark, no browser."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, strategies as st

from msgbus.pipeline.report.charts import (
    decades,
    linear,
    ordered,
    round_ticks,
    step_for,
    time_ticks,
)
from msgbus.pipeline.report.data import (
    Effect,
    Failure,
    HandlerLatency,
    Percentiles,
    Period,
    ReportData,
    SessionLine,
    Sessions,
    Slow,
    Stuck,
    Totals,
    Tree,
    TreeNode,
)
from msgbus.pipeline.report.markup import (
    Markup,
    count,
    duration,
    duration_tick,
    el,
    plural,
    share,
    short,
    text,
)
from msgbus.pipeline.report.page import render

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
TIMES = Percentiles(10, 0.2, 0.1, 0.4, 0.9, 1.5)


def make(evil: str = "shop.OrderPlaced", **changes: Any) -> ReportData:
    """A report with something in every section; `evil` is in every text."""
    node = TreeNode("m1", None, evil, 0, 0.0, 1.0, "ok", is_critical=True)
    fields: dict[str, Any] = {
        "source": evil,
        "made": NOON,
        "first": NOON,
        "last": NOON + 2 * MINUTE,
        "totals": Totals(5, 4, 1, 2, 10, 3, 2, 1),
        "latency": TIMES,
        "periods": [
            Period(NOON, {evil: 3, "b": 1}, 6, 2, 1, 1, TIMES),
            Period(NOON + MINUTE, {}, 0, 0, 0, 0, None),
            Period(NOON + 2 * MINUTE, {"b": 1}, 4, 1, 1, 0, TIMES),
        ],
        "handlers": [
            HandlerLatency(evil, evil, TIMES, TIMES),
            HandlerLatency("h", None, TIMES, TIMES),
        ],
        "failures": [
            Failure(evil, evil, None, {evil: 2}, 2, 1, 1, 0, 0, NOON, NOON, evil, evil),
        ],
        "failures_left_out": 3,
        "sessions": Sessions(
            {"ok": 1, "failed": 1},
            [SessionLine(evil, "failed", NOON, NOON + MINUTE, 60.0, 3, 4, 1, 1)],
            30.0,
        ),
        "tree": Tree(
            "m1", [node, node._replace(message_id="m2", causation_id="m1", depth=1)], 3, 1, 1, 2.0
        ),
        "effects": [Effect(evil, evil, 2, 1, 0.5)],
        "slowest": [Slow(evil, None, evil, "ok", 1, 2.0, 1.0, NOON)],
        "stuck": [Stuck(evil, None, "unhandled", 2, evil, 500.0)],
    }
    return ReportData(**{**fields, **changes})


class Reader(HTMLParser):
    """Checks that tags match, and remembers what is there."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


# -- the page ----------------------------------------------------------------------------------


def test_every_section_is_there_and_named() -> None:
    page = Reader(render(make()))
    assert page.open == []
    ids = {value for name, value in page.attributes if name == "id"}
    sections = {"throughput", "latency", "failures", "sessions", "causation", "slowest", "stuck"}
    assert sections <= ids
    links = {value for name, value in page.attributes if name == "href"}
    assert links == {f"#{one}" for one in sections}


def test_nothing_is_loaded_from_anywhere() -> None:
    html = render(make())
    page = Reader(html)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "use", "image"}
    assert not {name for name, _ in page.attributes} & {"src", "srcset", "action", "onclick"}
    assert "url(" not in html
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    assert ("content", policy) in page.attributes


def test_every_picture_has_a_name_for_those_who_cannot_see_it() -> None:
    html = render(make())
    assert html.count("<svg") == html.count('role="img"') == 6
    assert html.count("<table") == html.count("<table aria-label=")


def test_light_and_dark_have_the_same_colours() -> None:
    light, dark = render(make()).split("prefers-color-scheme: dark", 1)
    for name in ("page", "card", "text", "soft", "line", "c0", "c5", "good", "warn", "bad"):
        assert f"--{name}: #" in light
        assert f"--{name}: #" in dark


@pytest.mark.parametrize(
    "evil",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "' onmouseover='x",
        "</style></title><b>",
        "a\x00b\x1b[31m",
        "\ud800",
        "&lt;&amp;",
        "x" * 5000,
        "漢字 ü \u202e",
    ],
)
def test_no_text_becomes_markup(evil: str) -> None:
    html = render(make(evil))
    page = Reader(html)
    assert page.open == []
    assert page.tags == Reader(render(make())).tags
    assert {name for name, _ in page.attributes} == {
        name for name, _ in Reader(render(make())).attributes
    }
    html.encode("utf-8")


def test_a_text_is_shown_as_it_is() -> None:
    page = Reader(render(make("a <b> & 'c'")))
    assert "a <b> & 'c'" in page.words


def test_an_empty_journal_says_so() -> None:
    page = Reader(render(ReportData(source="shop.db", made=NOON)))
    assert page.open == []
    assert any("no messages" in words for words in page.words)


def test_a_journal_without_deliveries_has_a_report() -> None:
    quiet = make(
        latency=None,
        totals=Totals(5, 4, 1, 2),
        periods=[Period(NOON, {"a": 5}, 0, 0, 0, 0, None)],
        handlers=[],
        failures=[],
        failures_left_out=0,
        sessions=Sessions({}, ()),
        tree=None,
        effects=[],
        slowest=[],
        stuck=[],
    )
    words = Reader(render(quiet)).words
    for sentence in (
        "No handler has run.",
        "Nothing has failed.",
        "Nothing is stuck.",
        "No attempt failed.",
    ):
        assert sentence in words


def test_a_letter_may_be_counted_later_than_its_attempt() -> None:
    late = [Period(NOON, {"a": 1}, 1, 1, 0, 0, None), Period(NOON + MINUTE, {}, 0, 0, 0, 1, None)]
    html = render(make(periods=late))
    assert "failed: -" not in html
    assert 'height="-' not in html


def test_more_types_than_colours_share_one() -> None:
    many = {f"type{number}": number + 1 for number in range(9)}
    html = render(make(periods=[Period(NOON, many, 0, 0, 0, 0, None)]))
    assert "3 others" in html
    assert "type8: 9" in html


def test_a_tree_is_in_the_order_of_causes() -> None:
    nodes = [
        TreeNode(message_id, cause, "n", 0, 0.0, 0.0, None, is_critical=False)
        for message_id, cause in [("a", None), ("b", "a"), ("c", "a"), ("d", "b"), ("e", "gone")]
    ]
    assert [node.message_id for node in ordered(nodes)] == ["a", "b", "d", "c", "e"]


# -- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "\N{EN DASH}"),
        (0, "0 s"),
        (1.234e-6, "1.23 µs"),
        (0.000999, "999 µs"),
        (0.0123456, "12.3 ms"),
        (0.9999, "1.00 s"),
        (59.9, "59.9 s"),
        (59.99, "1 min 0 s"),
        (75, "1 min 15 s"),
        (3700, "1 h 1 min"),
        (200_000, "2 d 7 h"),
        (-0.5, "-500 ms"),
    ],
)
def test_durations(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


def test_other_numbers() -> None:
    assert [count(1234567), count(None)] == ["1,234,567", "\N{EN DASH}"]
    assert [short(0), short(950), short(1200), short(2_500_000)] == ["0", "950", "1.2k", "2.5M"]
    assert [share(0.0), share(0.00001), share(0.0052), share(0.5), share(1.0)] == [
        *("0 %", "< 0.01 %", "0.52 %", "50.0 %", "100 %")
    ]
    assert [duration_tick(0), duration_tick(0.01), duration_tick(60), duration_tick(7200)] == [
        *("0", "10 ms", "1 min", "2 h")
    ]
    assert [plural(1, "other"), plural(2000, "other")] == ["1 other", "2,000 others"]


@given(st.floats(1e-6, 1e12))
def test_ticks_are_few_and_reach_the_top(high: float) -> None:
    ticks = round_ticks(high)
    assert 2 <= len(ticks) <= 6
    assert ticks[0] == 0
    assert ticks[-1] >= high * 0.999


@given(st.floats(1e-5, 1e5), st.floats(1e-5, 1e5))
def test_decades_are_around_what_is_shown(one: float, other: float) -> None:
    low, high = sorted((one, other))
    ticks = decades(low, high)
    assert ticks[0] <= low * 1.001
    assert ticks[-1] >= high * 0.999
    assert len(ticks) >= 2


@given(st.integers(0, 10**9))
def test_no_span_has_too_many_periods(seconds: int) -> None:
    span = timedelta(seconds=seconds)
    assert span / step_for(span) <= 72


@given(st.integers(1, 10**9), st.integers(0, 86_400))
def test_moments_on_an_axis_are_few_and_inside(seconds: int, offset: int) -> None:
    first = NOON + timedelta(seconds=offset)
    last = first + timedelta(seconds=seconds)
    ticks = time_ticks(first, last)
    assert len(ticks) <= 90
    assert all(first <= at <= last for at in ticks)


def test_a_scale_of_nothing_is_in_the_middle() -> None:
    assert linear(3.0, 3.0, 0.0, 10.0)(3.0) == 5.0
    assert math.isclose(linear(0.0, 4.0, 0.0, 10.0)(1.0), 2.5)


# -- markup ------------------------------------------------------------------------------------


@given(st.text())
def test_text_is_escaped_whatever_it_is(value: str) -> None:
    made = el("p", value, title=value)
    page = Reader(made)
    assert page.tags == {"p"}
    assert page.open == []


def test_only_markup_is_left_as_it_is() -> None:
    assert el("p", Markup("<b/>"), "<b/>", 1, None, ["x", el("i")]) == (
        "<p><b/>&lt;b/&gt;1x<i></i></p>"
    )
    assert el("rect", x=1.04, y=2.0, class_="c0", rx=None) == '<rect x="1" y="2" class="c0"/>'
    assert text("a\x00") == "a�"
