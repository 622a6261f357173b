"""A message that ends its process is found, and those beside it are not charged for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from msgbus.journal import State
from tests.counts import POISON_SEEDS
from tests.evidence import Evidence
from tests.integration.members.effects import MODES, site
from tests.integration.members.forks import forks
from tests.integration.members.test_kills import WORKER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.asyncio_only("the processes run on asyncio"),
]

MESSAGES = 60
DEADLY = 3


@pytest.mark.stress("subscriptions")
@pytest.mark.parametrize("mode", MODES)
async def test_only_the_message_that_ends_its_process_is_dead_lettered(
    mode: str, tmp_path: Path, evidence: Evidence
) -> None:
    deaths = 0
    for seed in POISON_SEEDS:
        path = tmp_path / f"{seed}.db"
        async with site(path, mode) as work:
            await work.publish(MESSAGES)
            with forks(WORKER, tmp_path) as made:
                codes: list[int] = []
                while 0 not in codes:
                    assert len(codes) < 12
                    one = made.start(
                        "finish",
                        path=str(path),
                        mode=mode,
                        handler="deadly",
                        ttl=1.0,
                        in_flight=8,
                    )
                    codes.append(one.wait())
            letters = await work.journal.find(None, [State.DEAD])
            effects = await work.until_have_effects(set(range(MESSAGES)) - {DEADLY})
            poison = [await work.journal.record(row) for row in letters]
        deaths += len(codes) - 1
        assert set(codes) == {7, 0}
        assert [one.json()["number"] for one in poison if one is not None] == [DEADLY]
        assert DEADLY not in {one.number for one in effects}

    evidence(
        f"a message that ends its process among {MESSAGES - 1} others, {mode}",
        seeds=len(POISON_SEEDS),
        deaths=deaths,
        innocents=0,
        lost=0,
    )
