"""Some hundreds of seeded storms; and engines that are broken on purpose, which must be found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from msgbus.runtime.token_bucket import TokenBucket
from msgbus.subscriptions import DurableSubscription, Mode
from msgbus.subscriptions.desk import Desk
from msgbus.subscriptions.window import Entry
from msgbus.testing.simulation.checks import Violations
from msgbus.testing.simulation.simulation import Simulation, main, simulate
from tests.counts import SIMULATED_SEEDS
from tests.evidence import Evidence

CHUNK = 25


@pytest.mark.stress("subscriptions")
@pytest.mark.parametrize("first", range(0, SIMULATED_SEEDS, CHUNK))
def test_no_seed_breaks_a_promise(first: int, evidence: Evidence) -> None:
    runs = {seed: simulate(seed) for seed in range(first, first + CHUNK)}
    broken = {seed: violations for seed, (violations, _) in runs.items() if not violations.is_clean}

    assert broken == {}, (
        "replay with: python -m msgbus.testing.simulation.simulation --seeds 1 --from SEED"
    )
    histories = [history for _, history in runs.values()]
    evidence(
        "simulation: crashes, lost leases and failures on virtual time",
        seeds=CHUNK,
        messages=sum(len(history.published) for history in histories),
        crashes=sum(history.deaths for history in histories),
        lost=0,
        reordered=0,
    )


# Each of these once broke a promise: tries that went on after they were dropped, at-most-once
# that read ahead of busy keys, a standby that counted the retries of its former tenure.
@pytest.mark.parametrize("seed", [166, 230, 302, 408, 587, 881, 964, 983])
def test_seeds_that_once_failed(seed: int) -> None:
    assert simulate(seed)[0] == Violations()


def test_a_seed_gives_the_same_history_every_time() -> None:
    for seed in (3, 5, 8):
        assert simulate(seed)[1].digest() == simulate(seed)[1].digest()


def replace_next(subscription: DurableSubscription, make: Callable[[Desk], Entry | None]) -> None:
    desk = subscription.engine.desk
    setattr(desk, "next", lambda: make(desk))  # noqa: B010 (a method, on purpose)


def ack_before_delivery(subscription: DurableSubscription) -> None:
    def take(desk: Desk) -> Entry | None:
        entry = Desk.next(desk)
        if entry is not None and not entry.is_retry:
            desk.cursor.done(entry.offset)
            desk.moved()
        return entry

    replace_next(subscription, take)


def drop_under_the_rate_limit(subscription: DurableSubscription) -> None:
    def take(desk: Desk) -> Entry | None:
        entry = desk.window.peek()
        if entry is not None and not desk.is_held and not desk.rate.allows(desk.clock.now()):
            desk.window.remove(entry)
        return Desk.next(desk)

    replace_next(subscription, take)


def overtake_what_waits(subscription: DurableSubscription) -> None:
    subscription.dispatcher.mode = Mode.SHARED


def one_token_too_many(subscription: DurableSubscription) -> None:
    desk = subscription.engine.desk
    config = desk.config
    desk.rate = TokenBucket(config.rate_limit, config.burst + 1, desk.clock.now())


def tokens_a_tenth_too_soon(subscription: DurableSubscription) -> None:
    desk = subscription.engine.desk
    rate = desk.config.rate_limit
    faster = None if rate is None else rate * 1.1
    desk.rate = TokenBucket(faster, desk.config.burst, desk.clock.now())


@pytest.mark.parametrize(
    ("sabotage", "finding"),
    [
        (one_token_too_many, "too_fast"),
        (tokens_a_tenth_too_soon, "too_fast"),
        (ack_before_delivery, "lost"),
        (drop_under_the_rate_limit, "stuck"),
        (overtake_what_waits, "reordered"),
    ],
)
def test_a_broken_engine_is_found_out(
    sabotage: Callable[[DurableSubscription], None], finding: str
) -> None:
    found = 0
    for seed in range(40):
        found += getattr(simulate(seed, sabotage)[0], finding) > 0
        if found == 2:
            return
    pytest.fail(f"40 seeds did not find {finding!r} in an engine that is broken on purpose")


def test_a_failing_seed_says_how_to_replay_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--seeds", "2", "--from", "10"]) == 0
    assert "2 seeds" in capsys.readouterr().out

    async def publish_nothing(self: Simulation, count: int) -> None:
        for _ in range(count):
            if len(self.history.published) < self.scenario.messages:
                self.history.published[len(self.history.published)] = None

    monkeypatch.setattr(Simulation, "_publish", publish_nothing)
    assert main(["--seeds", "1", "--from", "3"]) == 1
    text = capsys.readouterr().out
    assert "seed 3 broke a promise: {'lost'" in text
    assert "python -m msgbus.testing.simulation.simulation --seeds 1 --from 3" in text
