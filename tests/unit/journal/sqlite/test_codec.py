"""Codecs of a journal file: what they see, and what they find out."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest

from msgbus.errors import JournalCorruptError, JournalOpenError
from msgbus.journal.operations import Append, Reply, Save
from msgbus.journal.records import DELAYED, Instance, Record, State
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.testing.conformance.journal.kit import EVENTS, SHARED, TIME, join, make_record
from tests.unit.journal.sqlite.files import sql


class Reversing:
    """A codec that is easy to check; remembers what it was told of the bytes."""

    def __init__(self) -> None:
        self.encoded: list[bytes] = []
        self.decoded: list[bytes] = []

    def encode(self, payload: bytes, associated: bytes) -> bytes:
        self.encoded.append(associated)
        return payload[::-1]

    def decode(self, payload: bytes, associated: bytes) -> bytes:
        self.decoded.append(associated)
        return payload[::-1]


class Signing:
    """Signs what it stores together with what that belongs to."""

    def __init__(self, key: bytes = b"key") -> None:
        self._key = key

    def encode(self, payload: bytes, associated: bytes) -> bytes:
        return hmac.digest(self._key, associated + b"\n" + payload, "sha256") + payload

    def decode(self, payload: bytes, associated: bytes) -> bytes:
        if self.encode(payload[32:], associated) != payload:
            message = "The signature does not fit."
            raise RuntimeError(message)
        return payload[32:]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


async def test_a_codec_sees_every_payload_and_what_it_belongs_to(path: Path) -> None:
    codec = Reversing()
    async with SqliteJournal(path, codec=codec) as journal:
        await journal.commit(
            [
                Append(make_record(message_id="a", payload=b"abc")),
                Append(make_record(message_id="b", payload=b"def"), queue=DELAYED, due=TIME),
                Reply("id", TIME, b"ghi"),
                Save(Instance("timer", "größe", b"jkl", TIME, 1)),
            ]
        )
        scan = await journal.read(0, 1, EVENTS)
        (row,) = await journal.due(DELAYED, TIME)
        result = await journal.result("id")
        instance = await journal.instance("timer", "größe")

        assert [one.payload for one in scan.records if isinstance(one, Record)] == [b"abc"]
        assert row.body is not None
        assert row.body.payload == b"def"
        assert result is not None
        assert result.body == b"ghi"
        assert instance is not None
        assert instance.state == b"jkl"
    assert sql(path, "SELECT payload FROM msgbus_messages") == [(b"cba",)]
    assert sql(path, "SELECT body FROM msgbus_results") == [(b"ihg",)]
    assert sql(path, "SELECT body FROM msgbus_pending")[0][0].endswith(b"fed")
    fields = {
        b"message\0a\0shop.OrderPlaced",
        b"message\0b\0shop.OrderPlaced",
        b"result\0id",
        "instance\0timer\0größe".encode(),
    }
    assert set(codec.encoded) == fields | {b"journal"}
    assert set(codec.decoded) == fields | {b"journal"}


async def signed(folder: Path) -> tuple[list[Record], list[bytes], list[bytes]]:
    """Return records, results and states as a signing codec stores them."""
    async with SqliteJournal(folder / "signed.db", codec=Signing()) as journal:
        await journal.commit([Append(make_record(n, message_id=f"m{n}")) for n in range(3)])
        await journal.commit([Reply(f"m{n}", TIME, b"%d" % n) for n in range(2)])
        await journal.commit([Save(Instance("timer", f"{n}", b"s", None, 1)) for n in range(2)])
    async with SqliteJournal(folder / "signed.db") as journal:
        records = [
            one for one in (await journal.read(0, 9, EVENTS)).records if isinstance(one, Record)
        ]
        results = [await journal.result(f"m{n}") for n in range(2)]
        states = [await journal.instance("timer", f"{n}") for n in range(2)]
    bodies = [one.body for one in results if one is not None and one.body is not None]
    return records, bodies, [one.state for one in states if one is not None]


async def test_a_payload_that_was_moved_to_another_row_is_damage_of_that_row(path: Path) -> None:
    (one, two, three), _, _ = await signed(path.parent)
    moved = [one._replace(payload=two.payload), two, three._replace(name="shop.Renamed")]
    delayed = one._replace(message_id="d", payload=two.payload)
    async with SqliteJournal(path) as journal:  # without a codec: the checksums fit
        await journal.commit([Append(record) for record in moved])
        await journal.commit([Append(delayed, queue=DELAYED, due=TIME)])
        await journal.open("shared", SHARED, 0)

    async with SqliteJournal(path, codec=Signing()) as journal:
        found = (await journal.read(0, 9, EVENTS)).records

        assert [item if isinstance(item, int) else item.message_id for item in found] == [
            1,
            "m1",
            3,
        ]
        with pytest.raises(JournalCorruptError, match="or the codec refuses it"):
            await journal.message("m0")
        claims = await journal.claim(await join(journal), "shared", 9, TIME, selection=SHARED)
        assert [claim.record.payload for claim in claims] == [b'{"number":1}']
        assert await journal.count("shared") == {State.CLAIMED: 1, State.DAMAGED: 2}
        assert await journal.due(DELAYED, TIME) == []
        assert await journal.count(DELAYED) == {State.DAMAGED: 1}


async def test_a_result_or_state_that_was_moved_to_another_row_is_damage(path: Path) -> None:
    _, bodies, states = await signed(path.parent)
    async with SqliteJournal(path) as journal:
        await journal.commit(
            [
                Reply("m0", TIME, bodies[1]),
                Reply("m1", TIME, bodies[1]),
                Save(Instance("timer", "0", states[1], TIME, 1)),
                Save(Instance("timer", "1", states[1], TIME, 1)),
            ]
        )

    async with SqliteJournal(path, codec=Signing()) as journal:
        result = await journal.result("m1")

        assert result is not None
        assert result.body == b"1"
        assert [one.key for one in await journal.due_instances(TIME)] == ["1"]
        with pytest.raises(JournalCorruptError, match="The result of m0"):
            await journal.result("m0")
        with pytest.raises(JournalCorruptError, match="Instance '0' of 'timer'"):
            await journal.instance("timer", "0")


async def test_another_key_is_refused_when_the_file_is_opened(path: Path) -> None:
    await SqliteJournal(path, codec=Signing()).close()

    with pytest.raises(JournalOpenError, match="another codec, or with another key"):
        SqliteJournal(path, codec=Signing(b"other"))

    await SqliteJournal(path, codec=Signing()).close()
    await SqliteJournal(path).close()  # payloads come as they are stored
