"""Processes that share the work on one journal: fairly, and they take over from each other."""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from pathlib import Path
from time import monotonic

import pytest

from tests.evidence import Evidence
from tests.integration.members.effects import GROUPS, Effect, disorder, overlaps, site
from tests.integration.members.forks import Fork, forks
from tests.integration.members.test_kills import WORKER, start, start_all

pytestmark = [
    pytest.mark.slow,
    pytest.mark.stress("subscriptions"),
    pytest.mark.timeout(300),
    pytest.mark.asyncio_only("the processes run on asyncio"),
]

TTL = 1.0
MESSAGES = 1_200


@pytest.mark.parametrize("mode", ["shared", "queue"])
async def test_no_process_is_idle_while_others_have_work(
    mode: str, tmp_path: Path, evidence: Evidence
) -> None:
    path = tmp_path / "journal.db"
    async with site(path, mode) as work:
        with forks(WORKER, tmp_path) as made:
            started = start_all(made, path, mode, handler="brief")
            await work.until_members_have_met()
            await work.publish_at_once(MESSAGES)
            started[0].until(lambda: len(handled(started)) >= MESSAGES)
            # Now: they are killed one by one, and the last may repeat what others had in flight.
            numbers, share = handled(started), sorted(len(handled([one])) for one in started)

    assert sorted(numbers) == list(range(MESSAGES))
    assert share[0] > MESSAGES / 3 / 3, f"a third of a fair share at least: {share}"
    evidence(
        f"three processes share {MESSAGES} messages, {mode}",
        least=share[0],
        most=share[-1],
        lost=0,
    )


def handled(started: list[Fork]) -> list[int]:
    """Return the numbers that processes have handled, one process after the other."""
    return [int(number) for one in started for _, number in one.lines("handled")]


def owners(effects: list[Effect]) -> dict[int, list[int]]:
    """Return the processes of each key, each time that it changed."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for one in effects:
        pids = found[one.number % GROUPS]
        if not pids or pids[-1] != one.pid:
            pids.append(one.pid)
    return found


async def test_a_key_stays_with_one_process_while_the_members_stay(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    async with site(path, "key_shared") as work:
        with forks(WORKER, tmp_path) as made:
            start_all(made, path, "key_shared", 2, ttl=TTL)
            await work.publish(1)
            await work.until_all_have_effects()
            # Partitions are balanced a moment after the second has joined.
            before = Counter[int]()
            while len(before) < 2:
                await work.publish(20)
                before = Counter(one.pid for one in (await work.until_all_have_effects())[-20:])
            steady = len(work.effects())
            await work.publish(200)
            effects = await work.until_all_have_effects()

    assert {key: len(pids) for key, pids in owners(effects[steady:]).items()} == dict.fromkeys(
        range(GROUPS), 1
    )


@pytest.mark.parametrize("how", ["joins", "leaves", "is killed", "is stopped"])
async def test_the_order_of_keys_holds_when_a_member(
    how: str, tmp_path: Path, evidence: Evidence
) -> None:
    path = tmp_path / "journal.db"
    async with site(path, "key_shared") as work:
        with forks(WORKER, tmp_path) as made:
            first, *_ = start_all(made, path, "key_shared", 2, ttl=TTL)
            await work.publish(100)
            began = monotonic()
            if how == "joins":
                start(made, path, "key_shared", ttl=TTL).until_written("started")
            elif how == "is stopped":
                first.stop(path)
            else:
                first.signal(signal.SIGTERM if how == "leaves" else signal.SIGKILL)
                first.wait()
            await work.publish(100)
            effects = await work.until_all_have_effects()
            took = monotonic() - began
            if how == "is stopped":
                first.signal(signal.SIGCONT)

    assert (disorder(effects, "key_shared"), overlaps(effects, "key_shared")) == (0, 0)
    evidence(
        f"key-shared: order per key when a member {how}",
        messages=200,
        milliseconds=round(took * 1000),
        lost=0,
        reordered=0,
    )


@pytest.mark.parametrize("mode", ["exclusive", "key_shared", "shared", "queue"])
async def test_the_work_of_a_killed_process_goes_on_at_once(
    mode: str, tmp_path: Path, evidence: Evidence
) -> None:
    """With a TTL of a minute: the process is seen to be gone, and nothing waits for the TTL."""
    path = tmp_path / "journal.db"
    async with site(path, mode) as work:
        with forks(WORKER, tmp_path) as made:
            first, _ = start_all(made, path, mode, 2, ttl=60.0)
            await work.publish(20)
            first.kill()
            killed = monotonic()
            await work.publish(20)
            await work.until_all_have_effects(within=30.0)
            took = monotonic() - killed

    evidence(
        f"take-over from a killed process, {mode}", kills=1, milliseconds=round(took * 1000), lost=0
    )
