"""Codecs of a journal file: what they hide, and what they find out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from msgbus.errors import JournalCorruptError, JournalOpenError
from msgbus.journal.letters import LetterSelection
from msgbus.journal.operations import Append, Note, Put, Reply, Save
from msgbus.journal.records import (
    DELAYED,
    DeliveryRecord,
    Instance,
    Letter,
    Outcome,
    Record,
    State,
)
from msgbus.journal.reports import VerifyReport
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    LETTER,
    SHARED,
    TIME,
    join,
    make_record,
    make_row,
)
from tests.unit.journal.sqlite.files import sql
from tests.unit.journal.sqlite.sealing import Sealing, rewrite

SECRET: Final = "Tr0ub4dor"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def about(number: int, secret: str = SECRET) -> list[Any]:
    """Everything that a journal keeps of message `m<number>`, with content of users in it."""
    message, headers = f"m{number}", {"token": f"{secret} header {number}"}
    payload = f'{{"number":{number},"text":"{secret}"}}'.encode()
    error, offset = f"ValueError: {secret} {number}", number + 1
    letter = LETTER._replace(reason=error, traceback=f"in {error}", note=f"see {error}")
    delivery = (message, "orders", 1, Outcome.FAILED, 0.0, 0.1, TIME + number, error, offset)
    delayed = make_record(message_id=f"d{number}", payload=payload, headers=headers)
    return [
        Append(make_record(message_id=message, payload=payload, headers=headers)),
        Append(delayed, queue=DELAYED, due=TIME),
        Put(make_row("orders", offset, error=error)),
        Put(make_row("letters", offset, State.DEAD, error=error, body=delayed), letter),
        Note(DeliveryRecord(*delivery)),
        Reply(message, TIME, payload),
        Reply(f"f{number}", TIME, None, error),
        Save(Instance("timer", f"k{number}", payload, TIME, 1)),
    ]


async def answers(journal: SqliteJournal, number: int) -> list[Any]:
    """What can be read about message `m<number>`."""
    row = make_row("letters", number + 1)
    return [
        await journal.message(f"m{number}"),
        (await journal.find(DELAYED, [State.WAITING]))[number].body,
        await journal.row("orders", number + 1),
        await journal.row("letters", number + 1),
        await journal.letter(row),
        await journal.deliveries(f"m{number}"),
        await journal.result(f"m{number}"),
        await journal.result(f"f{number}"),
        await journal.instance("timer", f"k{number}"),
    ]


async def test_nothing_of_what_users_have_sent_is_readable_in_the_file(tmp_path: Path) -> None:
    found: list[Any] = []
    for name, codec in (("plain.db", None), ("sealed.db", Sealing())):
        path = tmp_path / name
        async with SqliteJournal(path, codec=codec) as journal:
            await journal.commit(about(0))
            found.append(await answers(journal, 0))
            groups = await journal.letter_groups()
            totals = await journal.total_letters(LetterSelection())
            (stored,) = await journal.find_letters(LetterSelection())
            content = path.read_bytes() + path.with_name(f"{name}-wal").read_bytes()

        assert str(found[-1]).count(SECRET) == 15
        assert groups[0].error == totals[0].error == f"ValueError: {SECRET} 0"
        assert stored.letter is not None
        assert stored.letter.note == f"see ValueError: {SECRET} 0"
        # Without a codec each is found: so is what a codec would not have been given.
        assert (content.count(SECRET.encode()) >= 15) == (codec is None)
        assert (SECRET.encode() in content) == (codec is None)

    assert found[0] == found[1]


async def test_what_a_journal_looks_for_stays_readable(path: Path) -> None:
    async with SqliteJournal(path, codec=Sealing()) as journal:
        await journal.commit(about(0))

    assert sql(path, "SELECT message_id, name, topic, version FROM msgbus_messages") == [
        ("m0", "shop.OrderPlaced", "shop.orders", 1)
    ]
    assert sql(path, "SELECT error_type, handler, replays, status FROM msgbus_letters") == [
        ("ValueError", "letters", 2, "dead")
    ]
    bodies = sql(path, "SELECT body FROM msgbus_pending WHERE body IS NOT NULL")
    assert all(
        b'"name":"shop.OrderPlaced"' in body and b'"headers":{}' in body for (body,) in bodies
    )


async def test_a_codec_is_told_where_bytes_belong(path: Path) -> None:
    codec = Sealing()
    async with SqliteJournal(path, codec=codec) as journal:
        for one in about(0):
            await journal.commit([one])

    assert [one.decode() for one in codec.encoded] == [
        '["meta.codec"]',
        '["messages.payload", "m0", "shop.OrderPlaced", 1]',
        '["messages.headers", "m0", "shop.OrderPlaced", 1]',
        '["pending.body", "msgbus.delayed", 1, 1, "d0", "shop.OrderPlaced", 1]',
        '["pending.error", "orders", 1, 1]',
        '["pending.body", "letters", 1, 1, "d0", "shop.OrderPlaced", 1]',
        '["pending.error", "letters", 1, 1]',
        '["letters.reason", "letters", 1, "ValueError", "", 1700000000.0, 1700000001.0, "", '
        '"letters", "", null, 0, 2, null, "dead", 0, ""]',
        '["deliveries.error", 1, "m0", "orders", 1, 1700000000.0]',
        '["results.body", "m0"]',
        '["results.error", "f0"]',
        '["instances.state", "timer", "k0", 1]',
    ]


async def test_a_message_without_headers_is_one_call_of_the_codec(path: Path) -> None:
    codec = Sealing()
    async with SqliteJournal(path, codec=codec) as journal:
        await journal.commit([Append(make_record(message_id="m0", session_id="s"))])

    assert [one.decode() for one in codec.encoded[1:]] == [
        '["messages.payload", "m0", "shop.OrderPlaced", 1]'
    ]
    assert sql(path, "SELECT headers FROM msgbus_messages") == [(None,)]


# -- bytes that were moved -------------------------------------------------------------------------


class Move(NamedTuple):
    """A change of the file that leaves all checksums right."""

    table: str
    change: str
    where: str
    answer: int
    """Which of `answers` is damaged by it."""


def other(table: str, column: str, which: str) -> str:
    """SQL for what another row has in a column."""
    return f"{column} = (SELECT {column} FROM msgbus_{table} WHERE {which})"


MOVES: Final = {
    "a payload": Move("messages", other("messages", "payload", "offset = 2"), "offset = 1", 0),
    "headers": Move("messages", other("messages", "headers", "offset = 2"), "offset = 1", 0),
    "headers into the payload": Move("messages", "payload = unbase64(headers)", "offset = 1", 0),
    "a payload into the headers": Move("messages", "headers = base64(payload)", "offset = 1", 0),
    "plain headers": Move("messages", """headers = '{"token": "mine"}'""", "offset = 1", 0),
    "a plain payload": Move("messages", "payload = CAST('{}' AS BLOB)", "offset = 1", 0),
    "another name": Move("messages", "name = 'shop.OrderPaid'", "offset = 1", 0),
    "another version of the class": Move("messages", "version = 2", "offset = 1", 0),
    "a delayed event": Move(
        "pending",
        other("pending", "body", "subscription = 'msgbus.delayed' AND offset = 2"),
        "subscription = 'msgbus.delayed' AND offset = 1",
        1,
    ),
    "the body of a letter": Move(
        "pending",
        other("pending", "body", "subscription = 'msgbus.delayed' AND offset = 1"),
        "subscription = 'letters' AND offset = 1",
        3,
    ),
    "an error": Move(
        "pending",
        other("pending", "error", "subscription = 'orders' AND offset = 2"),
        "subscription = 'orders' AND offset = 1",
        2,
    ),
    "an error of before": Move(
        "pending", "version = 2", "subscription = 'orders' AND offset = 1", 2
    ),
    "a letter": Move("letters", other("letters", "reason", "offset = 2"), "offset = 1", 4),
    "a letter of before": Move("letters", "replays = 3", "offset = 1", 4),
    "a plain reason": Move("letters", "reason = 'mine'", "offset = 1", 4),
    "the error of a delivery": Move(
        "deliveries", other("deliveries", "error", "offset = 2"), "offset = 1", 5
    ),
    "a reply": Move(
        "results", other("results", "body", "message_id = 'm1'"), "message_id = 'm0'", 6
    ),
    "the error of a reply": Move(
        "results", other("results", "error", "message_id = 'f1'"), "message_id = 'f0'", 7
    ),
    "a plain error of a reply": Move("results", "error = 'mine'", "message_id = 'f0'", 7),
    "a state": Move("instances", other("instances", "state", "key = 'k1'"), "key = 'k0'", 8),
    "a state of before": Move("instances", "version = 2", "key = 'k0'", 8),
}


async def answer(journal: SqliteJournal, number: int) -> Any:
    """One of `answers` about `m0`; the text of the error instead, if there is one."""
    try:
        if number == 1:
            return (await journal.row(DELAYED, 1) or make_row("", 0)).body
        return (await answers(journal, 0))[number]
    except JournalCorruptError as error:
        return str(error)


@pytest.mark.parametrize("move", MOVES.values(), ids=list(MOVES))
async def test_what_was_moved_is_damage_of_its_row_and_of_no_other(path: Path, move: Move) -> None:
    async with SqliteJournal(path, codec=Sealing()) as journal:
        await journal.commit([*about(0), *about(1)])
        before, beside = await answer(journal, move.answer), await answers(journal, 1)
        assert await journal.verify() == VerifyReport(messages=2)

    rewrite(path, move.table, move.change, move.where)

    async with SqliteJournal(path, codec=Sealing()) as journal:
        after = await answer(journal, move.answer)
        report = await journal.verify()
        assert after != before
        if isinstance(after, str):
            assert "or the codec refuses it" in after
        else:
            assert not after or after.state is State.DAMAGED
        assert len(report.damaged) + len(report.problems) == 1, report
        assert [one for one in await answers_beside(journal) if one not in beside] == []


async def answers_beside(journal: SqliteJournal) -> list[Any]:
    """What can be read about `m1`."""
    row = await journal.row(DELAYED, 2)
    assert row is not None
    return [
        await journal.message("m1"),
        row.body,
        await journal.row("orders", 2),
        await journal.row("letters", 2),
        await journal.letter(make_row("letters", 2)),
        await journal.deliveries("m1"),
        await journal.result("m1"),
        await journal.result("f1"),
        await journal.instance("timer", "k1"),
    ]


async def test_without_a_codec_the_same_moves_go_unnoticed(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await journal.commit([*about(0), *about(1, "another")])

    for move in (MOVES["a payload"], MOVES["headers"], MOVES["an error"], MOVES["a reply"]):
        rewrite(path, move.table, move.change, move.where)

    async with SqliteJournal(path) as journal:
        assert (await journal.verify()).is_sound
        message = await journal.message("m0")
        assert message is not None
        assert message.headers == {"token": "another header 1"}


async def test_moved_bytes_are_set_aside_and_the_others_are_handled(path: Path) -> None:
    async with SqliteJournal(path, codec=Sealing()) as journal:
        records = [make_record(n, message_id=f"m{n}", headers={"n": f"{n}"}) for n in range(3)]
        await journal.commit([Append(record) for record in records])
        await journal.commit([Append(make_record(), queue=DELAYED, due=TIME + n) for n in range(2)])
        await journal.open("shared", SHARED, 0)
    rewrite(path, "messages", other("messages", "headers", "offset = 2"), "offset = 1")
    rewrite(path, "pending", other("pending", "body", "offset = 2"), "offset = 1")

    async with SqliteJournal(path, codec=Sealing()) as journal:
        found = (await journal.read(0, 9, EVENTS)).records
        assert [one if isinstance(one, int) else one.message_id for one in found] == [1, "m1", "m2"]
        claims = await journal.claim(await join(journal), "shared", 9, TIME, selection=SHARED)
        assert [claim.record.headers["n"] for claim in claims] == ["1", "2"]
        assert await journal.count("shared") == {State.CLAIMED: 2, State.DAMAGED: 1}
        assert [row.offset for row in await journal.due(DELAYED, TIME + 9)] == [2]
        assert await journal.count(DELAYED) == {State.WAITING: 1, State.DAMAGED: 1}
        assert (await journal.verify()).damaged == (1,)
        # What was set aside is sound, as a row; but what it was about is lost.
        assert (await journal.verify()).problems == (
            "Message 1 of 'msgbus.delayed' has no message, neither in the log nor in the row.",
        )


async def test_a_letter_is_written_again_with_its_row(path: Path) -> None:
    async with SqliteJournal(path, codec=Sealing()) as journal:
        await journal.commit(about(0)[:4])
        row = await journal.row("letters", 1)
        assert row is not None
        again = Letter("KeyError", "again", TIME + 5, TIME + 6, "deep", note="later")
        await journal.commit([Put(row.moved(State.DEAD, time=TIME, error="E"), again)])

        stored = await journal.letter(row)

        assert stored == again._replace(first_attempt=TIME, replays=2)


# -- the codec of a file ---------------------------------------------------------------------------


@pytest.mark.parametrize("made", ["none", "key"])
@pytest.mark.parametrize("opened", ["none", "key", "other"])
async def test_a_file_is_opened_with_the_codec_it_was_made_with(
    path: Path, made: str, opened: str
) -> None:
    codecs = {"none": None, "key": Sealing(), "other": Sealing(b"other")}
    await SqliteJournal(path, codec=codecs[made]).close()

    if made == opened:
        await SqliteJournal(path, codec=codecs[opened]).close()
        return
    says = "was made with a codec: open it" if opened == "none" else "another key, or none"
    with pytest.raises(JournalOpenError, match=says):
        SqliteJournal(path, codec=codecs[opened])


class Lenient(Sealing):
    """Takes what was written before there was a codec."""

    def decode(self, payload: bytes, associated: bytes) -> bytes:
        try:
            return super().decode(payload, associated)
        except RuntimeError:
            return payload


async def test_a_codec_may_take_what_was_written_without_one(path: Path) -> None:
    record = make_record(message_id="m0")
    async with SqliteJournal(path) as journal:
        await journal.commit([Append(record)])

    async with SqliteJournal(path, codec=Lenient()) as journal:
        found = await journal.message("m0")
        assert isinstance(found, Record)
        assert found.payload == record.payload
