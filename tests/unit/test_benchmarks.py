"""The benchmark harness: what it measures, how it judges, what it reports. Never how fast."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, timing
from benchmarks.rows import Result, Row, Verdict, judge
from benchmarks.runner import BEGIN, END, main
from benchmarks.suite import ROWS, choose
from benchmarks.timing import (
    QUICK,
    Effort,
    Handler,
    Measurement,
    Run,
    Side,
    WorkNotDoneError,
    as_speed,
    compare,
    summarise,
)
from tests import counts
from tests.counts import some
from tests.evidence import Evidence


def rows_without_budget() -> list[Row]:
    """The real rows, with nothing to be judged by: this machine may be slow today."""
    return [dataclasses.replace(row, budget=None, aim=None) for row in ROWS]


def rows_to_run() -> Sequence[Row]:
    """All of them in `make stress`, some of the light ones otherwise."""
    return ROWS if counts.STRESS else some([row for row in ROWS if not row.heavy], counts.ROWS)


def fixed_row(value: float | None, *, budget: float | None = None, name: str = "test.row") -> Row:
    """A row that always finds the same; nothing, as a peer that is not installed."""

    async def measure(effort: Effort) -> Measurement | None:
        if value is None:
            return None
        return Measurement(value, low=value, high=value, repeats=effort.repeats)

    return Row(name=name, title=f"the row {name}", baseline="plain", measure=measure, budget=budget)


# -- judging -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (5.0, Verdict.AIM),
        (6.0, Verdict.AIM),
        (6.1, Verdict.WITHIN),
        (8.0, Verdict.WITHIN),
        (8.1, Verdict.OVER),
        (12.0, Verdict.OVER),
        (12.1, Verdict.FAR_OVER),
    ],
)
def test_a_value_is_held_against_budget_and_aim(value: float, verdict: Verdict) -> None:
    assert judge(value, budget=8, aim=6) is verdict


def test_a_row_without_budget_is_not_judged() -> None:
    assert judge(1_000.0, budget=None, aim=None) is Verdict.NO_BUDGET


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (1.2, Verdict.AIM),
        (1.1, Verdict.WITHIN),
        (0.9, Verdict.WITHIN),
        (0.8, Verdict.OVER),
        (0.5, Verdict.FAR_OVER),
    ],
)
def test_a_speed_is_to_reach_budget_and_aim(value: float, verdict: Verdict) -> None:
    assert judge(value, budget=0.9, aim=1.2, is_speed=True) is verdict


def test_a_speed_is_how_many_times_as_fast_the_candidate_is() -> None:
    found = as_speed(summarise([(1.0, 2.0), (1.0, 4.0), (1.0, 8.0)]))

    assert found.value == 0.25
    assert (found.low, found.high) == (1 / 6, 1 / 3)


def test_a_row_of_a_speed_shows_that_its_limits_are_the_least() -> None:
    row = dataclasses.replace(fixed_row(1.0, budget=0.9), aim=1.2, is_speed=True)
    measured = Measurement(1.0, low=0.9, high=1.1, repeats=9, candidate=1.5e-6)

    assert report.cells(Result(row, measured))[4:] == ("≥ 0.9", "≥ 1.2", "in budget")


def test_a_budget_of_nothing_forgives_nothing() -> None:
    assert judge(0, budget=0, aim=None) is Verdict.WITHIN
    assert judge(1, budget=0, aim=None) is Verdict.FAR_OVER


def test_a_row_far_over_budget_fails_the_run_and_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [fixed_row(1.6, budget=1, name="test.slow"), fixed_row(0.9, budget=1, name="test.fast")]

    assert main([], rows=rows) == 1

    shown = capsys.readouterr()
    assert "FAILED: 1 row(s)" in shown.err
    assert "test.slow" in shown.err
    assert "test.fast" not in shown.err
    assert "FAR OVER" in shown.out


def test_a_row_slightly_over_budget_is_told_but_does_not_fail_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([], rows=[fixed_row(1.4, budget=1)]) == 0

    shown = capsys.readouterr()
    assert "over budget" in shown.out
    assert shown.err == ""


# -- running -------------------------------------------------------------------------------


def test_a_quick_run_prints_the_rows_that_were_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["commands.execute", "events.batch"]

    assert main(["--quick", *names], rows=rows_without_budget()) == 0

    shown = capsys.readouterr().out
    assert "execute, no middleware" in shown
    assert "publish, batch handler" in shown
    assert "execute, 3 middleware" not in shown


def test_json_has_every_figure_and_what_it_depends_on(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"

    main(["--quick", "commands.call", "--json", str(file)], rows=rows_without_budget())

    data = json.loads(file.read_text())
    (row,) = data["rows"]
    assert row["name"] == "commands.call"
    assert row["seconds"] > 0
    assert row["baseline_seconds"] > 0
    assert row["low"] <= row["value"] <= row["high"]
    assert row["repeats"] == QUICK.repeats
    assert row["verdict"] == "-"
    assert data["conditions"]["versions"]["pydantic"]


def test_importing_msgbus_brings_no_optional_package(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"

    assert main(["imports.optional", "--json", str(file)]) == 0

    assert json.loads(file.read_text())["rows"][0]["value"] == 0


def test_a_queued_event_takes_no_more_than_its_budget(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"

    main(["memory.queued", "--json", str(file)])

    row = json.loads(file.read_text())["rows"][0]
    assert 0 < row["value"] <= row["budget"]


@pytest.mark.slow
@pytest.mark.stress("benchmarks")
@pytest.mark.parametrize("row", rows_to_run(), ids=lambda row: row.name)
def test_rows_run(row: Row, evidence: Evidence) -> None:
    assert main(["--quick", row.name], rows=rows_without_budget()) == 0
    evidence("rows of `make bench` run, quickly", rows=1)


def test_a_peer_that_is_not_installed_leaves_its_row_empty(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "bench.json"

    assert main(["--json", str(file)], rows=[fixed_row(None)]) == 0

    assert "not installed" in capsys.readouterr().out
    assert json.loads(file.read_text())["rows"][0]["value"] is None


def test_an_unknown_name_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["nonsense"]) == 2

    assert "commands.execute" in capsys.readouterr().err


def test_list_prints_every_name_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0

    assert len(capsys.readouterr().out.splitlines()) == len(ROWS)


def test_rows_are_chosen_by_any_part_of_their_name() -> None:
    assert {row.area for row in choose(ROWS, ["peer"], quick=False)} == {"commands", "events"}
    assert [row.name for row in choose(ROWS, ["memory"], quick=False)] == ["memory.queued"]


def test_quick_leaves_heavy_rows_out_unless_they_are_named() -> None:
    heavy = next(row for row in ROWS if row.heavy)

    assert heavy in choose(ROWS, [], quick=False)
    assert heavy not in choose(ROWS, [], quick=True)
    assert choose(ROWS, [heavy.name], quick=True) == [heavy]


# -- reporting -----------------------------------------------------------------------------


def test_without_rich_the_table_is_plain_and_aligned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing_is_installed(name: str) -> None:
        del name

    monkeypatch.setattr(report, "find_spec", nothing_is_installed)

    main([], rows=[fixed_row(1.5, budget=2, name="test.a"), fixed_row(22.25, name="test.b")])

    lines = capsys.readouterr().out.splitlines()
    heading, first, second = (
        next(line for line in lines if start in line) for start in ("ratio", "test.a", "test.b")
    )
    assert first.index("1.50x") + len("1.50x") == heading.index("ratio") + len("ratio")
    assert second.index("22.2x") + len("22.2x") == heading.index("ratio") + len("ratio")


def test_markdown_is_a_table_with_one_line_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--markdown"], rows=[fixed_row(1.5, budget=2)])

    heading, rule, row, *_ = capsys.readouterr().out.splitlines()
    assert heading.count("|") == rule.count("|") == row.count("|")
    assert row.startswith("| the row test.row | plain | 1.50x |")


def test_refresh_replaces_the_table_of_a_page_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")

    main(["--refresh", str(page)], rows=[fixed_row(1.5)])

    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| 1.50x |" in text


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks")

    with pytest.raises(SystemExit, match=r"page\.md has no"):
        main(["--refresh", str(page)], rows=[fixed_row(1.5)])

    assert page.read_text() == "no marks"


# -- measuring -----------------------------------------------------------------------------


def build(number: int) -> Sequence[int]:
    return range(number)


async def handle(message: Any) -> None:
    del message


@asynccontextmanager
async def complete(handler: Handler) -> AsyncGenerator[Run]:
    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            await handler(message)

    yield run


def test_the_result_is_the_median_of_the_ratios_of_each_repeat() -> None:
    pairs = [(1.0, 2.0), (10.0, 30.0), (1.0, 100.0)]

    found = summarise(pairs)

    assert found.value == 3.0  # not 30/1, the ratio of the medians
    assert found.repeats == 3


async def test_a_side_that_leaves_messages_unhandled_is_not_timed() -> None:
    @asynccontextmanager
    async def lazy(handler: Handler) -> AsyncGenerator[Run]:
        async def run(messages: Sequence[Any]) -> None:
            for message in messages[1:]:
                await handler(message)

        yield run

    side = Side(open=complete, build=build, handler=handle)
    lazy_side = Side(open=lazy, build=build, handler=handle)

    with pytest.raises(WorkNotDoneError, match="50 messages were handled 49 times"):
        await compare(side, lazy_side, QUICK)


async def test_building_messages_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    def slow_build(number: int) -> Sequence[int]:
        spend(100.0)
        return range(number)

    async def run(messages: Sequence[Any]) -> None:
        spend(3.0)

    monkeypatch.setattr(time, "perf_counter", lambda: now)

    assert await timing.timed(run, slow_build, 10) == 3.0


async def test_both_sides_get_the_same_number_of_messages_by_turns() -> None:
    timings: list[tuple[str, int]] = []

    def side(name: str) -> Side:
        @asynccontextmanager
        async def opened(handler: Handler) -> AsyncGenerator[Run]:
            async def run(messages: Sequence[Any]) -> None:
                timings.append((name, len(messages)))
                for message in messages:
                    await handler(message)

            yield run

        return Side(open=opened, build=build, handler=handle)

    found = await compare(side("plain"), side("measured"), Effort(4, 0.0, 1))

    last = timings[-8:]
    order = ["plain", "measured", "measured", "plain"] * 2
    assert [name for name, _ in last] == order
    assert len({number for _, number in last}) == 1
    assert found.repeats == 4


async def test_the_collector_rests_while_a_side_is_timed() -> None:
    resting: list[bool] = []

    @asynccontextmanager
    async def watching(handler: Handler) -> AsyncGenerator[Run]:
        async def run(messages: Sequence[Any]) -> None:
            resting.append(not gc.isenabled())
            for message in messages:
                await handler(message)

        yield run

    side = Side(open=watching, build=build, handler=handle)
    await compare(side, side, QUICK)

    proofs = 2
    assert all(resting[proofs:])
    assert gc.isenabled()


def test_a_result_shows_the_row_and_its_spread() -> None:
    row = fixed_row(2.0, budget=3)
    measured = Measurement(2.0, low=1.8, high=2.2, repeats=9, candidate=1.5e-6)

    assert report.cells(Result(row, measured)) == (
        "the row test.row", "2.00x", "10%", "1.5 µs", "3", "", "in budget",
    )  # fmt: skip
