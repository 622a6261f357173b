"""What the journal of a bus says about commands and deliveries, and what that costs a handler."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import anyio
import pytest

from msgbus import (
    BusConfig,
    Command,
    ConfigurationError,
    HandlerTimeoutError,
    MessageBus,
    Refusal,
    SessionEndEvent,
)
from msgbus.journal import SqliteJournal
from msgbus.journal.memory import MemoryJournal
from msgbus.journal.records import Kind, Record
from tests.durable_shop import (
    CountOrders,
    DownError,
    Place,
    Placed,
    Seen,
    journal_of,
    outcomes,
    recorded,
    url_of,
)
from tests.fakes import logged
from tests.unit.journal.sqlite.plans import recorded as recorded_by


class Odd(Command[None]):
    thing: Any = None


def shop(record: Literal["all", "failures", "messages"] = "all") -> MessageBus:
    bus = MessageBus(BusConfig(record=record), journal="memory:")

    @bus.handles(Place)
    async def place(command: Place) -> str:
        if command.sku == "down":
            raise DownError
        if command.sku == "no":
            raise Refusal("not today")
        return command.sku

    return bus


async def test_commands_and_how_they_ended_are_recorded() -> None:
    async with shop() as bus:
        commands = [Place(sku="tea"), Place(sku="down"), Place(sku="no")]
        for command in commands:
            (await bus.execute(command)).error  # noqa: B018 (looked at)
        await bus.settled()

        assert await recorded(bus) == [("durable.Place", "command")] * 3
        ends = [(await outcomes(bus, one.message_id))[0][2] for one in commands]
        assert ends == ["ok", "failed", "refused"]


async def test_a_handler_that_runs_out_of_time_is_recorded_as_that() -> None:
    bus = MessageBus(journal="memory:")

    @bus.handles(Place, timeout=0.001)
    async def place(command: Place) -> str:
        await anyio.sleep_forever()
        return ""

    async with bus:
        command = Place()
        assert isinstance((await bus.execute(command)).exception, HandlerTimeoutError)
        await bus.settled()

        assert await outcomes(bus, command.message_id) == [("place", 1, "timed_out")]


async def test_queries_and_system_events_are_not_recorded() -> None:
    bus = MessageBus(journal="memory:")
    ended: list[SessionEndEvent] = []

    @bus.handles(CountOrders)
    async def count(query: CountOrders) -> int:
        return 1

    @bus.on(SessionEndEvent)
    async def note(event: SessionEndEvent) -> None:
        ended.append(event)

    async with bus:
        async with bus.session():
            assert await bus.call(CountOrders()) == 1
        await bus.settled()

        assert len(ended) == 1
        assert await recorded(bus) == []


@pytest.mark.parametrize(("record", "expected"), [("failures", 1), ("messages", 0)])
async def test_less_may_be_recorded(record: Literal["failures", "messages"], expected: int) -> None:
    async with shop(record) as bus:
        fine, bad = Place(), Place(sku="down")
        await bus.execute(fine)
        (await bus.execute(bad)).error  # noqa: B018 (looked at)
        await bus.settled()

        assert await recorded(bus) == [("durable.Place", "command")] * 2
        assert await outcomes(bus, fine.message_id) == []
        assert len(await outcomes(bus, bad.message_id)) == expected


async def test_a_command_that_is_no_json_is_executed_and_its_absence_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MessageBus(journal="memory:")

    @bus.handles(Odd)
    async def handle(command: Odd) -> None: ...

    async with bus:
        result = await bus.execute(Odd(thing=object()))
        await bus.settled()

        assert result.success
        (entry,) = logged(caplog, "command_not_recorded")
        assert entry["message_type"] == "Odd"
        assert await recorded(bus) == []


async def test_a_command_that_no_file_can_hold_fails_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bus = MessageBus(journal=url_of(tmp_path))

    @bus.handles(Place)
    async def place(command: Place) -> str:
        return command.sku

    async with bus, bus.session("half \udcff") as session:
        assert (await session.execute(Place())).success
        await bus.publish(Placed(number=1))
        await bus.settled()

        (entry,) = logged(caplog, "command_not_recorded")
        assert entry["message_type"] == "Place"
        assert await recorded(bus) == [("durable.Placed", "event")]


async def test_a_full_buffer_lets_handlers_wait_and_loses_nothing() -> None:
    bus = MessageBus(BusConfig(record_buffer=1), journal="memory:")

    @bus.handles(Place)
    async def place(command: Place) -> str:
        return command.sku

    async with bus:
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(bus.execute, Place())
        await bus.settled()

        assert len(await recorded(bus)) == 20


async def found(bus: MessageBus, **which: Any) -> list[tuple[str, Kind]]:
    page = await journal_of(bus).find_messages(**which)
    return [(one.name, one.kind) for one in page.records if isinstance(one, Record)]


async def test_what_was_recorded_can_be_found_by_kind_session_and_key() -> None:
    async with shop() as bus:
        async with bus.session("job") as session:
            await session.execute(Place())
        await bus.publish(Placed(sku="jam"))
        await bus.settled()

        assert await found(bus, session_id="job") == [("durable.Place", Kind.COMMAND)]
        assert await found(bus, key="jam") == [("durable.Placed", Kind.EVENT)]
        assert await found(bus, kind=Kind.COMMAND) == [("durable.Place", Kind.COMMAND)]


async def test_records_outlive_the_bus() -> None:
    async with MemoryJournal() as journal:
        bus = MessageBus(journal=journal)

        @bus.handles(Place)
        async def place(command: Place) -> str:
            return command.sku

        async with bus:
            command = Place()
            await bus.execute(command)

        assert await journal.head() == 1
        assert len(await journal.deliveries(command.message_id)) == 1


async def test_a_bus_may_demand_more_than_a_journal_promises() -> None:
    bus = MessageBus(BusConfig(require_ack="fsync"), journal="memory:")
    with pytest.raises(ConfigurationError, match="promises only 'memory'"):
        await bus.start()


async def test_a_command_that_is_cancelled_does_not_wait_for_room_in_the_buffer() -> None:
    bus = MessageBus(BusConfig(record_buffer=1), journal="memory:")
    began = anyio.Event()

    @bus.handles(Place)
    async def place(command: Place) -> str:
        began.set()
        await anyio.sleep_forever()
        return command.sku

    async with bus:
        async with anyio.create_task_group() as group:
            group.start_soon(bus.execute, Place())
            await began.wait()
            group.cancel_scope.cancel()
        await bus.settled()

        assert len(await recorded(bus)) == 1


async def test_the_history_of_events_is_written_with_many_of_them_and_is_whole(
    tmp_path: Path,
) -> None:
    statements: list[tuple[str, Any]] = []
    path, seen = tmp_path / "shop.db", Seen()
    events = [Placed(number=number) for number in range(50)]
    async with SqliteJournal(path, _connect=recorded_by(statements)) as journal:
        bus = MessageBus(journal=journal)
        bus.subscribe(Placed, seen, durable="stock")
        async with bus:
            for event in events:
                await bus.publish(event)
            history = [one for one, _ in statements if "INTO msgbus_deliveries" in one]

    assert len(history) < len(events) / 5
    async with SqliteJournal(path) as again:
        for event in events:
            found = await again.deliveries(event.message_id)
            assert [(one.handler, one.outcome.value) for one in found] == [("Seen", "ok")]
