"""The demo, examples/shop: what it shows must add up, and what does not must be found."""

from __future__ import annotations

import copy
import dataclasses
import re
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from examples.shop import __main__ as app, durable, rush
from examples.shop.checks import Equation, check_durable, check_rush
from examples.shop.durable import Durable
from examples.shop.messages import Card, make_orders
from examples.shop.rush import Rush
from examples.shop.worker import BUFFER
from msgbus import MissingExtraError, MsgBusError
from tests.docs.pages import ROOT

ORDERS = 1_500
MAIL, STOCK = "send_receipt", "take_stock"


def run_shop(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "examples.shop", "--folder", str(folder), *arguments],
        cwd=ROOT, check=False, capture_output=True, text=True, encoding="utf-8", timeout=120,
    )  # fmt: skip


def wrong_ones(equations: list[Equation]) -> set[str]:
    return {equation.subject for equation in equations if not equation.holds}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shop") / "files"


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    done = run_shop(folder, "--orders", str(ORDERS), "--seed", "3", "--details", "--no-report")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def day() -> Rush:
    return anyio.run(rush.run, make_orders(ORDERS, seed=3))


@pytest.fixture(scope="module")
def act(tmp_path_factory: pytest.TempPathFactory) -> Durable:
    folder = tmp_path_factory.mktemp("act")
    durable.clear(folder)
    act = Durable(make_orders(200, seed=5), folder)
    anyio.run(durable.run, act)
    return act


# -- what one sees ---------------------------------------------------------------------------------


def test_it_says_in_a_screen_what_happened_and_that_everything_adds_up(
    printed: str, folder: Path
) -> None:
    again = run_shop(folder, "--orders", "300", "--no-report")  # in the folder of the run before

    assert (again.returncode, again.stderr) == (0, "")
    lines = again.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert re.search(r"worker 1 \(process (\d+)\)[^\n]*\n +kill -9 \1: [1-9]", again.stdout)
    assert "takes over" in again.stdout
    assert re.fullmatch(r"Everything adds up: all \d+ equations hold\.", lines[-1])
    assert printed.splitlines()[:3] == lines[:3]


def test_details_are_every_equation_each_circuit_and_each_kind_of_dead_letter(printed: str) -> None:
    lines = printed.splitlines()
    equations = [line for line in lines if line.startswith("ok ")]

    assert lines[-1] == f"Everything adds up: all {len(equations)} equations hold."
    assert len(equations) >= 59
    assert "WRONG" not in printed
    assert "CircuitClosedEvent: probes succeeded" in lines
    assert any("dead letters: shop.OrderPlaced, ValueError" in line for line in lines)


def test_a_single_order_adds_up_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--orders", "1", "--no-report", "--folder", str(tmp_path)]) == 0
    assert "Everything adds up" in capsys.readouterr().out


@pytest.mark.parametrize("orders", ["0", "1000000"])
def test_too_few_and_too_many_orders_are_refused(
    orders: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app.main(["--orders", orders, "--folder", str(tmp_path)])

    assert ended.value.code == 2
    assert "from 1 to 100000" in capsys.readouterr().err


def test_it_is_short_and_in_few_files() -> None:
    files = list((ROOT / "examples" / "shop").glob("*.py"))

    assert len(files) <= 8
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 900


# -- the first act ---------------------------------------------------------------------------------


def test_the_first_act_adds_up(day: Rush) -> None:
    assert wrong_ones(check_rush(day)) == set()


def test_it_shows_what_it_promises(day: Rush) -> None:
    handlers, events = day.stats.handlers, day.stats.events

    assert handlers["show_live"].dropped > 0
    assert handlers["wrap_gift"].filtered > 0
    assert handlers[MAIL].failed > 0
    assert handlers["count_import"].handled > 0
    assert handlers["book_ledger"].failed == 0
    assert events["CallbackRequested"].admitted == 25
    assert events["CallbackRequested"].rejected > 0


def test_the_circuit_opens_probes_too_early_and_closes(day: Rush) -> None:
    names = [type(event).__name__ for event in day.shop.heard]
    states = [name for name in names if name.startswith("Circuit")]

    assert states[:3] == ["CircuitOpenedEvent", "CircuitHalfOpenedEvent", "CircuitOpenedEvent"]
    assert states[-1] == "CircuitClosedEvent"
    assert states.count("CircuitClosedEvent") == 1
    assert day.stats.circuits == {"book_ledger": "closed"}


def test_dead_letters_of_receipts_are_replayed_and_those_of_orders_stay(day: Rush) -> None:
    bounced, failed = day.shop.done["receipts bounced"], day.till["failed"]
    groups = {(one.message_type, one.handler, one.error_type): one.count for one in day.groups}

    assert bounced > 0 < failed
    assert groups == {
        ("shop.PlaceOrder", "place_order", "ConnectionError"): failed,
        ("shop.OrderPlaced", MAIL, "ValueError"): bounced,
    }
    assert (day.replay.succeeded, day.replay.failed) == (bounced, 0)
    assert day.replay.reasons == {"answered": failed}
    assert day.letters_left == day.stats.dead_letters == failed


def test_the_same_seed_gives_the_same_counts(day: Rush) -> None:
    again = anyio.run(rush.run, make_orders(ORDERS, seed=3))

    def comparable(one: Rush) -> tuple[Any, ...]:
        done = {name: count for name, count in one.shop.done.items() if name != "lines shown"}
        return one.till, done, one.shop.ledger, one.replay, one.letters_left

    assert comparable(again) == comparable(day)
    assert make_orders(50, seed=1) != make_orders(50, seed=2)


def test_every_order_of_a_book_has_its_number_and_a_card() -> None:
    book = make_orders(1_003, seed=1)

    assert [order.number for order in book] == list(range(1_003))
    assert {order.card for order in book} == set(Card)


def test_whichever_count_is_wrong_an_equation_finds_it(day: Rush) -> None:
    """The counts of tills, handlers and ledger, each one too high."""
    unnoticed: list[str] = []

    for name in day.till:
        cooked = dataclasses.replace(day, till=day.till + Counter({name: 1}))
        unnoticed += [] if wrong_ones(check_rush(cooked)) else [name]
    for name in day.shop.done:
        shop = dataclasses.replace(day.shop, done=day.shop.done + Counter({name: 1}))
        cooked = dataclasses.replace(day, shop=shop)
        unnoticed += [] if wrong_ones(check_rush(cooked)) else [name]
    for name in ("entries", "cents", "hiccups", "calls_while_down"):
        ledger = copy.copy(day.shop.ledger)
        setattr(ledger, name, getattr(ledger, name) + 1)
        cooked = dataclasses.replace(day, shop=dataclasses.replace(day.shop, ledger=ledger))
        unnoticed += [] if wrong_ones(check_rush(cooked)) else [name]

    assert unnoticed == []


@pytest.mark.parametrize(
    "fate", ["handled", "failed", "filtered", "dropped", "abandoned", "queued"]
)
def test_whatever_the_bus_miscounts_an_equation_finds_it(day: Rush, fate: str) -> None:
    for name, handler in day.stats.handlers.items():
        wrong = dataclasses.replace(handler, **{fate: getattr(handler, fate) + 1})
        stats = dataclasses.replace(day.stats, handlers={**day.stats.handlers, name: wrong})

        assert {name, "all handlers"} <= wrong_ones(
            check_rush(dataclasses.replace(day, stats=stats))
        )


# -- the second act --------------------------------------------------------------------------------


def test_the_second_act_adds_up_with_work_for_both_workers(act: Durable) -> None:
    assert wrong_ones(check_durable(act)) == set()
    assert len(check_durable(act)) == 17
    for name in (MAIL, STOCK):
        assert {worker for _, worker in act.handlers[name].rows} == {1, 2}
    assert act.handlers[MAIL].dead
    assert not act.handlers[STOCK].dead


def test_the_second_worker_says_what_it_found(act: Durable) -> None:
    log = (act.folder / "worker-2.log").read_text(encoding="utf-8")

    found = re.search(r"journal_opened .*subscriptions=2 behind=(\d+)", log)
    assert found is not None
    assert int(found[1]) > 0


def test_somebody_else_finds_the_same_in_the_files(act: Durable) -> None:
    with closing(sqlite3.connect(act.folder / "shop.db")) as connection:
        taken = [row[0] for row in connection.execute("SELECT number FROM shelf")]
        dead = connection.execute("SELECT count(*) FROM msgbus_letters").fetchone()[0]
    lines = (act.folder / "receipts.txt").read_text(encoding="utf-8").splitlines()
    sent = {int(line.split()[0]) for line in lines}

    assert len(taken) == len(set(taken)) == act.till["accepted"]
    assert len(sent) + dead == act.till["accepted"]
    assert sent <= set(taken)


def altered(act: Durable, name: str, **changes: Any) -> Durable:
    handlers = {**act.handlers, name: act.handlers[name]._replace(**changes)}
    return dataclasses.replace(act, handlers=handlers)


def test_a_lost_receipt_is_found(act: Durable) -> None:
    rows = act.handlers[MAIL].rows
    lost = [row for row in rows if row[0] != rows[-1][0]]

    assert wrong_ones(check_durable(altered(act, MAIL, rows=lost))) == {f"{MAIL}: sales"}


def test_goods_that_were_taken_twice_are_found(act: Durable) -> None:
    rows = act.handlers[STOCK].rows

    assert wrong_ones(check_durable(altered(act, STOCK, rows=[*rows, rows[0]]))) == {
        f"{STOCK}: again"
    }


def test_too_many_repeated_receipts_are_found(act: Durable) -> None:
    rows = act.handlers[MAIL].rows
    often = rows + rows[:1] * (BUFFER + 1)

    assert wrong_ones(check_durable(altered(act, MAIL, rows=often))) == {f"{MAIL}: again"}


@pytest.mark.parametrize("name", [MAIL, STOCK])
def test_another_order_is_found(act: Durable, name: str) -> None:
    rows = list(reversed(act.handlers[name].rows))

    assert wrong_ones(check_durable(altered(act, name, rows=rows))) == {f"{name}: order"}


@pytest.mark.parametrize("name", [MAIL, STOCK])
def test_a_cursor_that_lags_is_found(act: Durable, name: str) -> None:
    assert wrong_ones(check_durable(altered(act, name, cursor=0))) == {f"{name}: cursor"}


def test_an_order_that_nobody_placed_is_found(act: Durable) -> None:
    rows = [*act.handlers[MAIL].rows, (10**6, 2)]

    assert wrong_ones(check_durable(altered(act, MAIL, rows=rows))) == {
        f"{MAIL}: sales", f"{MAIL}: order", f"{MAIL}: unknown",
    }  # fmt: skip


def test_units_and_dead_letters_are_counted_too(act: Durable) -> None:
    dead = altered(act, STOCK, dead=[10**6])

    assert wrong_ones(check_durable(dataclasses.replace(act, units=act.units + 1))) == {"goods"}
    assert wrong_ones(check_durable(dead)) == {"dead letters", f"{STOCK}: sales"}


# -- what does not add up is told ------------------------------------------------------------------


def lose_a_sale_of_the_day(monkeypatch: pytest.MonkeyPatch) -> str:
    run = rush.run

    async def cooked(*arguments: Any) -> Rush:
        day = await run(*arguments)
        day.shop.done["labels printed"] -= 1
        return day

    monkeypatch.setattr(rush, "run", cooked)
    return r"WRONG labels: \d+ sales = \d+ printed\n1 of 59 equations"


def lose_a_cursor(monkeypatch: pytest.MonkeyPatch) -> str:
    run = durable.run

    async def cooked(act: Durable) -> None:
        await run(act)
        act.handlers[STOCK] = act.handlers[STOCK]._replace(cursor=-1)

    monkeypatch.setattr(durable, "run", cooked)
    return rf"WRONG {STOCK}: cursor: \d+ sales = 0 behind the cursor\n1 of 59 equations"


@pytest.mark.parametrize("lose", [lose_a_sale_of_the_day, lose_a_cursor])
def test_what_does_not_add_up_ends_with_1_and_names_the_equation(
    lose: Callable[[pytest.MonkeyPatch], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = lose(monkeypatch)

    assert app.main(["--orders", "100", "--no-report", "--folder", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert re.search(f"{text} do not hold", printed)
    assert "adds up" not in printed


def test_a_count_below_zero_is_wrong_even_if_the_sums_are_equal() -> None:
    assert Equation("units", {"sold": 1}, {"taken": 1}).holds
    assert not Equation("units", {"sold": 1}, {"taken": 2}).holds
    assert not Equation("units", {"sold": 1}, {"taken": 2, "left": -1}).holds


# -- the worker and its folder ---------------------------------------------------------------------


def test_a_worker_that_ends_by_itself_is_an_error(tmp_path: Path) -> None:
    durable.clear(tmp_path)
    (tmp_path / "shop.db").write_bytes(b"this is no journal" * 100)

    async def wait_for_it() -> None:
        with durable.start_worker(tmp_path, 1) as worker:
            await durable.wait_until(lambda: durable.is_active(tmp_path, 1), worker)

    with pytest.raises(ChildProcessError, match="ended with code 1"):
        anyio.run(wait_for_it)
    assert "NotAJournalError" in (tmp_path / "worker-1.log").read_text(encoding="utf-8")


def test_a_worker_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.shop.worker", str(tmp_path), "1"]

    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60
    )

    assert done.returncode == 0, done.stderr


def test_a_new_run_removes_what_an_old_one_left(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    durable.clear(folder)
    (folder / "receipts.txt").write_text("1 1\n")
    for name in ("shop.db", "shop.db-wal", "worker-1.log", "report.html", "notes.txt"):
        (folder / name).touch()

    durable.clear(folder)

    assert {file.name for file in folder.iterdir()} == {".gitignore", "notes.txt", "receipts.txt"}
    assert (folder / "receipts.txt").read_text() == ""


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "shop.db").write_text("mine")

    done = run_shop(tmp_path)

    assert done.returncode == 1
    assert "Name another folder: --folder PATH" in done.stderr
    assert done.stdout == ""
    assert (tmp_path / "shop.db").read_text() == "mine"


# -- the report ------------------------------------------------------------------------------------


class FakePipeline:
    """In place of the one that starts a JVM; tests/spark has the real one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def open(self, url: str) -> FakePipeline:
        assert url.startswith("sqlite:///")
        return self

    def report(self, path: Path) -> Path:
        if self.error is not None:
            raise self.error
        path.write_text("a report")
        return path


@pytest.mark.parametrize("is_wanted", [True, False])
def test_the_report_is_made_and_it_is_told_where(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    is_wanted: bool,
) -> None:
    monkeypatch.setattr(app, "pipeline", FakePipeline())

    app.write_report(tmp_path, is_wanted=is_wanted)

    assert (tmp_path / "report.html").read_text() == "a report"
    assert f"The report is in {tmp_path / 'report.html'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MsgBusError("There is no Java here."), "MsgBusError: There is no Java here."),
        (RuntimeError("first line\nsecond line"), "RuntimeError: first line"),
    ],
)
def test_a_report_that_nobody_asked_for_may_fail_in_a_line(
    error: Exception,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(app, "pipeline", FakePipeline(error))

    app.write_report(tmp_path, is_wanted=False)

    assert capsys.readouterr().out.splitlines()[-1] == f"No report this time: {text}"
    with pytest.raises(type(error)):
        app.write_report(tmp_path, is_wanted=True)


def test_without_pyspark_a_line_says_how_to_get_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_nothing(name: str) -> None:
        assert name == "pyspark"

    monkeypatch.setattr(app, "find_spec", find_nothing)

    app.write_report(tmp_path, is_wanted=False)

    [line] = capsys.readouterr().out.splitlines()
    assert 'pip install "msgbus[spark]"' in line


def test_a_report_that_was_asked_for_needs_pyspark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("pyspark")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)

    with pytest.raises(MissingExtraError, match=r"pip install 'msgbus\[spark\]'"):
        app.write_report(tmp_path, is_wanted=True)
