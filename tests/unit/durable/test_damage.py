"""A bus on a damaged file: what is damaged is set aside, shown, and stops nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from msgbus import MessageBus
from msgbus.bus.durable.replay import ReplayFailure
from msgbus.handlers.delivery import Mode, StartAt
from msgbus.journal.operations import Append, Note, Operation, Put, Reply
from msgbus.journal.records import DELAYED, DeliveryRecord, Letter, Outcome, Record, State
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.telemetry.prometheus import expose
from msgbus.testing.conformance.journal.kit import TIME, append, make_record, make_row, until
from tests.durable_shop import Placed, Seen, journal_of, url_of
from tests.fakes import logged
from tests.unit.journal.sqlite.files import change
from tests.unit.telemetry.exposition import parsed, value

COUNT = 12


def placed(number: int) -> Record:
    payload = b'{"sku":"tea","number":%d}' % number
    return make_record(number, name="durable.Placed", key=f"k{number % 3}", payload=payload)


async def fill(file: Path) -> None:
    """Messages 1 to 12, and rows of every table that a start or a delivery looks at."""
    async with SqliteJournal(file) as journal:
        await append(journal, *(placed(number) for number in range(1, COUNT + 1)))
        letter = Letter("E", "no stock", TIME, TIME)
        body = make_record(50, name="durable.Placed")
        rows: list[Operation] = [
            Put(make_row("receipts", 0, State.DEAD, body=body), letter),
            Put(make_row("other", 1, State.DEAD), letter),
            Append(placed(60), queue=DELAYED, due=TIME),
            Append(placed(61), queue=DELAYED, due=TIME),
            Reply("a", TIME, b"1"),
            Note(DeliveryRecord("a", "receipts", 1, Outcome.OK, 0, 0, TIME)),
        ]
        await journal.commit(rows)


DAMAGE = (
    "UPDATE msgbus_messages SET payload = x'00' WHERE offset = 3",
    "UPDATE msgbus_messages SET name = 'durable.Plaxed' WHERE offset = 5",
    "DELETE FROM msgbus_messages WHERE offset = 8",
    "UPDATE msgbus_pending SET attempt = 7 WHERE subscription = 'other'",
    f"UPDATE msgbus_pending SET body = x'00' WHERE subscription = '{DELAYED}' AND offset = 1",
    "UPDATE msgbus_letters SET reason = 'other' WHERE subscription = 'receipts'",
    "UPDATE msgbus_results SET body = x'00'",
    "UPDATE msgbus_deliveries SET run = 9",
)


def damaged(caplog: pytest.LogCaptureFixture) -> list[Mapping[str, Any]]:
    return logged(caplog, "messages_damaged")


@pytest.mark.parametrize("mode", list(Mode))
async def test_all_else_is_delivered_and_the_damaged_ones_are_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: Mode
) -> None:
    file = tmp_path / "shop.db"
    await fill(file)
    for statement in DAMAGE:
        change(file, statement)
    seen = Seen()
    bus = MessageBus(journal=url_of(tmp_path))
    subscription = bus.subscribe(Placed, seen, durable="receipts", mode=mode)

    async with bus:
        await bus.publish(Placed(number=99))
        await bus.settled()
        # They are counted and logged at the next look, a moment after all is handled.
        await until(lambda: "receipts" in {one["subscription"] for one in damaged(caplog)})
        stats = bus.stats().subscriptions["receipts"]
        series = parsed(expose(bus))
        rows = await journal_of(bus).find("receipts", [State.DAMAGED])

    wanted = [number for number in range(1, COUNT + 1) if number not in (3, 5, 8)]
    assert sorted(set(seen.numbers)) == sorted([*wanted, 61, 99])
    assert len(seen.numbers) == len(wanted) + 2
    assert [row.offset for row in rows] == [3, 5, 8]
    assert stats.damaged == 3
    assert subscription.progress().damaged == 3
    assert value(series, "subscription_damaged", subscription="receipts") == 3
    lines = {one["subscription"]: one for one in damaged(caplog)}
    assert set(lines) == {"receipts", DELAYED}
    assert (lines["receipts"]["damaged"], lines["receipts"]["offsets"]) == (3, [3, 5, 8])


async def test_a_member_whose_row_is_damaged_writes_it_anew(tmp_path: Path) -> None:
    seen = Seen()
    bus = MessageBus(journal=url_of(tmp_path))
    bus.subscribe(Placed, seen, durable="receipts")
    async with bus:
        (member,) = await journal_of(bus).members()
        change(tmp_path / "shop.db", "UPDATE msgbus_members SET serves = '{}'")
        version = await journal_of(bus).changed(-1)
        while (await journal_of(bus).members())[0].process != member.process:
            version = await journal_of(bus).changed(version)

        (found,) = await journal_of(bus).members()
        await bus.publish(Placed(number=1))
        await bus.settled()

    assert (found.id, found.serves) == (member.id, member.serves)
    assert seen.numbers == [1]


async def test_a_replay_reports_a_missing_record(tmp_path: Path) -> None:
    await fill(tmp_path / "shop.db")
    change(tmp_path / "shop.db", "DELETE FROM msgbus_messages WHERE offset = 8")
    seen = Seen()
    bus = MessageBus(journal=url_of(tmp_path))
    bus.subscribe(Placed, seen, durable="receipts", start=StartAt.LATEST)
    async with bus:
        report = await bus.replay(1, "receipts")

    assert report.failures == (ReplayFailure(offset=8, error="The record is damaged or missing."),)
    assert report.unreadable == 1
