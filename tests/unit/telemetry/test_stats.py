"""Counters, histograms and percentiles."""

from __future__ import annotations

import json
import threading
import time

import pytest

from msgbus import BusConfig, BusStats, Command, Context, Event, MessageBus
from msgbus.runtime.clock import VirtualClock
from msgbus.telemetry.stats import (
    BOUNDS,
    CommandHandlerStats,
    Durations,
    DurationStats,
    add_to_buckets,
    percentile,
)
from tests.fakes import OrderPlaced, SlowHandler, conserves


class PlaceOrder(Command):
    seconds: float = 0.0


class Tick(Event):
    pass


async def ignore(message: object) -> None:
    pass


def buckets_of(*seconds: float) -> list[int]:
    buckets = [0] * (len(BOUNDS) + 1)
    add_to_buckets(buckets, list(seconds))
    return buckets


# -- buckets and percentiles -------------------------------------------------------------------


def test_a_duration_goes_into_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    exact = buckets_of(0.5)
    above = buckets_of(0.500001)
    beyond = buckets_of(61.0)

    assert exact[BOUNDS.index(0.5)] == 1
    assert above[BOUNDS.index(0.5) + 1] == 1
    assert beyond[-1] == 1


def test_bounds_grow() -> None:
    assert sorted(set(BOUNDS)) == list(BOUNDS)


def test_nothing_recorded_has_percentiles_of_zero() -> None:
    assert percentile(buckets_of(), 0.5) == 0.0


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, 0.1), (0.5, 0.175), (1.0, 0.25)],
    ids=["lowest", "half", "all"],
)
def test_a_percentile_is_interpolated_within_its_bucket(share: float, expected: float) -> None:
    buckets = buckets_of(*[0.2] * 10)  # between 0.1 and 0.25

    assert percentile(buckets, share) == pytest.approx(expected)


def test_the_first_bucket_begins_at_zero() -> None:
    assert percentile(buckets_of(1e-7, 1e-7), 0.5) == pytest.approx(BOUNDS[0] / 2)


def test_percentiles_find_the_bucket_that_holds_their_rank() -> None:
    seconds = [0.002] * 50 + [0.04] * 45 + [0.7] * 4 + [20.0]
    stats = DurationStats(seconds=sum(seconds), buckets=tuple(buckets_of(*seconds)))

    assert stats.p50 == pytest.approx(0.0025)
    assert stats.p95 == pytest.approx(0.05)
    assert stats.p99 == pytest.approx(1.0)
    assert 10.0 < stats.percentile(0.999) <= 30.0


def test_durations_beyond_the_last_bound_count_as_that_bound() -> None:
    assert percentile(buckets_of(1000.0), 0.99) == BOUNDS[-1]


# -- durations ---------------------------------------------------------------------------------


def test_folding_changes_no_number() -> None:
    durations = Durations()
    durations.recent += [0.2, 0.3, 0.3]
    before = durations.read()

    durations.fold()

    assert durations.recent == []
    assert durations.read() == before
    assert before[0] == durations.finished == 3
    assert before[1] == pytest.approx(0.8)


def test_every_nth_duration_goes_into_the_histogram_and_all_into_the_count() -> None:
    durations = Durations(every=4)
    durations.recent += [0.2] * 8
    durations.fold()
    durations.recent += [0.2] * 4

    finished, seconds, buckets = durations.read()

    assert finished == 12
    assert seconds == pytest.approx(2.4)
    assert sum(buckets) == 3


def test_reading_while_another_thread_folds_sees_every_duration_once() -> None:
    durations = Durations()
    rounds, each = 200, 50
    seen: list[tuple[int, int]] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            finished, _, buckets = durations.read()
            seen.append((finished, sum(buckets)))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(rounds):
        durations.recent.extend([0.01] * each)
        durations.fold()
    done.set()
    reader.join()

    assert durations.read()[0] == rounds * each
    assert [counts for counts in seen if counts[0] != counts[1]] == []
    assert [finished for finished, _ in seen] == sorted(finished for finished, _ in seen)


# -- a bus -------------------------------------------------------------------------------------


async def command_stats(config: BusConfig | None, *seconds: float) -> CommandHandlerStats:
    """The figures of a handler whose calls took so long, by the bus's clock."""
    clock = VirtualClock()
    bus = MessageBus(config, clock=clock)

    @bus.handles(PlaceOrder)
    async def place_order(command: PlaceOrder) -> None:
        await clock.advance(command.seconds)

    async with bus:
        for each in seconds:
            await bus.call(PlaceOrder(seconds=each))
        return bus.stats().commands["place_order"]


async def test_durations_are_taken_from_the_clock_of_the_bus() -> None:
    stats = await command_stats(None, 0.2, 0.2, 3.0)

    assert stats.seconds == pytest.approx(3.4)
    assert list(stats.buckets) == buckets_of(0.2, 0.2, 3.0)
    assert 0.1 < stats.p50 <= 0.25


async def test_counts_are_exact_where_durations_are_sampled() -> None:
    stats = await command_stats(BusConfig(histogram_every=10), *[0.5] * 30)

    assert (stats.sent, stats.handled) == (30, 30)
    assert stats.seconds == pytest.approx(15.0)
    assert sum(stats.buckets) == 3
    assert stats.p99 <= 0.5


async def test_more_calls_than_are_folded_at_once_are_all_counted() -> None:
    bus = MessageBus()
    bus.register_command_handler(PlaceOrder, ignore)
    bus.register_event_handler(Tick, ignore, name="tick")
    calls = Durations.FOLD_AT * 2 + 10

    async with bus:
        for _ in range(calls):
            await bus.execute(PlaceOrder())
        await bus.publish_many(Tick() for _ in range(calls))
        await bus.settled()

    stats = bus.stats()
    command, event = stats.commands["ignore"], stats.handlers["tick"]
    assert (command.sent, command.handled, sum(command.buckets)) == (calls, calls, calls)
    assert (event.handled, sum(event.buckets)) == (calls, calls)


async def test_what_runs_is_told_apart_from_what_has_ended() -> None:
    bus = MessageBus()
    slow = SlowHandler()
    bus.register_event_handler(OrderPlaced, slow, name="slow")
    inside: list[BusStats] = []

    @bus.handles(PlaceOrder)
    async def look(command: PlaceOrder, context: Context) -> None:
        inside.append(context.bus.stats())

    async with bus:
        await bus.publish_many([OrderPlaced(), OrderPlaced(), OrderPlaced()])
        await slow.started.wait()
        await bus.call(PlaceOrder())
        slow.release.set()

    (stats,) = inside
    command, event = stats.commands["look"], stats.handlers["slow"]
    assert (command.sent, command.running, command.handled) == (1, 1, 0)
    assert (event.queued, event.running, event.pending, event.admitted) == (2, 1, 3, 3)
    conserves(bus)


async def test_one_counter_can_be_summed_over_all_handlers() -> None:
    bus = MessageBus()
    bus.register_event_handler(Tick, ignore, name="one")
    bus.register_event_handler(Tick, ignore, name="two")

    async with bus:
        await bus.publish_many([Tick(), Tick()])

    assert bus.stats().total("handled") == 4


async def test_a_name_that_handles_two_types_has_its_type_in_the_key() -> None:
    bus = MessageBus()
    bus.register_event_handler(Tick, ignore)
    async with bus, bus.session() as session:
        session.register_event_handler(OrderPlaced, ignore, name="of this session")
        await session.publish(Tick())
        await session.publish(OrderPlaced())

    assert set(bus.stats().handlers) == {"ignore[Tick]", "ignore[OrderPlaced]"}


# -- JSON --------------------------------------------------------------------------------------


async def test_the_figures_are_ready_for_json() -> None:
    bus = MessageBus(BusConfig(name="shop"))
    bus.register_command_handler(PlaceOrder, ignore)
    bus.register_event_handler(Tick, ignore, name="tick")

    async with bus:
        await bus.execute(PlaceOrder())
        await bus.publish(Tick())
        await bus.settled()
        await bus.publish(Tick(), delay=60)
        page = json.loads(json.dumps(bus.stats().as_dict()))

    assert (page["bus"], page["state"], page["scheduled"]) == ("shop", "running", 1)
    assert page["registered_handlers"] == 2
    assert page["commands"]["ignore"]["handled"] == 1
    assert page["handlers"]["tick"]["handled"] == 1
    assert page["events"]["Tick"]["published"] == 1
    assert {"p50", "p95", "p99"} <= set(page["commands"]["ignore"])
    assert sum(page["commands"]["ignore"]["buckets"]) == 1
    assert page["circuits"] == {}
    assert page["dead_letters"] == 0


def test_circuits_and_dead_letters_are_in_the_json() -> None:
    stats = BusStats(
        name="shop",
        state="running",
        commands={},
        handlers={},
        events={},
        circuits={"mail": "open"},
        dead_letters=2,
    )

    page = json.loads(json.dumps(stats.as_dict()))

    assert page["circuits"] == {"mail": "open"}
    assert page["dead_letters"] == 2


async def test_a_snapshot_does_not_change_afterwards() -> None:
    bus = MessageBus()
    bus.register_command_handler(PlaceOrder, ignore)

    async with bus:
        await bus.execute(PlaceOrder())
        before = bus.stats()
        await bus.execute(PlaceOrder())

    assert before.commands["ignore"].sent == 1
    assert bus.stats().commands["ignore"].sent == 2


async def test_the_json_says_when_it_was_taken_and_where_the_buckets_end() -> None:
    """Point 13."""
    clock = VirtualClock(start=1_700_000_000.0)
    bus = MessageBus(clock=clock)
    bus.register_command_handler(PlaceOrder, ignore)

    async with bus:
        await bus.execute(PlaceOrder())
        await clock.advance(2.5)
        page = json.loads(json.dumps(bus.stats().as_dict()))

    assert page["timestamp"] == 1_700_000_002.5
    assert page["bucket_bounds"] == list(BOUNDS)
    # One bucket more than there are bounds: for what is above the last.
    assert len(page["commands"]["ignore"]["buckets"]) == len(page["bucket_bounds"]) + 1


def test_sampling_durations_saves_time() -> None:
    """`BusConfig(histogram_every=n)` is for handlers of microseconds; counts stay exact."""
    durations = [1e-6 * number for number in range(Durations.FOLD_AT)]

    def seconds_to_fold(every: int) -> float:
        counts = Durations(every)
        best = float("inf")
        for _ in range(50):
            counts.recent = [*durations]
            began = time.perf_counter()
            counts.fold()
            best = min(best, time.perf_counter() - began)
        assert counts.finished == 50 * len(durations)
        return best

    assert seconds_to_fold(100) < 0.7 * seconds_to_fold(1)
