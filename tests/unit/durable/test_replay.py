"""bus.replay: history through one handler, in order, and nothing else happens."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime
from typing import Any

import anyio
import pytest

from msgbus import (
    ConfigurationError,
    Context,
    Event,
    HandlerSignatureError,
    MessageBus,
    QueueConfig,
    Refusal,
)
from msgbus.bus.durable.replay import ReplayReport
from msgbus.errors import BusNotStartedError
from msgbus.handlers.delivery import StartAt
from msgbus.journal import upcasts
from msgbus.journal.operations import Append
from msgbus.journal.records import Record, State
from msgbus.journal.reports import Retention
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.middleware import IdempotencyMiddleware
from msgbus.resilience import ResilientMessageBus, RetryConfig
from msgbus.testing.conformance.journal.kit import make_record
from tests.durable_shop import journal_of, records
from tests.fakes import OrderEvent, Recorder, conserves, let_others_run
from tests.unit.durable.conftest import Site
from tests.unit.durable.places import OrderPlaced, OrderShipped, Place, orders


class PriceSet(Event, name="replay.PriceSet", version=2):
    amount: int
    currency: str


@upcasts(PriceSet, from_version=1)
def with_currency(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "currency": "EUR"}


class Audit(Event):
    number: int


class Database:
    def __init__(self) -> None:
        self.rows: list[int] = []


def record(number: int, name: str, payload: bytes, version: int = 1) -> Record:
    return make_record(number, name=name, payload=payload)._replace(version=version)


async def everything(bus: MessageBus) -> tuple[Any, ...]:
    """All that a replay must not change."""
    journal, page = journal_of(bus), await records(bus)
    deliveries = [await journal.deliveries(one.message_id) for one in page]
    rows = await journal.find(None, tuple(State), limit=10_000)
    return page, deliveries, await journal.cursors(), rows


async def test_a_function_sees_the_events_of_its_annotation_in_order_and_nobody_else_does(
    place: Place,
) -> None:
    bus = MessageBus(journal=place())
    others, seen = Recorder(), Recorder()
    bus.subscribe(OrderEvent, others, durable="others")
    bus.subscribe(OrderEvent, others, name="in memory", durable=False)

    async def rebuild(event: OrderPlaced) -> None:
        await seen(event)

    async with bus:
        for number in range(5):
            await bus.publish(OrderPlaced(number=number))
            await bus.publish(OrderShipped(number=100 + number))
        await bus.settled()
        before, handled = await everything(bus), list(others.numbers)

        report = await bus.replay(StartAt.EARLIEST, to=rebuild)

        assert seen.numbers == [0, 1, 2, 3, 4]
        assert (report.handled, report.failed, report.unreadable) == (5, 0, 0)
        assert (report.start, report.last, report.next) == (1, 10, 11)
        assert report.is_complete
        await bus.settled()
        assert await everything(bus) == before
        assert others.numbers == handled
    conserves(bus)


async def test_it_ends_at_the_head_of_the_call_and_can_be_resumed(place: Place) -> None:
    seen: list[int] = []

    async def publishes(event: OrderPlaced, context: Context) -> None:
        seen.append(event.number)
        if event.number < 3:
            await context.bus.publish(OrderPlaced(number=event.number + 100))

    async with MessageBus(journal=place()) as bus:
        await bus.publish_many(orders(3))
        first = await bus.replay(1, to=publishes)
        assert seen == [0, 1, 2]
        second = await bus.replay(first.next, to=publishes)

    assert seen == [0, 1, 2, 100, 101, 102]
    assert (first.next, second.start, second.next) == (4, 4, 7)


async def test_start_and_until_are_offsets_or_times(memory: Site) -> None:
    clock = memory.clock
    async with memory.bus() as bus:
        seen = Recorder()
        times: list[datetime] = []
        for number in range(5):
            times.append(datetime.fromtimestamp(clock.time(), tz=UTC))
            await bus.publish(OrderPlaced(number=number))
            await clock.advance(60)

        await bus.replay(2, to=seen, until=4)
        await bus.replay(times[1], to=seen, until=times[3])
        await bus.replay(StartAt.since(times[4]), to=seen, until=99)
        nothing = await bus.replay(StartAt.LATEST, to=seen)

        assert seen.numbers == [1, 2, 3, 1, 2, 4]
        assert (nothing.handled, nothing.is_complete) == (0, True)
        with pytest.raises(ValueError, match="not a start position"):
            await bus.replay("yesterday", to=seen)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def test_a_registered_handler_is_called_inside_its_own_chain(place: Place) -> None:
    trail: list[str] = []

    async def middleware(message: Any, call_next: Any) -> None:
        trail.append("in")
        await call_next(message)
        trail.append("out")

    bus = MessageBus(journal=place(), middleware=[middleware])
    handler = Recorder()
    mine = bus.subscribe(OrderPlaced, handler, durable="mine")
    bus.subscribe(OrderPlaced, handler, name="fleeting", durable=False)
    async with bus:
        await bus.publish(OrderPlaced(number=7))
        await bus.settled()
        trail.clear()
        handler.numbers.clear()
        for to in ("mine", "fleeting", mine):
            report = await bus.replay(1, to=to)
            assert report.handled == 1

        assert trail == ["in", "out"] * 3
        assert handler.numbers == [7, 7, 7]


async def test_a_handler_that_takes_too_long_fails_by_its_own_timeout(memory: Site) -> None:
    clock = memory.clock
    bus = memory.bus()
    is_slow = False

    @bus.on(OrderPlaced, name="slow", timeout=5, durable=False)
    async def slow(event: OrderPlaced) -> None:
        if is_slow:
            await anyio.sleep_forever()

    async with bus:
        await bus.publish(OrderPlaced())
        await bus.settled()
        is_slow = True
        reports: list[ReplayReport] = []

        async def replay() -> None:
            reports.append(await bus.replay(1, to="slow"))

        async with anyio.create_task_group() as group:
            group.start_soon(replay)
            await let_others_run()
            await clock.advance(6)

        assert (reports[0].handled, reports[0].failed) == (0, 1)
        assert "5" in reports[0].failures[0].error


async def test_a_name_that_is_nobodys_or_two_handlers_is_refused(place: Place) -> None:
    bus = MessageBus(journal=place())

    async def same(event: OrderEvent) -> None:
        pass

    bus.subscribe(OrderPlaced, same, durable=False)
    bus.subscribe(OrderShipped, same, durable=False)
    async with bus:
        with pytest.raises(ConfigurationError, match=r"no event handler 'other'. It has: .*same"):
            await bus.replay(1, to="other")
        with pytest.raises(ConfigurationError, match=r"2 event handlers .* same\[OrderPlaced\]"):
            await bus.replay(1, to="same")
        await bus.publish(OrderShipped())
        assert (await bus.replay(1, to="same[OrderShipped]")).handled == 1


async def test_what_cannot_be_read_is_counted_and_listed(place: Place) -> None:
    bus = MessageBus(journal=place())
    prices: list[PriceSet] = []

    async def price(event: Event) -> None:
        assert isinstance(event, PriceSet)
        prices.append(event)

    async with bus:
        stored = [
            record(1, "replay.PriceSet", b'{"amount": 1}'),
            record(2, "replay.Unknown", b"{}"),
            record(3, "replay.PriceSet", b'{"amount": "much"}'),
            record(4, "replay.PriceSet", b"{}", version=9),
            record(5, "replay.PriceSet", b'{"amount": 5, "currency": "USD"}', version=2),
        ]
        await journal_of(bus).commit([Append(one) for one in stored])

        report = await bus.replay(0, to=price)

        assert [(one.amount, one.currency) for one in prices] == [(1, "EUR"), (5, "USD")]
        assert (report.handled, report.unreadable, report.failed) == (2, 3, 0)
        assert [one.offset for one in report.failures] == [2, 3, 4]
        unknown, misfit, newer = report.failures
        assert unknown.name == "replay.Unknown"
        assert "no event class" in unknown.error
        assert "does not fit" in misfit.error
        assert "Deploy the newer class" in newer.error

        stopped = await bus.replay(0, to=price, on_error="stop")
        assert (stopped.handled, stopped.unreadable, stopped.next) == (1, 1, 2)
        assert not stopped.is_complete


async def test_a_damaged_record_is_listed_and_passed(tmp_path: Any) -> None:
    path = tmp_path / "journal.db"
    async with MessageBus(journal=f"sqlite:///{path}") as bus:
        await bus.publish_many(orders(4))
    connection = sqlite3.connect(path)
    connection.execute("UPDATE msgbus_messages SET payload = '{}' WHERE offset IN (1, 3)")
    connection.commit()
    connection.close()

    async with MessageBus(journal=f"sqlite:///{path}") as bus:
        for kind in (OrderPlaced, Event):
            seen: list[int] = []

            def see(event: Any, seen: list[int] = seen) -> None:
                seen.append(event.number)

            see.__annotations__["event"] = kind
            report = await bus.replay(StartAt.EARLIEST, to=see)

            assert seen == [1, 3]
            assert [one.offset for one in report.failures] == [1, 3]
            assert "damaged" in report.failures[0].error
            assert report.is_complete


async def test_a_failure_is_listed_or_ends_it_where_it_can_be_resumed(place: Place) -> None:
    seen: list[int] = []
    is_fixed = False

    def fragile(event: OrderPlaced) -> None:
        if event.number == 1 and not is_fixed:
            raise ValueError("password=hunter2 is wrong")
        if event.number == 2:
            raise Refusal("not this one")
        seen.append(event.number)

    async with MessageBus(journal=place()) as bus:
        await bus.publish_many(orders(4))
        on = await bus.replay(1, to=fragile)
        assert (on.handled, on.refused, on.failed, on.is_complete) == (3, 1, 1, True)
        assert "hunter2" not in on.failures[0].error
        assert seen == [0, 3]

        stopped = await bus.replay(1, to=fragile, on_error="stop")
        assert (stopped.handled, stopped.failed, stopped.next) == (1, 1, 2)
        is_fixed = True
        rest = await bus.replay(stopped.next, to=fragile, on_error="stop")
        assert (rest.handled, rest.is_complete) == (3, True)
        assert seen == [0, 3, 0, 1, 3]


async def test_emitted_events_are_counted_and_published_only_if_asked_for(place: Place) -> None:
    bus = MessageBus(journal=place())
    audits: list[int] = []
    replays: list[bool] = []

    @bus.on(OrderPlaced, durable="emitter")
    async def emitter(event: OrderPlaced, context: Context) -> None:
        replays.append(context.is_replay)
        context.emit(Audit(number=event.number))

    @bus.on(Audit, durable="audits")
    async def audit(event: Audit) -> None:
        audits.append(event.number)

    async with bus:
        await bus.publish_many(orders(2))
        await bus.settled()
        head = await journal_of(bus).head()
        quiet = await bus.replay(1, to="emitter")
        await bus.settled()
        assert (quiet.emitted, audits) == (2, [0, 1])
        assert await journal_of(bus).head() == head

        loud = await bus.replay(1, to="emitter", emit=True)
        await bus.settled()
        assert (loud.emitted, audits) == (2, [0, 1, 0, 1])
        assert await journal_of(bus).head() == head + 2
    assert replays == [False, False, True, True, True, True]
    conserves(bus)


async def test_names_and_topics_narrow_it(place: Place) -> None:
    seen = Recorder()

    async def both(event: OrderPlaced | OrderShipped) -> None:
        await seen(event)

    async with MessageBus(journal=place()) as bus:
        await bus.publish(OrderPlaced(number=1), topic="shop.orders.placed")
        await bus.publish(OrderShipped(number=2), topic="shop.orders.shipped")
        await bus.publish(OrderPlaced(number=3), topic="depot.orders.placed")
        await bus.publish(Audit(number=4))
        await bus.replay(1, to=both)
        await bus.replay(1, to=both, topic="shop.**")
        await bus.replay(1, to=both, names=["places.OrderShipped", "Audit"])

    assert seen.numbers == [1, 2, 3, 1, 2, 2]


async def test_a_handler_of_topics_with_a_filter_sees_what_it_would_have_seen(place: Place) -> None:
    bus = MessageBus(journal=place())
    seen = Recorder()
    bus.subscribe(
        "shop.**", seen, durable="shop", filter=lambda event: getattr(event, "number", 0) != 2
    )
    async with bus:
        for number in (1, 2):
            await bus.publish(OrderPlaced(number=number), topic="shop.orders")
        await bus.publish(OrderPlaced(number=3), topic="depot")
        await bus.settled()
        report = await bus.replay(1, to="shop")

    assert (report.handled, report.filtered) == (1, 1)
    assert seen.numbers == [1, 1]


async def test_a_handler_of_lists_gets_lists_and_only_the_bad_event_fails(place: Place) -> None:
    bus = MessageBus(journal=place())
    lists: list[list[int]] = []
    bad = -1

    @bus.on(OrderPlaced, batch=True, durable="lists", queue=QueueConfig(batch_size=3))
    async def several(events: list[OrderPlaced]) -> None:
        lists.append([event.number for event in events])
        if any(event.number == bad for event in events):
            raise ValueError("bad")

    async def free(events: list[OrderPlaced]) -> None:
        lists.append([event.number for event in events])

    async with bus:
        await bus.publish_many(orders(5))
        await bus.settled()
        lists.clear()
        bad = 1
        report = await bus.replay(1, to="lists")
        assert lists == [[0, 1, 2], [0], [1], [2], [3, 4]]
        assert (report.handled, report.failed) == (4, 1)
        lists.clear()
        stopped = await bus.replay(1, to="lists", on_error="stop")
        assert (stopped.handled, stopped.next) == (1, 2)
        lists.clear()
        assert (await bus.replay(1, to=free)).handled == 5
        assert lists == [[0, 1, 2, 3, 4]]


async def test_it_keeps_to_its_rate_and_says_how_far_it_is(memory: Site) -> None:
    clock = memory.clock
    seen: list[tuple[int, float]] = []
    news: list[ReplayReport] = []

    async def note(event: OrderPlaced) -> None:
        seen.append((event.number, round(clock.now() - began, 3)))

    async def said(report: ReplayReport) -> None:
        news.append(report)

    async with memory.bus() as bus:
        await bus.publish_many(orders(5))
        began = clock.now()
        async with anyio.create_task_group() as group:

            async def replay() -> None:
                await bus.replay(1, to=note, rate=2, progress=said)

            group.start_soon(replay)
            for _ in range(40):
                await let_others_run()
                await clock.advance(0.1)

        with pytest.raises(ValueError, match="rate"):
            await bus.replay(1, to=note, rate=0)

    assert seen == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]
    assert [report.handled for report in news] == [3, 5, 5]
    assert [report.next for report in news] == [4, 6, 6]
    assert news[-1].is_complete


async def test_dependencies_context_and_threads_are_there_for_a_function(place: Place) -> None:
    database = Database()

    def store(event: OrderPlaced, database: Database, context: Context) -> None:
        assert context.is_replay
        assert context.message is event
        database.rows.append(event.number)

    async with MessageBus(journal=place(), provide={Database: database}) as bus:
        await bus.publish_many(orders(3))
        await bus.replay(1, to=store)

    assert database.rows == [0, 1, 2]


async def test_what_the_handler_sends_is_caused_by_the_event_of_the_past(place: Place) -> None:
    async def publishes(event: OrderPlaced, context: Context) -> None:
        await context.publish(Audit(number=event.number))

    async with MessageBus(journal=place()) as bus:
        old = OrderPlaced(number=1)
        await bus.publish(old)
        await bus.replay(1, to=publishes)
        _, sent = await records(bus)

    assert sent.causation_id == old.message_id


async def test_idempotency_does_not_keep_history_from_being_shown(place: Place) -> None:
    bus = MessageBus(journal=place(), middleware=[IdempotencyMiddleware()])
    handler = Recorder()
    bus.subscribe(OrderPlaced, handler, durable="mine", idempotent=True)
    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await bus.settled()
        await bus.replay(1, to="mine")

    assert handler.numbers == [1, 1]


async def test_a_transaction_in_a_replay_acknowledges_nothing(place: Place) -> None:
    bus = MessageBus(journal=place())

    @bus.on(OrderPlaced, durable="mine", idempotent=True)
    async def mine(event: OrderPlaced, context: Context) -> None:
        async with context.bus.transaction() as transaction:
            transaction.acknowledge()

    async with bus:
        bus_side = bus.subscribe(OrderShipped, Recorder(), durable="other")
        assert bus_side.is_durable
        await bus.publish(OrderPlaced(number=1))
        await bus.settled()
        before = await everything(bus)
        assert (await bus.replay(1, to="mine")).handled == 1
        assert await everything(bus) == before


async def test_a_resilient_handler_is_tried_again_and_leaves_no_dead_letter(place: Place) -> None:
    bus = ResilientMessageBus(
        journal=place(), retry=RetryConfig(max_retries=2, initial_delay=0, jitter=False)
    )
    tries: list[int] = []
    is_bad = False

    @bus.on(OrderPlaced, name="mine", durable=False)
    async def mine(event: OrderPlaced) -> None:
        tries.append(event.number)
        if is_bad:
            raise ValueError("bad")

    async with bus:
        await bus.publish(OrderPlaced(number=1))
        await bus.settled()
        is_bad = True
        report = await bus.replay(1, to="mine")

        assert (report.failed, len(tries)) == (1, 4)
        assert bus.stats().dead_letters == 0
    conserves(bus)


async def test_older_events_that_are_gone_are_told_of_by_the_start(tmp_path: Any) -> None:
    seen = Recorder()
    async with (
        SqliteJournal(tmp_path / "journal.db") as journal,
        MessageBus(journal=journal) as bus,
    ):
        await bus.publish_many(orders(5))
        await journal.trim(Retention(max_count=2))
        report = await bus.replay(1, to=seen)

    assert seen.numbers == [3, 4]
    assert report.start == 4


async def test_it_can_be_cancelled_and_leaves_the_caller_as_it_was(place: Place) -> None:
    started = anyio.Event()

    async def hangs(event: OrderPlaced) -> None:
        started.set()
        await anyio.sleep_forever()

    async with MessageBus(journal=place()) as bus:
        await bus.publish(OrderPlaced())
        async with anyio.create_task_group() as group:

            async def replay() -> None:
                await bus.replay(1, to=hangs)

            group.start_soon(replay)
            await started.wait()
            group.cancel_scope.cancel()
        receipt = await bus.publish(OrderPlaced(number=2))
        assert receipt.offset == 2


async def test_it_needs_a_journal_a_started_bus_and_a_handler_for_events(place: Place) -> None:
    async with MessageBus() as plain:
        with pytest.raises(ConfigurationError, match=r"bus.replay\(\) needs a journal"):
            await plain.replay(1, to=Recorder())

    bus = MessageBus(journal=place())
    with pytest.raises(BusNotStartedError):
        await bus.replay(1, to=Recorder())

    def unfit(message: int) -> None:
        raise AssertionError(message)

    async with bus:
        with pytest.raises(HandlerSignatureError, match="annotated int"):
            await bus.replay(1, to=unfit)
        with pytest.raises(ValueError, match="on_error"):
            await bus.replay(1, to=Recorder(), on_error="maybe")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def test_nothing_is_skipped_where_one_page_of_the_journal_ends(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msgbus.bus.durable.replay.PAGE", 3)
    seen = Recorder()

    async with MessageBus(journal=place()) as bus:
        await bus.publish_many([OrderEvent(number=number) for number in range(10)])
        report = await bus.replay(1, to=seen)

    assert seen.numbers == list(range(10))
    assert (report.handled, report.next) == (10, 11)
