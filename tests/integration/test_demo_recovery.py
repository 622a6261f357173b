"""The second act of the demo: its worker is really killed, and really followed by another."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from msgbus.demo import app
from msgbus.demo.durable import act
from msgbus.demo.durable.accounts import Accounts, close_accounts
from msgbus.demo.durable.findings import Findings, HandlerFindings
from msgbus.demo.durable.folder import DemoError, Folder
from msgbus.demo.durable.process import start_worker
from msgbus.demo.durable.warehouse import FLUSH, HANDLERS, RECEIPTS, STOCK, WINDOW
from msgbus.demo.durable.worker import DONE, READY
from msgbus.demo.plan import write_plan

ROOT = Path(__file__).resolve().parents[2]
ORDERS = 1_500
"""A tenth of them are placed in the second act."""


class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.looks = 0

    def update(self, scene: act.Scene) -> None:
        del scene
        self.looks += 1

    def say(self, seconds: float, text: str, detail: str = "") -> None:
        assert seconds >= 0
        self.said += [text, detail]


def run_demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "msgbus.demo", "--folder", str(folder), *arguments]
    return subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, encoding="utf-8",
        timeout=240, env={**os.environ, "COLUMNS": "100"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "files"


@pytest.fixture(scope="module")
def report(place: Path) -> dict[str, Any]:
    done = run_demo(place, "--orders", str(ORDERS), "--seed", "5", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    data: dict[str, Any] = json.loads(done.stdout)
    return data


@pytest.fixture(scope="module")
def recovery(tmp_path_factory: pytest.TempPathFactory) -> act.Recovery:
    folder = Folder(tmp_path_factory.mktemp("act"))
    return anyio.run(act.run, write_plan(60, seed=5, jobs=2), folder, Listener())


# -- a run, and its numbers ------------------------------------------------------------------------


@pytest.mark.slow
def test_the_worker_is_killed_in_the_middle(report: dict[str, Any]) -> None:
    durable = report["durable"]
    at_kill = durable["at_kill"]

    assert at_kill["exit_code"] == -signal.SIGKILL
    assert 0 < at_kill["sent"] < durable["published"]
    assert 0 < at_kill["taken"] < durable["published"]
    assert at_kill["published"] < durable["published"], "the tills went on"


@pytest.mark.slow
def test_what_was_published_is_handled_by_each_durable_handler(report: dict[str, Any]) -> None:
    durable = report["durable"]

    assert report["adds_up"] is durable["adds_up"] is True
    assert set(durable["handlers"]) == set(HANDLERS)
    for handler in durable["handlers"].values():
        assert handler["distinct"] + handler["dead_letters"] == durable["published"] > 0
        assert handler["unknown"] == 0
        assert handler["by_first"] > 0
        assert handler["by_second"] > 0
        assert handler["in_order"] == handler["distinct"]


@pytest.mark.slow
def test_receipts_may_be_sent_twice_but_goods_are_taken_once(report: dict[str, Any]) -> None:
    handlers = report["durable"]["handlers"]

    assert 0 <= handlers[RECEIPTS]["again"] <= WINDOW + FLUSH
    assert handlers[STOCK]["effects"] == handlers[STOCK]["distinct"]
    assert report["durable"]["units"] == report["durable"]["till"]["real_units"]


@pytest.mark.slow
def test_receipts_to_a_wrong_address_are_dead_letters(report: dict[str, Any]) -> None:
    handlers = report["durable"]["handlers"]

    assert handlers[RECEIPTS]["dead_letters"] > 0
    assert handlers[STOCK]["dead_letters"] == 0


@pytest.mark.slow
def test_the_second_worker_says_what_it_found(report: dict[str, Any]) -> None:
    recovered = report["durable"]["recovered"]

    assert recovered["event"] == "journal_opened"
    assert recovered["subscriptions"] == len(HANDLERS)
    assert recovered["behind"] > 0


@pytest.mark.slow
def test_somebody_else_finds_the_same_in_the_files(recovery: act.Recovery) -> None:
    folder = recovery.folder
    with closing(sqlite3.connect(folder.journal)) as connection:
        taken = [row[0] for row in connection.execute("SELECT number FROM shelf")]
        dead = connection.execute("SELECT count(*) FROM msgbus_dead_letters").fetchone()[0]
    sent = [int(one) for worker in (1, 2) for one in folder.diary(worker).read_text().split()]

    assert len(taken) == len(set(taken)) == recovery.published
    assert len(set(sent)) + dead == recovery.published
    assert set(sent) <= set(taken)


@pytest.mark.slow
def test_a_second_run_begins_anew_and_shows_tables(report: dict[str, Any], place: Path) -> None:
    assert report["durable"]["journal"] == str(place / "shop.db")

    done = run_demo(place, "--orders", "200", "--no-report")

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any("kill -9" in line and "receipts are sent" in line for line in lines)
    assert any("journal_opened bus=worker-2" in line for line in lines)
    assert "published = handled + dead letters" in done.stdout
    assert "Everything adds up" in done.stdout
    assert "Nothing is lost: all " in done.stdout
    assert "✗" not in done.stdout
    assert "\x1b" not in done.stdout, "no colours in a pipe"
    assert max(map(len, lines)) <= 100


@pytest.mark.slow
def test_a_single_order_adds_up_too(tmp_path: Path) -> None:
    listener = Listener()

    recovery = anyio.run(act.run, write_plan(1, seed=1, jobs=1), Folder(tmp_path), listener)

    assert close_accounts(recovery).add_up
    assert listener.looks > 0
    assert listener.said[-2] == "all sales are handled"


# -- the accounts find what is wrong ---------------------------------------------------------------


def altered(recovery: act.Recovery, name: str, **changes: Any) -> act.Recovery:
    findings = recovery.findings
    handlers: list[HandlerFindings] = [
        dataclasses.replace(one, **changes) if one.name == name else one
        for one in findings.handlers
    ]
    return dataclasses.replace(
        recovery, findings=Findings(findings.sales, handlers, findings.units)
    )


def wrong_ones(recovery: act.Recovery) -> set[str]:
    return {one.subject for one in close_accounts(recovery).all if not one.holds}


@pytest.mark.slow
def test_a_lost_receipt_is_found(recovery: act.Recovery) -> None:
    receipts = recovery.findings.of(RECEIPTS)
    lost = altered(
        recovery, RECEIPTS, distinct=receipts.distinct - 1, effects=receipts.effects - 1,
        by_second=receipts.by_second - 1, in_order=receipts.in_order - 1,
    )  # fmt: skip

    assert wrong_ones(recovery) == set()
    assert wrong_ones(lost) == {RECEIPTS}


@pytest.mark.slow
def test_goods_that_were_taken_twice_are_found(recovery: act.Recovery) -> None:
    stock = recovery.findings.of(STOCK)
    twice = altered(recovery, STOCK, effects=stock.effects + 1, by_second=stock.by_second + 1)

    assert wrong_ones(twice) == {"goods, none twice"}


@pytest.mark.slow
def test_too_many_repeated_receipts_are_found(recovery: act.Recovery) -> None:
    receipts, much = recovery.findings.of(RECEIPTS), WINDOW + FLUSH + 1
    often = altered(
        recovery, RECEIPTS, effects=receipts.effects + much, by_second=receipts.by_second + much
    )

    assert wrong_ones(often) == {"receipts, at least once"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "subject"),
    [
        ({"in_order": 0}, f"the order of {RECEIPTS}"),
        ({"passed": 0}, f"the cursor of {RECEIPTS}"),
        ({"unknown": 1}, f"unknown orders at {RECEIPTS}"),
    ],
)
def test_other_faults_are_found(
    recovery: act.Recovery, change: dict[str, int], subject: str
) -> None:
    assert wrong_ones(altered(recovery, RECEIPTS, **change)) == {subject}


@pytest.mark.slow
def test_accounts_that_do_not_add_up_end_with_1_and_say_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cook_the_accounts(recovery: act.Recovery) -> Accounts:
        return close_accounts(altered(recovery, STOCK, passed=-1))

    monkeypatch.setattr(app, "close_accounts", cook_the_accounts)

    code = app.main(["--orders", "20", "--folder", str(tmp_path), "--no-report"])

    assert code == 1
    assert f"DO NOT HOLD: the cursor of {STOCK}" in capsys.readouterr().out


# -- the worker and its folder ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_that_ends_by_itself_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(tmp_path)
    folder.journal.write_bytes(b"this is no journal" * 100)

    async def wait_for_it() -> str:
        async with start_worker(folder, 1) as worker:
            with pytest.raises(DemoError) as caught:
                await worker.hear(READY)
            return str(caught.value)

    assert "ended by itself with code 1" in anyio.run(wait_for_it)
    assert "NotAJournalError" in capfd.readouterr().err


@pytest.mark.slow
def test_a_worker_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    command = [
        sys.executable, "-m", "msgbus.demo.durable.worker",
        folder.url, str(folder.diary(1)), "1",
    ]  # fmt: skip

    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=60
    )

    assert json.loads(done.stdout.splitlines()[-1]) == {"event": DONE}


def test_a_new_run_removes_what_an_old_one_left(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "new")
    folder.begin_anew()
    for name in ("shop.db", "shop.db-wal", "receipts-1.txt", "report.html", "notes.txt"):
        (folder.path / name).touch()

    folder.begin_anew()

    assert {one.name for one in folder.path.iterdir()} == {".gitignore", "notes.txt"}


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "shop.db").write_text("mine")

    done = run_demo(tmp_path)

    assert done.returncode == 1
    assert "Name another folder: --folder PATH" in done.stderr
    assert done.stdout == ""
    assert (tmp_path / "shop.db").read_text() == "mine"


def test_a_report_needs_the_journal(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--report", "--no-journal")

    assert done.returncode == 2
    assert "leave out --no-journal" in done.stderr
