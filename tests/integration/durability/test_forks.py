"""A process that forks: the child gets a clear error at once, and the parent goes on."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.counts import FORKS
from tests.evidence import Evidence

pytestmark = [
    pytest.mark.slow,
    pytest.mark.stress("journal"),
    pytest.mark.timeout(180),
]

ROOT = Path(__file__).resolve().parents[3]
VALUES = {"close", "letters"}
"""What may be done in a child: it closes nothing of the parent, and adds to a store in vain."""

SLOW = 4.0
"""Seconds that no child may take: one is promised, on a machine that has time for it."""


def run(folder: Path, backend: str, count: int, *more: str) -> dict[str, Any]:
    # Python 3.12 warns of every fork in a process with threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m"]
    command += ["tests.integration.durability.forker", str(folder), backend, str(count), *more]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    found["stderr"] = ended.stderr
    return found


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_forked_child_gets_a_clear_error_and_the_parent_goes_on(
    tmp_path: Path, evidence: Evidence, loop: str
) -> None:
    found = run(tmp_path, loop, FORKS)

    for child in found["children"]:
        assert child["exit"] == 0, found["stderr"]
        assert child["seconds"] < SLOW
        if child["call"] in VALUES:
            assert child["found"] == "value"
        else:
            assert "before this process was forked" in child["found"]
            assert "after the fork" in child["found"]
    assert found["handled"] == list(range(found["published"]))
    assert found["is_sound"]
    assert found["letters"] == 1
    slowest = max(child["seconds"] for child in found["children"])
    evidence(
        f"forks of a process that publishes, on {loop}",
        forks=len(found["children"]),
        published=found["published"],
        milliseconds_at_most=round(1_000 * slowest),
        lost=found["published"] - len(set(found["handled"])),
        doubled=len(found["handled"]) - len(set(found["handled"])),
    )


def test_children_that_do_not_know_that_they_are_forked_hang(
    tmp_path: Path, evidence: Evidence
) -> None:
    found = run(tmp_path, "asyncio", 1, "blind")

    assert [child["found"] for child in found["children"]] == ["nothing"]
    evidence("control: a forked child that is not told", forks=1, hung=1)


AFTER = """
import os, sys
import anyio
from msgbus import Event, MessageBus

class Placed(Event, name="forks.Placed"):
    number: int

bus = MessageBus(journal=f"sqlite:///{sys.argv[1]}/shop.db?reserve=0")
handled = []

@bus.on(Placed, durable=False)
async def handle(event: Placed) -> None:
    handled.append(event.number)

async def main(first):
    async with bus:
        for number in range(first, first + 20):
            await bus.publish(Placed(number=number))
        await bus.settled()
        assert handled == list(range(first, first + 20)), handled

child = os.fork()
anyio.run(main, 0 if child else 100)
if child:
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_bus_that_is_started_after_the_fork_works_in_both(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AFTER, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        found = connection.execute("SELECT count(*) FROM msgbus_messages").fetchone()
    assert found == (40,)
