"""Who gets what, on both journals: exclusive, shared, key-shared; at least or at most once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio
import pytest

from msgbus import ConfigurationError
from msgbus.errors import BusStateError, SettleTimeoutError
from msgbus.journal import Journal, Record
from msgbus.resilience import RetryConfig
from msgbus.runtime.clock import VirtualClock
from msgbus.subscriptions import (
    Dispatcher,
    DurableSubscription,
    Mode,
    Standing,
    StartAt,
    SubscriptionEngine,
)
from msgbus.subscriptions.progress import start_offset
from tests.stage import Handler, stage

Make = Callable[[VirtualClock], Journal]


@pytest.mark.parametrize("mode", list(Mode))
async def test_everything_is_delivered_and_the_cursor_ends_at_the_head(
    make_journal: Make, mode: Mode
) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        await s.append(*range(250))
        subscription = await s.start(handler, mode=mode, max_in_flight=3)
        await s.append(*range(250, 300))

        head = await subscription.caught_up()

        assert sorted(handler.numbers) == list(range(300))
        assert head == 300
        assert await s.position() == 300
        assert await s.rows() == []
        assert await subscription.close() == 0


async def test_exclusive_keeps_the_order_of_the_journal(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {7: 1, 20: 2}
        await s.append(*range(50))
        subscription = await s.start(handler)

        await s.until(lambda: len(handler.handled) == 50)

        assert handler.handled == list(range(50))
        await subscription.close()


async def test_only_the_first_of_several_exclusive_consumers_works(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        first, second = Handler(), Handler()
        subscription = s.make(first)
        subscription.add_consumer("second", second)
        await s.append(1, 2, 3)
        await subscription.start()
        await subscription.caught_up()
        assert (first.numbers, second.numbers) == ([1, 2, 3], [])

        subscription.remove_consumer("receipts")
        await s.append(4, 5)
        await subscription.caught_up()

        assert (first.numbers, second.numbers) == ([1, 2, 3], [4, 5])


def _have_begun(handlers: list[Handler], number: int) -> bool:
    return all(len(handler.seen) == number for handler in handlers)


async def test_shared_is_fair_among_consumers(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handlers = [Handler() for _ in range(3)]
        for handler in handlers:
            handler.hangs = set(range(30))
        subscription = s.make(handlers[0], mode=Mode.SHARED, ack_timeout=None)
        subscription.add_consumer("b", handlers[1])
        subscription.add_consumer("c", handlers[2])
        await s.append(*range(30))
        await subscription.start()

        for turn in range(1, 11):
            # Nobody goes on before all are at work, so it is no matter who is quicker.
            await s.until(partial(_have_begun, handlers, turn))
            for handler in handlers:
                handler.release, release = anyio.Event(), handler.release
                release.set()
        await subscription.caught_up()

        assert [len(handler.numbers) for handler in handlers] == [10, 10, 10]


async def test_a_slow_consumer_does_not_hold_up_the_others(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        slow, quick = Handler(), Handler()
        slow.hangs = set(range(100))
        subscription = s.make(slow, mode=Mode.SHARED, ack_timeout=None)
        subscription.add_consumer("quick", quick)
        await s.append(*range(100))
        await subscription.start()

        await s.until(lambda: len(quick.handled) == 99)

        assert len(slow.numbers) == 1
        assert subscription.progress().last_acked < 100
        slow.release.set()
        await subscription.caught_up()
        assert await s.position() == 100


async def test_key_shared_keeps_the_order_of_each_key(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.failures = {0: 2, 4: 1}
        pairs = [(number, str(number % 4)) for number in range(40)]
        await s.append_keyed(*pairs)
        await s.start(handler, mode=Mode.KEY_SHARED, max_in_flight=4)

        await s.until(lambda: len(handler.handled) == 40)

        for key in range(4):
            own = [number for number in handler.handled if number % 4 == key]
            assert own == list(range(key, 40, 4))
        assert handler.handled != list(range(40))


async def test_a_stuck_key_holds_up_no_other_key(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.hangs = {0}
        pairs = [(0, "stuck"), (1, "stuck"), *((n, "free") for n in range(2, 20))]
        await s.append_keyed(*pairs)
        subscription = await s.start(
            handler, mode=Mode.KEY_SHARED, max_in_flight=2, ack_timeout=None
        )

        await s.until(lambda: len(handler.handled) == 18)

        assert 1 not in handler.numbers
        handler.release.set()
        await subscription.caught_up()
        assert handler.handled[-2:] == [0, 1]


async def test_a_key_can_be_computed_by_the_subscription(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        running: list[int] = []
        overlaps: list[int] = []

        async def deliver(record: Record, attempt: int) -> None:
            number = record.json()["number"]
            overlaps.extend(other for other in running if other % 2 == number % 2)
            running.append(number)
            await anyio.lowlevel.checkpoint()
            running.remove(number)

        def parity(record: Record) -> str:
            return str(record.json()["number"] % 2)

        await s.append(*range(20))
        subscription = await s.start(deliver, mode=Mode.KEY_SHARED, max_in_flight=5, key=parity)
        await subscription.caught_up()

        assert overlaps == []
        assert subscription.progress().counts.acked == 20


async def test_only_what_it_asks_for_is_delivered(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        by_topic, by_name, by_match = Handler(), Handler(), Handler()
        await s.append(1, 2, topic="shop.orders")
        await s.append(3, topic="shop.stock", name="shop.Stocked")
        a = await s.start(by_topic, name="a", source={"topic": "shop.orders"})
        b = await s.start(by_name, name="b", source={"names": ["shop.Stocked"]})

        def is_big(record: Record) -> bool:
            return bool(record.json()["number"] > 1)

        c = await s.start(by_match, name="c", source={"matches": is_big})
        await s.append(4, topic="other")

        for subscription in (a, b, c):
            await subscription.caught_up()

        assert (by_topic.numbers, by_name.numbers, by_match.numbers) == ([1, 2], [3], [2, 3, 4])
        assert [await s.position(name) for name in "abc"] == [4, 4, 4]


async def test_it_starts_where_it_is_told_to(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        await s.append(1, 2)
        await s.clock.advance(10)
        middle = s.clock.time()
        await s.append(3, 4)
        starts = {
            "earliest": (StartAt.EARLIEST, [1, 2, 3, 4, 5]),
            "latest": (StartAt.LATEST, [5]),
            "offset": (2, [2, 3, 4, 5]),
            "time": (StartAt.since(middle), [3, 4, 5]),
        }
        seen: dict[str, Handler] = {}
        for name, (start, _) in starts.items():
            seen[name] = Handler()
            await s.start(seen[name], name=name, start=start)
        await s.append(5)
        for subscription in s.open:
            await subscription.caught_up()

        assert {name: seen[name].numbers for name in seen} == {
            name: expected for name, (_, expected) in starts.items()
        }


async def test_a_subscription_that_exists_goes_on_where_it_was(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        first, second = Handler(), Handler()
        await s.append(1, 2)
        subscription = await s.start(first)
        await subscription.caught_up()
        await subscription.close()
        await s.append(3)

        again = await s.start(second, start=StartAt.LATEST)
        await again.caught_up()

        assert second.numbers == [3]
        assert [cursor.epoch for cursor in await s.cursors()] == [2]


async def test_pause_holds_back_and_resume_goes_on(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        subscription = await s.start(handler)
        subscription.pause()
        await s.append(1, 2)
        await s.clock.advance(5)
        await s.until(lambda: subscription.progress().lag == 2)

        assert handler.numbers == []
        assert subscription.progress().standing is Standing.PAUSED
        subscription.resume()
        await subscription.caught_up()
        assert handler.numbers == [1, 2]


async def test_seek_goes_back_and_forth(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        await s.append(*range(1, 6))
        subscription = await s.start(handler)
        await subscription.caught_up()

        await subscription.seek(4)
        await subscription.caught_up()
        assert handler.numbers == [1, 2, 3, 4, 5, 4, 5]

        subscription.pause()
        await s.append(6, 7)
        await subscription.seek(StartAt.at(7))
        subscription.resume()
        await subscription.caught_up()
        assert handler.numbers == [1, 2, 3, 4, 5, 4, 5, 7]


async def test_a_time_out_of_caught_up_names_the_subscription(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        subscription = await s.start(Handler())
        subscription.pause()
        await s.append(1)
        raised: list[SettleTimeoutError] = []

        async def wait() -> None:
            try:
                await subscription.caught_up(timeout=2.0)
            except SettleTimeoutError as error:
                raised.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await s.until(lambda: bool(raised))

        assert raised[0].busy == (
            "receipts at offset 0 of 1 (at most 1 left, paused until resume())",
        )


async def test_closing_waits_for_what_is_in_flight(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.hangs = {1}
        await s.append(1, 2, 3)
        subscription = await s.start(handler)
        await s.until(lambda: handler.numbers == [1])
        left: list[int] = []

        async def close() -> None:
            left.append(await subscription.close())

        async with anyio.create_task_group() as group:
            group.start_soon(close)
            await s.clock.advance(1)
            assert left == []
            handler.release.set()

        assert left == [0]
        assert handler.numbers == [1]
        (cursor,) = await s.cursors()
        assert (cursor.acked, cursor.fetched, cursor.owner) == (1, 1, None)
        assert await s.rows() == []


async def test_closing_out_of_time_says_what_it_left(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.hangs = {1}
        await s.append(1)
        subscription = await s.start(handler)
        await s.until(lambda: handler.numbers == [1])

        assert await subscription.close(timeout=0) == 1
        assert await s.position() == 0
        assert subscription.progress().standing is Standing.CLOSED


@pytest.mark.parametrize("mode", list(Mode))
async def test_what_a_close_left_needs_no_recovery_and_keeps_its_order(
    make_journal: Make, mode: Mode
) -> None:
    async with stage(make_journal) as s:
        first, second = Handler(), Handler()
        first.hangs = {2}
        await s.append_keyed(*((number, "ab"[number % 2]) for number in range(12)))
        subscription = await s.start(first, mode=mode, max_in_flight=2)
        await s.until(lambda: 2 in first.numbers)
        await s.written()
        assert await subscription.close(timeout=0) == 1
        assert all(row.alone is False for row in await s.rows())

        recovering: list[bool] = []

        async def consume(record: Record, attempt: int) -> None:
            recovering.append(again.progress().is_recovering)
            await second(record, attempt)

        again = s.make(consume, mode=mode)
        await again.start()
        await s.until(lambda: len({*first.handled, *second.handled}) == 12)
        await again.caught_up()

        assert not any(recovering)
        assert set(first.handled).isdisjoint(second.handled)
        assert {attempt for _, attempt in second.seen} == {1}
        if mode is not Mode.SHARED:
            for key in (0, 1):
                own = [number for number in second.handled if number % 2 == key]
                assert own == sorted(own)
        assert await s.rows() == []


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_retry_in_process_is_handed_on_by_a_close(make_journal: Make, mode: Mode) -> None:
    async with stage(make_journal) as s:
        first, second = Handler(), Handler()
        first.failures = {1: 1}
        await s.append_keyed((1, "a"), (2, "a"))
        retry = RetryConfig(initial_delay=4.0, jitter=False)
        subscription = await s.start(first, mode=mode, retry=retry)
        await s.until(lambda: subscription.progress().waiting == 1)
        assert await subscription.close() == 0

        again = await s.start(second, mode=mode, retry=retry)
        await again.caught_up()

        assert second.attempts(1) == [2]
        assert sorted([*first.handled, *second.handled]) == [1, 2]


async def test_wrong_set_ups_are_refused(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        engine = SubscriptionEngine(s.shared, "x", clock=s.clock)
        with pytest.raises(ConfigurationError, match="no dispatcher"):
            await engine.start()
        Dispatcher.reliable_shared(engine)
        with pytest.raises(ConfigurationError, match="takes only one"):
            Dispatcher.reliable_exclusive(engine)
        with pytest.raises(BusStateError, match="is new here"):
            await engine.seek(1)
        await engine.start()
        with pytest.raises(BusStateError, match="started before"):
            await engine.start()
        await engine.close()
        demanding = s.make(Handler(), name="y", require="quorum")
        with pytest.raises(ConfigurationError, match="requires 'quorum'"):
            await demanding.start()
        with pytest.raises(ConfigurationError, match="beyond the head"):
            await s.make(Handler(), name="z", start=1000).start()
        await s.start(Handler(), name="twice")
        with pytest.raises(ConfigurationError, match="through this journal object already"):
            await s.start(Handler(), name="twice")


async def test_of_two_of_one_name_that_start_at_once_one_is_refused(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        refused: list[str] = []

        async def start(subscription: DurableSubscription) -> None:
            try:
                await subscription.start()
            except ConfigurationError as error:
                refused.append(str(error))

        async with anyio.create_task_group() as tasks:
            for one in [s.make(Handler(), name="twice") for _ in range(2)]:
                tasks.start_soon(start, one)

        (message,) = refused
        assert "through this journal object already" in message


async def test_a_seek_that_asks_the_journal_while_the_subscription_ends_is_told(
    make_journal: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(make_journal) as s:
        await s.append(1)
        subscription = await s.start(Handler())

        async def slowly(journal: Journal, start: StartAt) -> int:
            await subscription.close(timeout=0)
            return await start_offset(journal, start)

        monkeypatch.setattr("msgbus.subscriptions.engine.start_offset", slowly)
        with anyio.fail_after(5), pytest.raises(BusStateError, match="is closed here"):
            await subscription.seek(1)


async def test_who_waits_for_a_subscription_that_ends_is_told(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.hangs = {1}
        await s.append(1)
        subscription = await s.start(handler, ack_timeout=None)
        await s.until(lambda: handler.numbers == [1])
        told: list[str] = []

        async def wait() -> None:
            try:
                await subscription.caught_up()
            except BusStateError as error:
                told.append(str(error))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await s.clock.advance(1)
            await subscription.close(timeout=0)

        assert len(told) == 1
        assert "is closed here" in told[0]
        with pytest.raises(BusStateError, match="is closed here"):
            await subscription.caught_up(1)
        with pytest.raises(BusStateError, match="is closed here"):
            await subscription.seek(1)


async def test_a_seek_cancels_what_is_delivered_again(make_journal: Make) -> None:
    async with stage(make_journal) as s:
        handler = Handler()
        handler.hangs = {1}
        await s.append(1)
        subscription = await s.start(handler, ack_timeout=None)
        await s.until(lambda: handler.numbers == [1])

        await subscription.seek(1)
        handler.hangs.clear()
        await subscription.caught_up()

        assert handler.seen == [(1, 1), (1, 1)]
        assert handler.handled == [1]
