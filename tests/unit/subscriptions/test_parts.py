"""The parts without I/O: partition, state, dispatcher, decision, config."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random

import anyio
import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from msgbus import ConfigurationError, Refusal
from msgbus.journal import Cursor, Member, Order, Record, Selection, State
from msgbus.journal.operations import Drop, Pass, Put
from msgbus.journal.ports import Claim, Scan
from msgbus.resilience import RetryConfig
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import (
    Consume,
    Delivery,
    Dispatcher,
    Mode,
    Poison,
    StartAt,
    SubscriptionConfig,
    SubscriptionTuning,
)
from msgbus.subscriptions.decision import FailureDecision, Next, decide, reason_of
from msgbus.subscriptions.in_flight import InFlight
from msgbus.subscriptions.partition import Partition
from msgbus.subscriptions.partitioned import PartitionedState
from msgbus.testing.conformance.journal.kit import make_record
from tests.fakes import logged

MEMBER = Member(1, "process", {}, 0)


async def nothing(record: Record, attempt: int) -> None:
    pass


def cursor_at(offset: int) -> Cursor:
    return Cursor("receipts", 0, offset, offset, 1, 1)


# -- a partition ---------------------------------------------------------------------------


def read(partition: Partition, offset: int) -> InFlight:
    """Hand out the message of an offset."""
    record = make_record(offset)._replace(offset=offset)
    one = InFlight("receipts", record, 1, None, MEMBER, partition)
    partition.order.append(one)
    partition.looked = offset
    return one


def pass_by(partition: Partition, offset: int) -> None:
    """Look at messages up to an offset that are not for it."""
    partition.looked = max(partition.looked, offset)
    partition.advance()


def done(one: InFlight) -> int:
    """End a delivery; return how far everything is done."""
    assert one.partition is not None
    one.is_ended = True
    one.partition.advance()
    return one.partition.acked


def test_a_partition_moves_over_what_is_done_and_stops_at_what_is_open() -> None:
    partition = Partition(cursor_at(10))
    twelve, fifteen, later = (read(partition, offset) for offset in (12, 15, 21))

    assert done(fifteen) == 10
    assert done(twelve) == 15
    assert not partition.is_idle
    assert done(later) == 21
    assert partition.is_idle


def test_a_partition_moves_over_what_is_not_for_it() -> None:
    partition = Partition(cursor_at(0))
    pass_by(partition, 5)
    assert partition.acked == 5
    seven = read(partition, 7)
    pass_by(partition, 9)
    pass_by(partition, 12)
    assert partition.acked == 5
    assert done(seven) == 12
    pass_by(partition, 3)
    assert (partition.acked, partition.looked) == (12, 12)


@given(
    steps=st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=40),
    order=st.randoms(use_true_random=False),
)
def test_a_partition_never_passes_what_is_open_and_ends_at_the_last(
    steps: list[tuple[int, bool]], order: Random
) -> None:
    partition = Partition(cursor_at(0))
    offset = 0
    left: list[InFlight] = []
    for gap, is_mine in steps:
        offset += gap
        if is_mine:
            left.append(read(partition, offset))
        else:
            pass_by(partition, offset)
    order.shuffle(left)
    before = partition.acked
    while left:
        assert partition.acked < min(one.offset for one in left)
        assert done(left.pop()) >= before
        before = partition.acked
    assert partition.acked == offset


# -- the state of a subscription -----------------------------------------------------------


def state_of(order: Order, *messages: tuple[int, str | None], limit: int = 9) -> PartitionedState:
    """A state that was handed these messages, in one commit."""
    state = PartitionedState(
        "receipts", Selection(order=order), VirtualClock(), max_in_flight=limit
    )
    state.begin(MEMBER)
    state.add(cursor_at(0), ())
    records = [make_record(offset, key=key)._replace(offset=offset) for offset, key in messages]
    state.head = messages[-1][0]
    page = state.next_page()
    assert page is not None
    state.take_page(page[1], Scan(records, state.head))
    state.operations([], state.head)
    state.committed(True)
    return state


def taken(state: PartitionedState) -> list[int]:
    """Everything that goes out now, in order."""
    offsets = [one.offset for one in state.ready]
    state.ready.clear()
    return offsets


def of(state: PartitionedState, offset: int) -> InFlight:
    return next(one for one in state.in_flight if one.offset == offset)


def written(state: PartitionedState) -> list[object]:
    """What the next commit writes; it succeeds."""
    operations: list[object] = [*state.operations([], state.head)]
    state.committed(True)
    return operations


def test_exclusive_hands_out_nothing_behind_a_message_that_is_not_done() -> None:
    state = state_of(Order.LOG, (1, None), (2, None), (3, None), limit=1)
    assert taken(state) == [1]
    assert taken(state) == []

    state.acknowledge(of(state, 1))
    assert taken(state) == [2]


def test_exclusive_parks_what_is_behind_a_message_that_waits_for_a_retry() -> None:
    state = state_of(Order.LOG, (1, None), (2, None), (3, None), limit=1)
    state.set_aside(of(state, 1), State.WAITING, due=5.0)

    rows = [one.row for one in written(state) if isinstance(one, Put)]
    assert [(row.offset, row.state) for row in rows] == [
        (1, State.WAITING),
        (2, State.PARKED),
        (3, State.PARKED),
    ]
    assert not state.in_flight
    assert not state.is_behind


def test_key_shared_hands_out_one_message_of_a_key_at_a_time() -> None:
    state = state_of(Order.KEY, (1, "a"), (2, "a"), (3, "b"), (4, None), (5, None), (6, "a"))

    assert taken(state) == [1, 3, 4, 5]
    state.acknowledge(of(state, 1))
    assert taken(state) == [2]
    state.acknowledge(of(state, 2))
    assert taken(state) == [6]
    assert len(state.in_flight) == 4


def test_key_shared_goes_on_with_other_keys_while_one_waits() -> None:
    state = state_of(Order.KEY, (1, "a"), (2, "a"), (3, "b"), (4, "b"))
    assert taken(state) == [1, 3]
    state.set_aside(of(state, 1), State.WAITING, due=5.0)
    state.acknowledge(of(state, 3))

    rows = [one.row.offset for one in written(state) if isinstance(one, Put)]
    assert rows == [1, 2]
    assert taken(state) == [4]


def test_the_cursor_is_dirty_until_a_commit_has_kept_it() -> None:
    state = state_of(Order.LOG, (1, None), (2, None))
    for one in list(state.in_flight):
        state.acknowledge(one)
    assert state.is_dirty

    (refused,) = state.operations([], 2)
    state.committed(False)
    assert state.is_dirty
    assert written(state) == [refused]
    assert isinstance(refused, Pass)
    assert (refused.acked, refused.fetched) == (2, 2)
    assert not state.is_dirty


def test_an_answer_of_a_message_that_others_have_does_not_count() -> None:
    state = state_of(Order.LOG, (1, None))
    one = of(state, 1)
    state.lose({0: cursor_at(0)._replace(owner=2, epoch=2)})

    state.acknowledge(one)

    assert (state.counts.acked, state.counts.stale) == (0, 1)
    assert not state.is_dirty


def test_a_claimed_row_is_dropped_with_its_acknowledgement() -> None:
    state = state_of(Order.KEY, (1, "a"))
    state.set_aside(of(state, 1), State.WAITING, due=5.0)
    (put,) = [one for one in written(state) if isinstance(one, Put)]
    row = put.row.moved(State.CLAIMED, time=6.0, owner=MEMBER.id)
    (again,) = state.admit_claims([Claim(row, make_record(1, key="a")._replace(offset=1))])
    assert again.attempt == 2

    state.acknowledge(again)

    assert [one for one in written(state) if isinstance(one, Drop)] == [Drop(row)]


@pytest.mark.parametrize(("buffer", "limit", "room"), [(5, 1, 5), (5, 8, 8), (1000, 1, 64)])
def test_no_more_is_handed_out_than_the_buffer_takes(buffer: int, limit: int, room: int) -> None:
    clock = VirtualClock()
    state = PartitionedState("s", Selection(), clock, max_in_flight=limit, buffer=buffer)
    state.begin(MEMBER)

    assert state.room() == room


# -- the dispatcher ------------------------------------------------------------------------


def test_shared_takes_turns_and_passes_by_who_is_busy() -> None:
    dispatcher = Dispatcher.non_reliable_shared()
    a, b, c = (dispatcher.add_consumer(name, nothing) for name in "abc")

    assert [dispatcher.choose() for _ in range(4)] == [a, b, c, None]
    b.in_flight = 0
    assert dispatcher.choose() is b
    assert dispatcher.choose() is None


def test_exclusive_has_one_consumer_and_a_next_one() -> None:
    dispatcher = Dispatcher.non_reliable_exclusive()
    first = dispatcher.add_consumer("first", nothing, max_in_flight=2)
    second = dispatcher.add_consumer("second", nothing)

    assert [dispatcher.choose() for _ in range(3)] == [first, first, None]
    assert dispatcher.remove_consumer("first")
    assert not dispatcher.remove_consumer("first")
    assert dispatcher.choose() is second
    with pytest.raises(ConfigurationError, match="already a consumer 'second'"):
        dispatcher.add_consumer("second", nothing)


async def test_an_unreliable_dispatcher_counts_what_it_cannot_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[int] = []

    async def deliver(record: Record, attempt: int) -> None:
        number = record.json()["number"]
        seen.append(number)
        if number == 2:
            message = "password=hunter2"
            raise ValueError(message)
        if number == 3:
            message = "sold out"
            raise Refusal(message)

    for dispatcher in (Dispatcher.non_reliable_exclusive(), Dispatcher.non_reliable_shared()):
        seen.clear()
        caplog.clear()
        assert not await dispatcher.dispatch(make_record(0))
        consumer = dispatcher.add_consumer("only", deliver)
        results = [await dispatcher.dispatch(make_record(number)) for number in (1, 2, 3)]
        await dispatcher.settled()

        assert results == [True, True, True]
        assert seen == [1, 2, 3]
        assert (dispatcher.dropped, dispatcher.failed, dispatcher.handled) == (1, 1, 2)
        assert consumer.in_flight == 0
        [row] = logged(caplog, "unreliable_delivery_failed")
        assert row["consumer"] == "only"
        assert "hunter2" not in str(row)


class Slow:
    """A consumer that begins a message and ends it only once it is released."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.release = anyio.Event()

    async def __call__(self, record: Record, attempt: int) -> None:
        number = record.json()["number"]
        self.begun.append(number)
        await self.release.wait()
        self.ended.append(number)


async def test_an_unreliable_dispatch_never_waits_for_a_slow_consumer() -> None:
    """Fire and forget."""
    for dispatcher in (Dispatcher.non_reliable_exclusive(), Dispatcher.non_reliable_shared()):
        slow = Slow()
        dispatcher.add_consumer("slow", slow, max_in_flight=2)

        taken = [await dispatcher.dispatch(make_record(number)) for number in range(5)]

        assert taken == [True, True, False, False, False]
        assert (dispatcher.dropped, dispatcher.handled) == (3, 0)
        assert sorted(slow.begun) == [0, 1]
        assert slow.ended == []
        slow.release.set()
        await dispatcher.settled()
        assert sorted(slow.ended) == [0, 1]
        assert (dispatcher.dropped, dispatcher.handled) == (3, 2)


async def test_an_unreliable_dispatch_spreads_over_those_who_are_free() -> None:
    """While one is busy, the others get its share and nothing is dropped."""
    dispatcher = Dispatcher.non_reliable_shared()
    slow = Slow()
    got: dict[str, int] = {"b": 0, "c": 0}

    def fast(name: str) -> Consume:
        async def deliver(record: Record, attempt: int) -> None:
            got[name] += 1

        return deliver

    dispatcher.add_consumer("a", slow)
    for name in got:
        dispatcher.add_consumer(name, fast(name))

    taken = [await dispatcher.dispatch(make_record(number)) for number in range(101)]

    assert all(taken)
    assert dispatcher.dropped == 0
    assert len(slow.begun) == 1
    slow.release.set()
    await dispatcher.settled()
    assert got == {"b": 50, "c": 50}
    assert dispatcher.handled == 101


async def test_who_does_not_wait_misses_nothing_however_fast_it_comes() -> None:
    """A publisher in a tight loop gives a quick consumer its turn."""
    for dispatcher in (Dispatcher.non_reliable_exclusive(), Dispatcher.non_reliable_shared()):
        seen: list[int] = []

        async def note(record: Record, attempt: int, seen: list[int] = seen) -> None:
            seen.append(record.json()["number"])

        dispatcher.add_consumer("quick", note)
        for number in range(200):
            assert await dispatcher.dispatch(make_record(number))
        await dispatcher.settled()

        assert seen == list(range(200))


async def test_a_consumer_that_is_let_go_finishes_what_it_has() -> None:
    """And the next in line takes what comes."""
    dispatcher = Dispatcher.non_reliable_exclusive()
    first, second = Slow(), Slow()
    dispatcher.add_consumer("first", first)
    dispatcher.add_consumer("second", second)

    assert await dispatcher.dispatch(make_record(1))
    assert dispatcher.remove_consumer("first")
    assert await dispatcher.dispatch(make_record(2))
    for one in (first, second):
        one.release.set()
    await dispatcher.settled()

    assert (first.ended, second.ended) == ([1], [2])


async def test_a_dispatcher_with_an_engine_is_not_fed_by_hand() -> None:
    dispatcher = Dispatcher.reliable_shared(NoFeed())

    with pytest.raises(ConfigurationError, match="fed by its engine"):
        await dispatcher.dispatch(make_record(1))


class NoFeed:
    def attach(self, dispatcher: Dispatcher) -> None: ...
    def consumers_changed(self) -> None: ...


# -- decision, config ----------------------------------------------------------------------

RETRY = RetryConfig(
    max_retries=2, initial_delay=1.0, exponential_base=20.0, max_delay=60.0, in_process=10.0,
    jitter=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("attempt", "error", "then", "pause"),
    [
        (1, ValueError(), Next.RETRY, 1.0),
        (2, ValueError(), Next.LATER, 20.0),
        (3, ValueError(), Next.DEAD, 0.0),
        (1, Refusal("no"), Next.DEAD, 0.0),
        (2, None, Next.LATER, 20.0),
        (3, None, Next.DEAD, 0.0),
    ],
)
def test_what_follows_from_a_failure(
    attempt: int, error: Exception | None, then: Next, pause: float
) -> None:
    assert decide(RETRY, Poison.DEAD_LETTER, attempt, error) == FailureDecision(then, pause)


@pytest.mark.parametrize(
    ("poison", "then"),
    [(Poison.DEAD_LETTER, Next.DEAD), (Poison.DROP, Next.DROP), (Poison.BLOCK, Next.BLOCK)],
)
def test_what_follows_from_the_last_failure(poison: Poison, then: Next) -> None:
    assert decide(RETRY, poison, 3, ValueError()) == FailureDecision(then)


def test_the_reason_of_a_dead_letter() -> None:
    never = RetryConfig(max_retries=0)
    picky = RetryConfig(give_up_on=(ValueError,))

    assert reason_of(RETRY, ValueError()) == "retries exhausted"
    assert reason_of(never, ValueError()) == "not retried"
    assert reason_of(picky, ValueError()) == "not to be retried"
    assert reason_of(RETRY, None) == "its process ended in every attempt"


def test_start_positions() -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert StartAt.of(7) == StartAt.at(7)
    assert StartAt.of(noon) == StartAt.since(noon.timestamp())
    assert StartAt.of(StartAt.LATEST).is_latest
    with pytest.raises(ValueError, match="no time zone"):
        StartAt.since(datetime(2026, 1, 1, 12))  # noqa: DTZ001
    with pytest.raises(ValueError, match="0 or more"):
        StartAt.at(-1)
    with pytest.raises(ValidationError, match="not a start position"):
        SubscriptionConfig.model_validate({"start": "yesterday"})


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"mode=Mode\.SHARED has no order"):
        SubscriptionConfig(mode=Mode.SHARED, park_key=True)
    with pytest.raises(ValidationError, match="waits for a dead letter"):
        SubscriptionConfig(park_key=True, on_poison=Poison.DROP)
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        SubscriptionTuning(buffer=0)
    with pytest.raises(ValidationError, match="cannot hold a message"):
        SubscriptionConfig(delivery=Delivery.AT_MOST_ONCE, on_poison=Poison.BLOCK)
    with pytest.raises(ValidationError, match="frozen"):
        SubscriptionConfig().max_in_flight = 2
