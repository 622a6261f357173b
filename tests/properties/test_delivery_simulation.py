"""Seeded faults on subscriptions; and some that are broken on purpose, to be found."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from msgbus.journal.operations import Operation
from msgbus.journal.records import Member
from msgbus.subscriptions.in_flight import InFlight
from msgbus.subscriptions.state import SubscriptionState
from msgbus.testing.simulation.simulation import (
    Broken,
    DeliverySimulation,
    SimulatedProcess,
    main,
    simulate,
)
from tests.counts import DELIVERY_SEEDS
from tests.evidence import Evidence

CHUNK = 25
CLEAN = Broken(lost=0, effects_twice=0, reordered=0, overlaps=0, innocents=0, unsettled=0)


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    """Keep the warnings, which the faults cause on purpose, out of the log."""
    logger = logging.getLogger("msgbus")
    was_disabled, logger.disabled = logger.disabled, True
    yield
    logger.disabled = was_disabled


@pytest.mark.stress("subscriptions")
@pytest.mark.parametrize("first", range(0, DELIVERY_SEEDS, CHUNK))
def test_no_seed_breaks_a_promise(first: int, evidence: Evidence) -> None:
    runs = {seed: simulate(seed) for seed in range(first, first + CHUNK)}
    broken = {seed: found for seed, (found, _) in runs.items() if not found.is_clean}

    assert broken == {}, (
        "replay with: python -m msgbus.testing.simulation.simulation --seeds 1 --from SEED"
    )
    histories = [history for _, history in runs.values()]
    evidence(
        "simulation of subscriptions: crashes, ended members, failed commits",
        seeds=CHUNK,
        messages=sum(len(history.keys) for history in histories),
        crashes=sum(history.deaths for history in histories),
        lost=0,
        reordered=0,
    )


# Each of these broke a promise once: a message that was handled by its row and not passed by the
# cursor, a key that was parked behind nothing, a member that nobody told of its end.
@pytest.mark.parametrize("seed", [13, 14, 27, 146, 185, 258, 407, 745])
def test_seeds_that_once_failed(seed: int) -> None:
    assert simulate(seed)[0] == CLEAN


def test_a_seed_gives_the_same_history_every_time() -> None:
    for seed in (3, 8, 185):
        first, second = simulate(seed)[1], simulate(seed)[1]
        assert (first.handled, first.deaths, first.left) == (
            second.handled,
            second.deaths,
            second.left,
        )


def test_messages_that_are_passed_before_they_are_handled_are_found_lost() -> None:
    def pass_early(process: SimulatedProcess) -> None:
        if hasattr(process.loop.state, "owned"):
            process.loop.state._at_most_once = True

    assert any(simulate(seed, pass_early)[0].lost for seed in range(40))


def test_messages_that_nobody_begins_are_found_unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    def admit(self: SubscriptionState, one: InFlight) -> None:
        if one.record.message_id == "m5":
            self.in_flight[one] = None
        else:
            original(self, one)

    original = SubscriptionState.admit
    monkeypatch.setattr(SubscriptionState, "admit", admit)

    assert any(simulate(seed)[0].unsettled for seed in range(40))


def test_effects_that_are_not_fenced_are_found_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def unfenced(one: InFlight, time: float) -> list[Operation]:
        return []

    def anybody(tables: object, member: Member) -> None:
        pass

    monkeypatch.setattr(InFlight, "acknowledgement", unfenced)
    monkeypatch.setattr("msgbus.journal.memory_tables.MemoryTables._require", anybody)

    assert any(simulate(seed)[0].effects_twice for seed in range(60))


def test_messages_that_are_handed_out_of_turn_are_found_reordered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def admit(self: SubscriptionState, one: InFlight) -> None:
        one.key = None
        original(self, one)

    original = SubscriptionState.admit
    monkeypatch.setattr(SubscriptionState, "admit", admit)

    assert any(simulate(seed)[0].reordered for seed in range(40))


def test_a_failing_seed_says_how_to_replay_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--seeds", "2", "--from", "10"]) == 0
    assert "2 seeds" in capsys.readouterr().out

    async def publish_nothing(self: DeliverySimulation, first: int) -> int:
        return self.plan.messages - first

    monkeypatch.setattr(DeliverySimulation, "_publish", publish_nothing)
    assert main(["--seeds", "1", "--from", "3"]) == 1
    text = capsys.readouterr().out
    assert "seed 3 (" in text
    assert "broke a promise: Broken(lost=" in text
    assert "lost=0" not in text
    assert "python -m msgbus.testing.simulation.simulation --seeds 1 --from 3" in text
