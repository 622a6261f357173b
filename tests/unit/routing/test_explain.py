"""Explain the routes of a topic: data, text and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from msgbus.routing import PatternRouter
from msgbus.routing.__main__ import main

ROUTES = """\
# pattern        endpoint  priority
shop.orders.*    orders
shop.**          audit     10

re:shop.*        letters
shop.**.placed   placed    -1
shop.returns     returns
"""


def router() -> PatternRouter:
    made = PatternRouter()
    made.register_route("shop.orders.*", "orders")
    made.register_route("shop.**", "audit", 10)
    made.register_route("re:shop.*", "letters")
    made.register_route("shop.**.placed", "placed", -1)
    made.register_route("shop.returns", "returns")
    return made


def test_an_explanation_has_the_matches_in_order_and_why() -> None:
    found = router().explain("shop.orders.placed")

    assert [(one.rank, one.route.endpoint_id, one.how, one.why_here) for one in found.matches] == [
        (1, "audit", "shop = shop, ** = orders.placed.", "first, with the highest priority (10)."),
        (2, "orders", "shop = shop, orders = orders, * = placed.", "its priority 0 is below 10."),
        (
            3,
            "letters",
            "the regular expression matches the whole topic.",
            "the same priority 0, and registered later (number 3, after 1).",
        ),
        (
            4,
            "placed",
            "shop = shop, ** = orders, placed = placed.",
            "its priority -1 is below 0.",
        ),
    ]
    assert found.registered == 5


def test_an_explanation_gives_what_the_router_gives() -> None:
    made = router()

    for topic in ("shop.orders.placed", "SHOP", "shop.returns", "elsewhere", "no..topic"):
        found = made.explain(topic)
        assert [one.route for one in found.matches] == made.find_all_routes(topic)
        assert found.chosen is made.find_route(topic)


def test_a_star_that_takes_nothing_is_shown() -> None:
    made = PatternRouter()
    made.register_route("**.a.**.a", "x")

    (match,) = made.explain("A.b.A").matches

    assert match.how == "** = nothing, a = A, ** = b, a = A."


def test_where_there_is_a_choice_the_first_star_takes_little() -> None:
    made = PatternRouter()
    made.register_route("a.**.b.**", "x")

    (match,) = made.explain("a.b.c.b").matches

    assert match.how == "a = a, ** = nothing, b = b, ** = c.b."


def test_the_text_is_for_people() -> None:
    assert str(router().explain("shop.returns")) == (
        "'shop.returns' matches 3 of 5 routes.\n"
        "1. shop.** -> audit\n"
        "     how:   shop = shop, ** = returns.\n"
        "     rank:  first, with the highest priority (10).\n"
        "2. re:shop.* -> letters\n"
        "     how:   the regular expression matches the whole topic.\n"
        "     rank:  its priority 0 is below 10.\n"
        "3. shop.returns -> returns\n"
        "     how:   the pattern is the topic itself.\n"
        "     rank:  the same priority 0, and registered later (number 5, after 3)."
    )
    assert str(PatternRouter().explain("a")) == "'a' matches 0 of 0 routes."


# -- the command -------------------------------------------------------------------------------


@pytest.fixture
def routes(tmp_path: Path) -> str:
    file = tmp_path / "routes.txt"
    file.write_text(ROUTES, encoding="utf-8")
    return str(file)


def test_the_command_prints_the_explanation(
    routes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "shop.orders.placed", "--routes", routes]) == 0

    assert capsys.readouterr().out == f"{router().explain('shop.orders.placed')}\n"


def test_the_command_prints_data(routes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "shop.orders.placed", "--routes", routes, "--json"]) == 0

    printed = json.loads(capsys.readouterr().out)
    assert printed == router().explain("shop.orders.placed").as_dict()
    assert printed["matches"][0]["endpoint_id"] == "audit"


def test_the_command_says_when_nothing_matches(
    routes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "elsewhere", "--routes", routes]) == 1
    assert main(["explain", "SHOP.x", "--routes", routes, "--case-sensitive"]) == 1

    assert "matches 0 of 5 routes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("shop.[ x", "Line 8: 'shop.[' is not a topic pattern: at position 5"),
        ("shop", "Line 8 is not 'PATTERN ENDPOINT [PRIORITY]': shop"),
        ("shop x high", "Line 8 is not"),
        ("shop x 1 2", "Line 8 is not"),
    ],
)
def test_a_wrong_line_is_named(
    routes: str, line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path(routes).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")

    assert main(["explain", "shop", "--routes", routes]) == 2

    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""


def test_a_bad_topic_or_a_missing_file_is_said(
    routes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "shop..x", "--routes", routes]) == 2
    assert "is not a topic" in capsys.readouterr().err

    assert main(["explain", "shop", "--routes", f"{routes}.not"]) == 2
    assert "routes.txt.not" in capsys.readouterr().err


def test_it_runs_as_a_module_and_its_help_teaches() -> None:
    command = [sys.executable, "-W", "error", "-m", "msgbus.routing", "explain"]
    done = subprocess.run(
        [*command, "shop.a", "--routes", "-"],
        input="shop.* orders\n", capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    help_text = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, timeout=50, check=True
    ).stdout

    assert (done.returncode, done.stderr) == (0, "")
    assert "1. shop.* -> orders" in done.stdout
    for taught in ("one route per line", "re:", "Higher priority", "Case is ignored"):
        assert taught in help_text
