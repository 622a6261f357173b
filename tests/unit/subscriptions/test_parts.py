"""The parts without I/O: cursor, window, dispatcher, rate, verdict, config."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import UTC, datetime
from random import Random

import anyio
import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from msgbus import ConfigurationError, Refusal
from msgbus.journal import Record
from msgbus.subscriptions import (
    Delivery,
    Dispatcher,
    Mode,
    Poison,
    RetryTiers,
    StartAt,
    SubscriptionConfig,
)
from msgbus.subscriptions.cursor import SafeCursor
from msgbus.subscriptions.dispatcher import Consumer, Deliver
from msgbus.subscriptions.verdict import Fate, judge
from msgbus.subscriptions.window import Entry, Window
from msgbus.testing.conformance.journal import make_record
from tests.fakes import logged


async def nothing(record: Record, attempt: int) -> None:
    pass


def entry(offset: int, key: str | None = None) -> Entry:
    return Entry(make_record(offset)._replace(offset=offset), key)


SOMEBODY = Consumer("somebody", nothing, 10)


def taken(window: Window) -> list[int]:
    """Everything that goes out now, in order."""
    offsets: list[int] = []
    while window.peek() is not None:
        offsets.append(window.take(SOMEBODY, float("inf")).offset)
    return offsets


# -- the cursor ----------------------------------------------------------------------------


def test_the_cursor_moves_over_what_is_done_and_stops_at_what_is_open() -> None:
    cursor = SafeCursor(10)
    for offset in (12, 15, 21):
        cursor.read(offset)

    assert cursor.done(15)
    assert cursor.position == 10
    assert cursor.done(12)
    assert cursor.position == 15
    assert cursor.done(21)
    assert cursor.position == 21
    assert not cursor.done(21)
    assert cursor.open == 0


def test_the_cursor_moves_over_what_is_not_for_it() -> None:
    cursor = SafeCursor(0)
    cursor.pass_by(5)
    assert cursor.position == 5
    cursor.read(7)
    cursor.pass_by(9)
    cursor.pass_by(12)
    assert cursor.position == 5
    cursor.done(7)
    assert cursor.position == 12
    cursor.pass_by(3)
    assert (cursor.position, cursor.looked) == (12, 12)


def test_the_cursor_is_dirty_until_a_write_has_succeeded() -> None:
    cursor = SafeCursor(0)
    cursor.read(1)
    cursor.read(2)
    cursor.done(1)
    assert (cursor.is_dirty, cursor.acks) == (True, 1)
    writing = cursor.position
    cursor.done(2)

    cursor.written(writing)
    assert cursor.is_dirty
    cursor.written(cursor.position)
    assert not cursor.is_dirty
    cursor.written(1)
    assert cursor.persisted == 2


def test_the_cursor_tells_where_it_would_be() -> None:
    cursor = SafeCursor(0)
    for offset in (1, 2, 3, 4):
        cursor.read(offset)
    cursor.done(2)

    assert cursor.position_after(()) == 0
    assert cursor.position_after({1}) == 2
    assert cursor.position_after({1, 3}) == 3
    assert cursor.position == 0


def test_offsets_must_be_read_in_order() -> None:
    cursor = SafeCursor(5)
    with pytest.raises(ValueError, match="after 5"):
        cursor.read(5)


@given(
    steps=st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=40),
    order=st.randoms(use_true_random=False),
)
def test_the_cursor_never_passes_what_is_open_and_ends_at_the_last(
    steps: list[tuple[int, bool]], order: Random
) -> None:
    cursor = SafeCursor(0)
    offset = 0
    left: list[int] = []
    for gap, is_mine in steps:
        offset += gap
        if is_mine:
            cursor.read(offset)
            left.append(offset)
        else:
            cursor.pass_by(offset)
    order.shuffle(left)
    before = cursor.position
    while left:
        assert cursor.position < min(left)
        cursor.done(left.pop())
        assert cursor.position >= before
        before = cursor.position
    assert cursor.position == offset


# -- the window ----------------------------------------------------------------------------


def test_exclusive_hands_nothing_out_behind_a_message_that_waits() -> None:
    window = Window(Mode.EXCLUSIVE)
    entries = [entry(1), entry(2), entry(3)]
    for one in entries:
        window.add(one)
    first = window.take(SOMEBODY, 30.0)
    window.fail(first, ValueError())
    assert taken(window) == []
    window.wait(first, 5.0)
    assert (taken(window), window.next_due(), window.due(4.9)) == ([], 5.0, [])

    assert window.due(5.0) == [first]
    window.ready(first)
    assert taken(window) == [1, 2, 3]


def test_shared_goes_on_while_a_message_waits() -> None:
    window = Window(Mode.SHARED)
    for offset in (1, 2, 3):
        window.add(entry(offset))
    first = window.take(SOMEBODY, 30.0)
    window.wait(first, 5.0)

    assert taken(window) == [2, 3]
    window.ready(first)
    assert taken(window) == [1]


def test_key_shared_hands_out_one_message_of_a_key_at_a_time() -> None:
    window = Window(Mode.KEY_SHARED)
    entries = {
        offset: entry(offset, key)
        for offset, key in [(1, "a"), (2, "a"), (3, "b"), (4, None), (5, None), (6, "a")]
    }
    for one in entries.values():
        window.add(one)

    assert taken(window) == [1, 3, 4, 5]
    window.fail(entries[1], ValueError())
    assert taken(window) == []
    window.wait(entries[1], 1.0)
    window.ready(entries[1])
    assert taken(window) == [1]
    window.remove(entries[1])
    assert taken(window) == [2]
    window.remove(entries[6])
    window.remove(entries[2])
    assert taken(window) == []
    assert len(window) == 3


def test_a_late_answer_counts_until_the_message_goes_out_again() -> None:
    window = Window(Mode.SHARED)
    one = entry(1)
    window.add(one)
    window.take(SOMEBODY, 5.0)
    token = one.token
    assert window.overdue(4.9) == []
    assert window.overdue(5.0) == [one]

    window.fail(one, TimeoutError())
    assert window.accepts(one, token)
    window.wait(one, 6.0)
    assert window.accepts(one, token)
    window.ready(one)
    window.take(SOMEBODY, 11.0)
    assert not window.accepts(one, token)
    assert window.accepts(one, one.token)
    window.remove(one)
    assert not window.accepts(one, one.token)


def test_the_window_knows_who_has_what_and_what_is_oldest() -> None:
    window = Window(Mode.SHARED)
    other = Consumer("other", nothing, 1)
    for offset in (3, 4):
        window.add(entry(offset))
    window.take(SOMEBODY, 1.0)
    window.take(other, 1.0)

    assert [one.offset for one in window.held_by(other)] == [4]
    assert window.oldest is not None
    assert window.oldest.offset == 3
    assert 3 in window
    assert window.get(9) is None


# -- the dispatcher ------------------------------------------------------------------------


def test_shared_takes_turns_and_passes_by_who_is_busy() -> None:
    dispatcher = Dispatcher.non_reliable_shared()
    a, b, c = (dispatcher.add_consumer(name, nothing) for name in "abc")

    assert [dispatcher.choose() for _ in range(4)] == [a, b, c, None]
    b.in_hand = 0
    assert dispatcher.free == 1
    assert dispatcher.choose() is b


def test_exclusive_has_one_taker_and_an_heir() -> None:
    dispatcher = Dispatcher.non_reliable_exclusive()
    first = dispatcher.add_consumer("first", nothing, max_in_flight=2)
    heir = dispatcher.add_consumer("heir", nothing)

    assert [dispatcher.choose() for _ in range(3)] == [first, first, None]
    assert dispatcher.remove_consumer("first")
    assert not dispatcher.remove_consumer("first")
    assert dispatcher.choose() is heir
    with pytest.raises(ConfigurationError, match="already a consumer 'heir'"):
        dispatcher.add_consumer("heir", nothing)


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
        assert consumer.in_hand == 0
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
    """Point 13: fire and forget, as the source says."""
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
    """Point 13: while one is busy, the others get its share and nothing is dropped."""
    dispatcher = Dispatcher.non_reliable_shared()
    slow = Slow()
    got: dict[str, int] = {"b": 0, "c": 0}

    def fast(name: str) -> Deliver:
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
    """Point 13: a publisher in a tight loop gives a quick consumer its turn."""
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
    """Point 13: and the next in line takes what comes."""
    dispatcher = Dispatcher.non_reliable_exclusive()
    first, heir = Slow(), Slow()
    dispatcher.add_consumer("first", first)
    dispatcher.add_consumer("heir", heir)

    assert await dispatcher.dispatch(make_record(1))
    assert dispatcher.remove_consumer("first")
    assert await dispatcher.dispatch(make_record(2))
    for one in (first, heir):
        one.release.set()
    await dispatcher.settled()

    assert (first.ended, heir.ended) == ([1], [2])


class Eager:
    """Begins when it is handed a message, not when its task gets a turn."""

    is_eager = True

    def __init__(self) -> None:
        self.begun: list[int] = []

    def __call__(self, record: Record, attempt: int) -> Awaitable[None]:
        self.begun.append(record.json()["number"])
        if self.begun[-1] == 2:
            raise ValueError
        return nothing(record, attempt)


async def test_an_eager_consumer_begins_in_order_and_its_failure_is_counted() -> None:
    """Point 13."""
    dispatcher = Dispatcher.non_reliable_exclusive()
    eager = Eager()
    consumer = dispatcher.add_consumer("eager", eager, max_in_flight=5)

    for number in (1, 2, 3):
        assert await dispatcher.dispatch(make_record(number))
    assert eager.begun == [1, 2, 3]
    await dispatcher.settled()

    assert (dispatcher.handled, dispatcher.failed, consumer.in_hand) == (2, 1, 0)


async def test_a_dispatcher_with_an_engine_is_not_fed_by_hand() -> None:
    """Point 13."""
    dispatcher = Dispatcher.reliable_shared(NoFeed())

    with pytest.raises(ConfigurationError, match="fed by its engine"):
        await dispatcher.dispatch(make_record(1))


class NoFeed:
    def attach(self, dispatcher: Dispatcher) -> None: ...
    def consumer_joined(self) -> None: ...
    def consumer_left(self, consumer: Consumer) -> None: ...


# -- verdict, config -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "key", "attempt", "fate", "delay"),
    [
        (Mode.SHARED, None, 1, Fate.RETRY, 1.0),
        (Mode.EXCLUSIVE, None, 2, Fate.KEEP_DATE, 20.0),
        (Mode.SHARED, "a", 2, Fate.SCHEDULE, 20.0),
        (Mode.KEY_SHARED, "a", 2, Fate.KEEP_DATE, 20.0),
        (Mode.KEY_SHARED, None, 2, Fate.SCHEDULE, 20.0),
        (Mode.SHARED, None, 3, Fate.DEAD_LETTER, 0.0),
    ],
)
def test_what_becomes_of_a_failure(
    mode: Mode, key: str | None, attempt: int, fate: Fate, delay: float
) -> None:
    retry = RetryTiers(max_attempts=3, initial_delay=1.0, exponential_base=20.0, in_process=10.0)
    one = entry(1, key)
    one.attempt = attempt

    assert judge(SubscriptionConfig(mode=mode, retry=retry), mode, one, ValueError(), 0.5) == (
        fate,
        delay,
    )


def test_pauses_grow_to_a_bound() -> None:
    retry = RetryTiers(initial_delay=1.0, exponential_base=3.0, max_delay=20.0)
    assert [retry.delay(attempt) for attempt in (1, 2, 3, 4, 10_000)] == [1, 3, 9, 20, 20]
    assert RetryTiers(initial_delay=0.0).delay(10_000) == 0.0


def test_jitter_is_half_a_pause_to_either_side_and_stays_below_the_bound() -> None:
    retry = RetryTiers(initial_delay=1.0, exponential_base=3.0, max_delay=20.0)
    assert [retry.delay(1, chance) for chance in (0.0, 0.25, 1.0)] == [0.5, 0.75, 1.5]
    assert [retry.delay(9, chance) for chance in (0.0, 1.0)] == [10.0, 20.0]
    plain = RetryTiers(initial_delay=1.0, jitter=False)
    assert [plain.delay(1, chance) for chance in (0.0, 1.0)] == [1.0, 1.0]


def test_places_to_start() -> None:
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
    with pytest.raises(ValidationError, match=r"needs mode=Mode\.KEY_SHARED"):
        SubscriptionConfig(park_key=True)
    with pytest.raises(ValidationError, match="cannot hold a message"):
        SubscriptionConfig(delivery=Delivery.AT_MOST_ONCE, on_poison=Poison.BLOCK)
    with pytest.raises(ValidationError, match="frozen"):
        SubscriptionConfig().max_in_flight = 2
