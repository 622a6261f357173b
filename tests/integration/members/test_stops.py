"""Processes that stand still for longer than the TTL, and go on: they have lost their work."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from tests.counts import MEMBER_STOPS
from tests.evidence import Evidence
from tests.integration.members.effects import (
    EVENT_MODES,
    MODES,
    Site,
    disorder,
    overlaps,
    repeated,
    site,
)
from tests.integration.members.forks import Fork, forks
from tests.integration.members.test_kills import WORKER, start_all

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.asyncio_only("the processes run on asyncio"),
]

TTL = 0.4
CUT_OFF = 0.1
"""Seconds from noticing that the membership was lost to the end of every handler."""


async def stop_and_go_on(work: Site, victim: Fork) -> None:
    """Stop one process while messages come, and let it go on when others have done its work."""
    await work.publish(10)
    victim.stop(work.path)
    await work.publish(10)
    await work.until_all_have_effects()
    victim.signal(signal.SIGCONT)


@pytest.mark.stress("subscriptions")
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("mode", MODES)
async def test_a_process_that_was_stopped_has_no_effect_any_more(
    mode: str, processes: int, tmp_path: Path, evidence: Evidence
) -> None:
    path = tmp_path / "journal.db"
    async with site(path, mode) as work:
        with forks(WORKER, tmp_path) as made:
            started = start_all(made, path, mode, processes, ttl=TTL)
            for _ in range(MEMBER_STOPS):
                await stop_and_go_on(work, random.choice(started))
            effects = await work.until_all_have_effects()
            losses = sum(len(one.lines("lost")) for one in started)

    faults = (repeated(effects), disorder(effects, mode), overlaps(effects, mode))
    if mode == "queue":  # the reply comes after the effect, so a stop between them repeats it
        assert faults[0] <= MEMBER_STOPS * 4
        faults = (0, *faults[1:])
    assert faults == (0, 0, 0)
    assert losses or MEMBER_STOPS < 10
    evidence(
        f"SIGSTOP beyond the TTL of one of {processes} processes, {mode}",
        stops=MEMBER_STOPS,
        memberships_lost=losses,
        messages=work.published,
        lost=0,
        doubled=repeated(effects),
        reordered=disorder(effects, mode),
    )


@pytest.mark.stress("subscriptions")
@pytest.mark.parametrize("mode", EVENT_MODES)
async def test_handlers_of_a_process_that_lost_its_membership_are_cut_off(
    mode: str, tmp_path: Path, evidence: Evidence
) -> None:
    path, slowest = tmp_path / "journal.db", 0.0
    async with site(path, mode) as work:
        with forks(WORKER, tmp_path) as made:
            started = start_all(made, path, mode, 2, handler="slow", ttl=TTL)
            await work.publish(1)
            owner = await _owner(started)
            (other,) = [one for one in started if one is not owner]
            owner.stop(path)
            other.until_written("begun")
            owner.signal(signal.SIGCONT)
            owner.until_written("cancelled")
            noticed, cut = float(owner.lines("lost")[0][1]), float(owner.lines("cancelled")[0][2])
            slowest = cut - noticed
            effects = await work.until_all_have_effects()
            last_alive = max(float(words[2]) for words in owner.lines("alive"))

    assert last_alive <= cut
    assert slowest < CUT_OFF
    assert [(one.number, one.pid) for one in effects] == [(0, other.pid)]
    evidence(
        "a handler is cancelled when its process lost its membership",
        stops=1,
        milliseconds=max(round(slowest * 1000), 1),
        doubled=0,
    )


async def _owner(started: list[Fork]) -> Fork:
    """Wait for the process whose handler has begun and is at work."""
    started[0].until(lambda: any(len(one.lines("alive")) > 1 for one in started))
    return next(one for one in started if one.lines("alive"))
