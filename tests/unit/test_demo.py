"""The demo: what it shows must add up, also for somebody who does the sums again."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from msgbus import MissingExtraError
from msgbus.demo import app
from msgbus.demo.books import Books, Equation, close_books
from msgbus.demo.ledger import OUTAGE
from msgbus.demo.messages import Card
from msgbus.demo.plan import write_plan
from msgbus.demo.rush import JOBS

pytestmark = pytest.mark.slow  # most of them run the whole demo in a process

ROOT = Path(__file__).resolve().parents[2]
ORDERS = 600
FATES = ("handled", "failed", "filtered", "dropped", "abandoned", "queued", "running")


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The first act; the second has tests of its own."""
    return subprocess.run(
        [sys.executable, "-m", "msgbus.demo", "--no-journal", *arguments],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    done = run_demo("--orders", str(ORDERS), "--seed", "3", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    data: dict[str, Any] = json.loads(done.stdout)
    return data


def test_every_order_was_accepted_declined_or_broken(report: dict[str, Any]) -> None:
    till, command = report["till"], report["bus"]["commands"]["place_order"]

    assert till["placed"] == command["sent"] == ORDERS
    assert till["accepted"] + till["declined"] + till["broken"] == ORDERS
    assert command["handled"] == till["accepted"]
    assert command["failed"] == till["declined"] + till["broken"]


def test_every_published_event_was_admitted_filtered_or_rejected(report: dict[str, Any]) -> None:
    till, events = report["till"], report["bus"]["events"]
    published = {
        "OrderPlaced": till["accepted"],
        "CallbackRequested": till["declined"],
        "ReviewRequested": till["reviews_soon"],
    }

    for name, number in published.items():
        assert number == sum(events[name][fate] for fate in ("admitted", "filtered", "rejected"))


def test_every_admitted_pair_has_exactly_one_fate(report: dict[str, Any]) -> None:
    admitted = sum(event["pairs"] for event in report["bus"]["events"].values())
    handlers = report["bus"]["handlers"].values()

    assert admitted == sum(handler[fate] for handler in handlers for fate in FATES)


def test_each_handler_of_a_sale_got_every_sale(report: dict[str, Any]) -> None:
    sales = report["bus"]["events"]["OrderPlaced"]["admitted"]
    names = {
        "send_receipt", "book_ledger", "take_stock", "analyse", "wrap_gift", "print_label",
        "show_live",
    }  # fmt: skip
    replayed = {"send_receipt": report["aftermath"]["mended"]}

    for name in names:
        handler = report["bus"]["handlers"][name]
        given = sum(handler[fate] for fate in FATES)
        assert given == sales + replayed.get(name, 0), name


def test_nothing_is_left_when_the_shop_has_closed(report: dict[str, Any]) -> None:
    for handler in report["bus"]["handlers"].values():
        assert handler["queued"] == handler["running"] == handler["abandoned"] == 0
    assert report["drain"]["abandoned"] == 0
    assert report["drain"]["scheduled"] == report["till"]["reviews_later"] > 0


def test_it_shows_what_it_promises(report: dict[str, Any]) -> None:
    handlers, events = report["bus"]["handlers"], report["bus"]["events"]

    assert handlers["show_live"]["dropped"] > 0
    assert handlers["wrap_gift"]["filtered"] > 0
    assert handlers["send_receipt"]["failed"] > 0
    assert handlers["note_failure"]["handled"] == handlers["send_receipt"]["failed"]
    assert handlers["note_end"]["handled"] == JOBS
    assert handlers["Shop.count_import"]["handled"] == report["shop"]["published_in_jobs"] > 0
    assert 0 < report["shop"]["lists_analysed"] < handlers["analyse"]["handled"]
    assert events["OrderPlaced"]["filtered"] > 0


def test_what_failed_once_was_tried_again_and_went_well(report: dict[str, Any]) -> None:
    ledger, trouble = report["ledger"], report["trouble"]

    assert ledger["hiccups"] > 0
    assert ledger["calls_while_down"] == OUTAGE
    assert trouble["retries"] == ledger["hiccups"] + OUTAGE
    assert ledger["entries"] == report["till"]["real_orders"]
    assert ledger["cents"] == report["till"]["real_cents"]
    assert report["bus"]["handlers"]["book_ledger"]["failed"] == 0


def test_the_circuit_opens_looks_too_early_and_closes(report: dict[str, Any]) -> None:
    history = report["trouble"]["circuit"]
    moments = [note["seconds"] for note in history]

    states = [note["state"] for note in history]
    assert states[:3] == ["open", "half open", "open"]
    # The order that came too early goes on with its retries, and one of them closes it.
    assert [state for state in states[3:] if state != "half open"] == ["closed"]
    assert {note["circuit"] for note in history} == {"book_ledger"}
    assert moments == sorted(moments)
    assert report["bus"]["circuits"] == {"book_ledger": "closed"}


def test_letters_of_bounced_receipts_are_corrected_and_replayed(report: dict[str, Any]) -> None:
    shop, aftermath = report["shop"], report["aftermath"]
    bounced = shop["receipts_bounced"]

    assert bounced > 0
    assert aftermath["mended"] == aftermath["replay"]["succeeded"] == bounced
    assert aftermath["replay"]["failed"] == 0
    assert shop["receipts_sent_again"] == bounced
    assert shop["receipts_sent"] + bounced == report["till"]["real_orders"]


def test_letters_of_broken_orders_stay_with_their_callers(report: dict[str, Any]) -> None:
    broken, aftermath = report["till"]["broken"], report["aftermath"]

    assert broken > 0
    assert aftermath["replay"]["skipped"] == broken
    assert aftermath["replay"]["reasons"] == {"answered": broken}
    assert aftermath["left"] == report["bus"]["dead_letters"] == broken


def test_letters_are_grouped_by_what_they_died_of(report: dict[str, Any]) -> None:
    groups = {
        (group["message_type"], group["handler"], group["error_type"]): group["count"]
        for group in report["aftermath"]["groups"]
    }

    assert groups == {
        ("PlaceOrder", "place_order", "ConnectionError"): report["till"]["broken"],
        ("OrderPlaced", "send_receipt", "ValueError"): report["shop"]["receipts_bounced"],
    }
    assert sum(groups.values()) == report["trouble"]["letters"]


def test_a_full_call_centre_refuses_the_rest() -> None:
    done = run_demo("--orders", "1500", "--json")

    events = json.loads(done.stdout)["bus"]["events"]
    assert events["CallbackRequested"]["admitted"] == 25
    assert events["CallbackRequested"]["rejected"] > 0


def test_the_same_seed_gives_the_same_counts(report: dict[str, Any]) -> None:
    again = json.loads(run_demo("--orders", str(ORDERS), "--seed", "3", "--json").stdout)

    def comparable(data: dict[str, Any]) -> tuple[Any, ...]:
        handlers = data["bus"]["handlers"]
        fates = {
            name: [handler[fate] for fate in FATES]
            for name, handler in handlers.items()
            if name != "show_live"  # what it drops is a matter of speed
        }
        circuit = [(note["state"], note["reason"]) for note in data["trouble"]["circuit"]]
        replay = data["aftermath"]["replay"]
        return (
            data["till"],
            data["bus"]["events"],
            fates,
            data["ledger"]["hiccups"],
            circuit,
            replay,
        )

    assert comparable(again) == comparable(report)


def test_another_seed_gives_other_orders() -> None:
    assert write_plan(50, seed=1, jobs=2) == write_plan(50, seed=1, jobs=2)
    assert write_plan(50, seed=1, jobs=2) != write_plan(50, seed=2, jobs=2)


def test_a_plan_has_every_order_once() -> None:
    plan = write_plan(1_003, seed=1, jobs=7)

    assert sorted(order.number for order in plan.orders) == list(range(1_003))
    assert sum(plan.count(card) for card in Card) == 1_003


def test_the_tables_end_with_a_verdict() -> None:
    done = run_demo("--orders", "200")

    assert done.returncode == 0, done.stderr
    assert "placed = accepted + declined + broken" in done.stdout
    assert "published = admitted + filtered + rejected" in done.stdout
    assert "what went wrong, and what became of it" in done.stdout
    assert "corrected, replayed" in done.stdout
    assert "left to their callers" in done.stdout
    assert "Everything adds up" in done.stdout
    assert "✗" not in done.stdout


@pytest.mark.parametrize("columns", [80, 120])
def test_the_tables_fit_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))

    lines = run_demo("--orders", "3000").stdout.splitlines()

    headings = [line.split() for line in lines if line.startswith("handler ")]
    fates = ["admitted", "handled", "failed", "filtered", "dropped", "abandoned", "pending"]
    times = ["p50", "p95", "p99"]
    narrow = [["handler", *fates], ["handler", *times]]
    assert headings == (narrow if columns == 80 else [["handler", *fates, *times]])
    assert max(map(len, lines)) <= columns


def test_a_single_order_adds_up_too() -> None:
    done = run_demo("--orders", "1", "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["adds_up"] is True


def test_books_that_do_not_add_up_end_with_1_and_say_which(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cook_the_books(outcome: Any) -> Books:
        books = close_books(outcome)
        wrong = Equation("the till", "in", 3, (("out", 2),))
        return dataclasses.replace(books, others=[*books.others, wrong])

    monkeypatch.setattr(app, "close_books", cook_the_books)

    assert app.main(["--orders", "20", "--no-journal"]) == 1
    assert "DO NOT HOLD: the till" in capsys.readouterr().out


def test_without_rich_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "msgbus.demo.screen", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)

    with pytest.raises(MissingExtraError, match=r"pip install 'msgbus\[cli\]'"):
        app.main(["--orders", "20", "--no-journal"])


def test_too_few_orders_are_refused() -> None:
    done = run_demo("--orders", "0")

    assert done.returncode == 2
    assert "at least 1" in done.stderr


def test_help_teaches() -> None:
    done = run_demo("--help")

    assert done.returncode == 0
    assert "Orders are commands" in done.stdout
    assert "becomes a dead letter" in done.stdout
    assert "kill -9" in done.stdout
    assert "msgbus/demo" in done.stdout
