"""Processes that share the work on one journal and are killed: nothing is lost or repeated."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from msgbus.journal import State
from tests.counts import MEMBER_KILLS
from tests.evidence import Evidence
from tests.integration.members.effects import (
    EVENT_MODES,
    MODES,
    disorder,
    overlaps,
    repeated,
    site,
)
from tests.integration.members.forks import Fork, Forks, forks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.asyncio_only("the processes run on asyncio"),
]

WORKER = "tests.integration.members.worker"
IN_FLIGHT = 4


def start(made: Forks, path: Path, mode: str, handler: str = "work", **options: object) -> Fork:
    options = {"ttl": 1.0, "in_flight": IN_FLIGHT, **options}
    return made.start("handle", path=str(path), mode=mode, handler=handler, **options)


def start_all(made: Forks, path: Path, mode: str, count: int = 3, **options: object) -> list[Fork]:
    """Start so many processes, and wait until all of them are members."""
    started = [start(made, path, mode, **options) for _ in range(count)]  # type: ignore[arg-type]
    for one in started:
        one.until_written("started")
    return started


@pytest.mark.stress("subscriptions")
@pytest.mark.parametrize("mode", MODES)
async def test_killed_processes_lose_repeat_and_reorder_nothing(
    mode: str, tmp_path: Path, evidence: Evidence
) -> None:
    path = tmp_path / "journal.db"
    async with site(path, mode) as work:
        with forks(WORKER, tmp_path) as made:
            start_all(made, path, mode)
            for _ in range(MEMBER_KILLS):
                await work.publish(60)
                random.choice(made.running).kill()
                start(made, path, mode)
            effects = await work.until_all_have_effects()
        letters = await work.journal.find(None, [State.DEAD, State.DAMAGED])

    faults = (repeated(effects), disorder(effects, mode), overlaps(effects, mode), letters)
    if mode == "queue":  # the reply comes after the effect, so a kill between them repeats it
        assert faults[0] <= MEMBER_KILLS * IN_FLIGHT
        faults = (0, *faults[1:])
    assert faults == (0, 0, 0, [])
    evidence(
        f"kill -9 of one of three processes that share the work, {mode}",
        kills=MEMBER_KILLS,
        messages=work.published,
        lost=0,
        doubled=repeated(effects),
        reordered=disorder(effects, mode),
    )


@pytest.mark.stress("subscriptions")
@pytest.mark.parametrize("mode", EVENT_MODES)
async def test_effects_that_are_not_part_of_the_acknowledgement_are_found_twice(
    mode: str, tmp_path: Path, evidence: Evidence
) -> None:
    path, kills = tmp_path / "journal.db", 0
    async with site(path, mode) as work:
        with forks(WORKER, tmp_path) as made:
            start_all(made, path, mode, handler="unfenced")
            effects = work.effects()
            while not repeated(effects):
                assert kills < 100
                await work.publish(60)
                random.choice(made.running).kill()
                start(made, path, mode, handler="unfenced").until_written("started")
                kills += 1
                effects = await work.until_all_have_effects()

    evidence(
        f"control: kill -9, effect and acknowledgement in two commits, {mode}",
        kills=kills,
        doubled=repeated(effects),
    )
