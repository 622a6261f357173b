from __future__ import annotations

from pathlib import Path

import pytest

from msgbus.errors import CursorError, JournalCorruptError
from msgbus.journal.operations import Append, Drop, Note, Pass, Put, Reply, Save, Seek
from msgbus.journal.ports import Due
from msgbus.journal.records import (
    DELAYED,
    DeliveryRecord,
    Instance,
    Kind,
    Member,
    Order,
    Outcome,
    Selection,
    State,
)
from msgbus.journal.sqlite.columns import (
    CURSOR,
    DELIVERY,
    LETTER as LETTER_COLUMNS,
    PENDING,
    RESULT,
)
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.journal.sqlite.messages import MESSAGE
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    LETTER,
    SHARED,
    TIME,
    claimed_offsets,
    end,
    fill,
    join,
    make_record,
    make_row,
    numbers,
    states_of,
    take,
)
from tests.unit.journal.sqlite.files import change, sql


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def columns(names: str, *without: str) -> list[str]:
    return [name for name in names.split(", ") if name not in without]


VALUES = {
    "offset": "77",
    "payload": "x'00'",
    "body": "x'00'",
    "kind": "'evint'",
    "due": "3.5",
    "slot": "slot + 1",
    "state": "'wating'",
    "owner": "99",
    "time": "time + 1",
}


def damage(path: Path, table: str, column: str, where: str) -> None:
    """Change one column of one row to another value of its type."""
    numeric = {"version", "depth", "from_system", "crc", "partition", "attempt", "alone", "epoch"}
    numeric |= {
        "wait",
        "run",
        "acked",
        "fetched",
        "answered",
        "replays",
        "first_attempt",
        "last_attempt",
    }
    value = VALUES.get(column, f"{column} + 1" if column in numeric else "'other'")
    change(path, f"UPDATE msgbus_{table} SET {column} = {value} WHERE {where}")


# -- messages --------------------------------------------------------------------------------


@pytest.mark.parametrize("column", columns(MESSAGE))
@pytest.mark.parametrize("names", [None, {"shop.OrderPlaced"}])
async def test_any_damaged_column_of_a_message_is_noticed(
    path: Path, column: str, names: set[str] | None
) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 3)
        await journal.commit([Append(make_record(9, name="shop.Other"))])
        await journal.read(0, 9, Selection(names={"shop.OrderPlaced"}))  # knows both names
        damage(path, "messages", column, "offset = 2")

        scan = await journal.read(0, 9, Selection(names=names))

        assert numbers(scan.records)[:2] == [0, 2]
        damaged = [one for one in scan.records if isinstance(one, int)]
        # Where it was is seen to be missing; so is what lies before where it seems to be.
        assert damaged[:2] == ([2, 5] if column == "offset" else [2])


async def test_a_damaged_message_belongs_to_one_partition(path: Path) -> None:
    def key(_: object) -> str:
        return "k"

    for selection in (
        Selection(order=Order.KEY, partitions=4),
        Selection(order=Order.KEY, partitions=4, key=key),
    ):
        async with SqliteJournal(path) as journal:
            (offset,) = await fill(journal, 1)
            damage(path, "messages", "topic", f"offset = {offset}")

            found = [
                one
                for partition in range(4)
                for one in (await journal.read(offset - 1, 9, selection, [partition])).records
            ]

            assert found == [offset]


async def test_text_that_is_no_text_damages_its_message_only(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 3)
        await journal.open("shared", SHARED, 0)
        member = await join(journal)
        change(path, "UPDATE msgbus_messages SET topic = CAST(x'ff' AS TEXT) WHERE offset = 2")

        scan = await journal.read(0, 9, EVENTS)
        claims = await journal.claim(member, "shared", 9, TIME, selection=SHARED)

        assert numbers(scan.records) == [0, 2]
        assert scan.records[1] == 2
        assert claimed_offsets(claims) == [1, 3]
        assert await states_of(journal, "shared") == [State.CLAIMED, State.DAMAGED, State.CLAIMED]


async def test_a_damaged_message_in_doubt_gets_a_damaged_row(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 3)
        member = await join(journal)
        cursor = await take(journal, member, "orders", EVENTS)
        await journal.commit([Pass(cursor, 0, 3)], member)
        damage(path, "messages", "payload", "offset = 1")
        await end(journal, member)

        await take(journal, await join(journal), "orders", EVENTS)

        assert await states_of(journal, "orders") == [State.DAMAGED, State.WAITING, State.PARKED]


async def test_a_missing_message_is_reported_in_its_place(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 6)
        change(path, "DELETE FROM msgbus_messages WHERE offset = 3")
        for limit in range(1, 8):
            found: list[int] = []
            after = 0
            while after < 6:
                scan = await journal.read(after, limit, EVENTS)
                assert len(scan.records) <= limit
                found += [one if isinstance(one, int) else one.offset for one in scan.records]
                after = scan.upto
            assert found == [1, 2, 3, 4, 5, 6]
        assert (await journal.read(2, 1, EVENTS)).records == [3]


@pytest.mark.parametrize(
    "selection", [Selection(names={"shop.Other"}), Selection(kind=Kind.COMMAND)]
)
async def test_a_missing_message_is_reported_to_those_who_want_few(
    path: Path, selection: Selection
) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 6)
        change(path, "DELETE FROM msgbus_messages WHERE offset = 3")

        assert (await journal.read(0, 9, selection)).records == [3]


async def test_a_missing_message_belongs_to_one_partition(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 6)
        change(path, "DELETE FROM msgbus_messages WHERE offset = 3")
        keyed = Selection(order=Order.KEY, partitions=4)

        found = [
            one
            for partition in range(4)
            for one in (await journal.read(0, 9, keyed, [partition])).records
            if isinstance(one, int)
        ]

        assert found == [3]


async def test_trimmed_messages_are_not_missing(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 6)
        await journal.commit([Put(make_row("orders", 2, State.DEAD), LETTER)])
        await journal.trim(before=4)

        scan = await journal.read(0, 9, EVENTS)

        assert numbers(scan.records) == [1, 3, 4, 5]
        assert len(scan.records) == 4


async def test_a_damaged_offset_leaves_no_endless_gap(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 6)
        change(path, "UPDATE msgbus_messages SET offset = 6 + (1 << 40) WHERE offset = 6")

        found: list[int] = []
        after, reads, head = 0, 0, await journal.head()
        while after < head:
            scan = await journal.read(after, 300, EVENTS)
            found += [one if isinstance(one, int) else one.offset for one in scan.records]
            after, reads = scan.upto, reads + 1

        assert found == [*range(1, 1006), 6 + (1 << 40)]
        assert reads < 10
        assert await fill(journal, 1) == [7 + (1 << 40)]


async def test_a_damaged_number_of_the_file_stops_the_journal_with_an_error(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 3)
        change(path, "UPDATE msgbus_meta SET value = '9' WHERE key = 'trimmed'")

        with pytest.raises(JournalCorruptError, match="'trimmed' of msgbus_meta"):
            await journal.head()
    with pytest.raises(JournalCorruptError, match="'trimmed' of msgbus_meta"):
        SqliteJournal(path)


@pytest.mark.parametrize("column", ["process", "serves", "crc"])
async def test_a_damaged_member_serves_nothing_until_it_is_written_anew(
    path: Path, column: str
) -> None:
    async with SqliteJournal(path) as journal:
        member, other = await join(journal, orders="x"), await join(journal, bills="y")
        damage(path, "members", column, f"id = {member.id}")

        assert await journal.members() == [Member(member.id, "", {}, 0), other]
        await journal.open("orders", SHARED, 0)
        renewed = await journal.renew(member)
        assert await journal.members() == [renewed, other]


@pytest.mark.parametrize("column", columns(DELIVERY, "offset", "message_id"))
async def test_a_damaged_delivery_is_left_out(path: Path, column: str) -> None:
    async with SqliteJournal(path) as journal:
        for number in (1, 2):
            delivery = DeliveryRecord("m", "ship", number, Outcome.OK, 0.5, 0.25, TIME, "E")
            await journal.commit([Note(delivery)])
        damage(path, "deliveries", column, "id = 1")

        assert [one.attempt for one in await journal.deliveries("m")] == [2]


async def test_a_time_that_is_no_number_stops_no_other_row(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 2)
        member = await join(journal)
        rows = [make_row("orders", offset, due=TIME + offset) for offset in (1, 2)]
        await journal.commit([Put(row) for row in rows])
        change(path, "UPDATE msgbus_pending SET due = 'soon' WHERE offset = 1")

        assert await journal.next_due("orders") == Due(TIME + 2, has_suspects=False)
        assert [row.offset for row in await journal.find("orders", [State.DAMAGED])] == [1]
        assert claimed_offsets(await journal.claim(member, "orders", 9, TIME + 9)) == [2]


# -- pending ---------------------------------------------------------------------------------


@pytest.mark.parametrize("column", columns(PENDING, "subscription"))
async def test_a_damaged_row_is_never_claimed(path: Path, column: str) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 3)
        await journal.commit([Put(make_row("orders", offset)) for offset in (1, 2, 3)])
        damage(path, "pending", column, "offset = 2")
        member = await join(journal)

        claims = [
            *await journal.claim(member, "orders", 9, TIME),
            *await journal.claim(member, "orders", 9, TIME, alone=True),
        ]

        assert claimed_offsets(claims) == [1, 3]
        (row,) = await journal.find("orders", [State.DAMAGED])
        assert row.state is State.DAMAGED
        assert row.owner is None
        await journal.commit([Drop(row)])
        assert await states_of(journal, "orders") == [State.CLAIMED] * 2


async def test_a_damaged_row_keeps_its_key_parked_until_it_is_discarded(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 2)
        rows = [make_row("orders", 1, key="a"), make_row("orders", 2, State.PARKED, key="a")]
        await journal.commit([Put(row) for row in rows])
        damage(path, "pending", "attempt", "offset = 1")
        member = await join(journal)

        assert await journal.claim(member, "orders", 9, TIME) == []
        assert await states_of(journal, "orders") == [State.DAMAGED, State.PARKED]
        (damaged,) = await journal.find("orders", [State.DAMAGED])
        await journal.commit([Drop(damaged)])

        assert claimed_offsets(await journal.claim(member, "orders", 9, TIME)) == [2]


async def test_a_damaged_parked_row_holds_back_those_behind_it(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        states = (State.WAITING, State.PARKED, State.PARKED)
        rows = [make_row("orders", n, state, key="a") for n, state in enumerate(states, 1)]
        await journal.commit([Put(row) for row in rows])
        damage(path, "pending", "error", "offset = 2")

        await journal.commit([Drop(rows[0])])

        assert await states_of(journal, "orders") == [State.DAMAGED, State.PARKED]
        (damaged,) = await journal.find("orders", [State.DAMAGED])
        await journal.commit([Drop(damaged)])
        assert await states_of(journal, "orders") == [State.WAITING]


async def test_a_damaged_row_of_an_ended_member_is_set_aside(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        member = await join(journal)
        rows = [make_row("orders", n, State.CLAIMED, owner=member.id) for n in (1, 2)]
        await journal.commit([Put(row) for row in rows])
        damage(path, "pending", "time", "offset = 1")

        await end(journal, member)

        assert await states_of(journal, "orders") == [State.DAMAGED, State.WAITING]


async def test_a_damaged_delayed_event_holds_up_no_other(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await journal.commit([Append(make_record(n), queue=DELAYED, due=TIME) for n in range(3)])
        damage(path, "pending", "body", "offset = 1")

        found = await journal.due(DELAYED, TIME, 1)

        assert [row.offset for row in found] == [2]
        assert (await journal.count(DELAYED))[State.DAMAGED] == 1


# -- cursors, results, letters, instances ------------------------------------------------------


@pytest.mark.parametrize("column", columns(CURSOR, "name", "partition"))
async def test_a_damaged_cursor_stops_its_subscription_only(path: Path, column: str) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 2)
        member = await join(journal)
        for name in ("orders", "bills"):
            await journal.open(name, SHARED, 0)
        damage(path, "subscriptions", column, "name = 'orders'")

        with pytest.raises(CursorError, match="'orders' is damaged"):
            await journal.open("orders", SHARED, 0)
        with pytest.raises(CursorError, match="'orders'"):
            await journal.cursors("orders")
        with pytest.raises(CursorError, match="'orders'"):
            await journal.claim(member, "orders", 1, TIME, selection=SHARED)
        with pytest.raises(CursorError, match="'orders'"):
            await journal.acquire(member, "orders", 0, SHARED)

        assert [cursor.name for cursor in await journal.cursors()] == ["bills"]
        assert len(await journal.claim(member, "bills", 9, TIME, selection=SHARED)) == 2
        await end(journal, member)


async def test_a_seek_repairs_a_damaged_cursor(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 2)
        (before,) = await journal.open("orders", EVENTS, 0)
        damage(path, "subscriptions", "acked", "name = 'orders'")

        await journal.commit([Seek("orders", 1)])

        (cursor,) = await journal.cursors("orders")
        assert (cursor.acked, cursor.fetched) == (1, 1)
        assert cursor.epoch > before.epoch


@pytest.mark.parametrize("column", columns(RESULT, "message_id"))
async def test_a_damaged_result_is_not_given(path: Path, column: str) -> None:
    async with SqliteJournal(path) as journal:
        await journal.commit([Reply("a", TIME, b"{}"), Reply("b", TIME, None, "no stock")])
        damage(path, "results", column, "message_id = 'a'")

        with pytest.raises(JournalCorruptError, match="result of a"):
            await journal.result("a")
        assert await journal.result("b") is not None


@pytest.mark.parametrize("column", columns(LETTER_COLUMNS, "subscription", "offset"))
async def test_a_damaged_letter_is_not_given(path: Path, column: str) -> None:
    async with SqliteJournal(path) as journal:
        rows = [make_row("orders", offset, State.DEAD) for offset in (1, 2)]
        await journal.commit([Put(row, LETTER) for row in rows])
        damage(path, "letters", column, "offset = 1")

        with pytest.raises(JournalCorruptError, match="letter of message 1"):
            await journal.letter(rows[0])
        assert await journal.letter(rows[1]) == LETTER


async def test_a_damaged_instance_is_not_given(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await journal.commit([Save(Instance("timer", key, b"", TIME, 1)) for key in "ab"])
        damage(path, "instances", "version", "key = 'a'")

        with pytest.raises(JournalCorruptError, match="Instance 'a'"):
            await journal.instance("timer", "a")
        assert [one.key for one in await journal.due_instances(TIME)] == ["b"]


async def test_unknown_states_are_counted_as_damaged(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await journal.commit([Put(make_row("orders", 1))])
        sql(path, "UPDATE msgbus_pending SET state = 'nonsense'")

        assert await journal.count() == {State.DAMAGED: 1}
        assert (await journal.find(None, [State.DAMAGED]))[0].offset == 1
