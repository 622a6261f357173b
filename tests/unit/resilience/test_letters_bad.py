"""One bad letter harms no other: files are checked before they are taken, replays go on."""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import field_validator

from msgbus import Event
from msgbus.errors import DeadLetterError, DeadLetterStoreError, UnreadableLetterError
from msgbus.journal.records import Pending
from msgbus.journal.sqlite.pending import PendingRows
from msgbus.resilience import DeadLetterEntry, DeadLetterQueue
from msgbus.resilience.dead_letters.rows import number_of
from tests.unit.resilience.letter_fakes import (
    STORES,
    CardCharged,
    bury,
    bury_orders,
    opened_queue,
)


async def exported(number: int = 3) -> list[dict[str, Any]]:
    """Letters as a file has them."""
    queue = DeadLetterQueue()
    bury_orders(queue, number)
    file = io.StringIO()
    await queue.export(file)
    return [json.loads(line) for line in file.getvalue().splitlines()]


BAD: dict[str, Any] = {
    "attempts": ["many", -1, True, 1.5, 10**30, None],
    "version": ["1", None, -2],
    "replays": [None, -1],
    "kind": ["query", 7, None],
    "status": ["lost", 3],
    "payload": [None, {"order": 1}, "\ud800"],
    "message_id": [7, None],
    "message_type": [7, None],
    "handler": [7, None],
    "target": [None, 7],
    "scope": [7, []],
    "error": [None, "\udfff"],
    "error_type": [None],
    "traceback": [None, 7],
    "reason": [None, ["x"]],
    "correlation_id": [None, 7],
    "causation_id": [7],
    "session_id": [False],
    "topic": [7],
    "note": [7],
    "origin": [None],
    "headers": [None, [1], {"a": 1}, {"a": None}],
    "answered": ["yes", 1, None],
    "from_system": ["no", 0],
    "first_attempt": ["yesterday", None, 7, "0001-01-01T00:00:00+14:00"],
    "last_attempt": ["", None, "9999-12-31T23:59:59-14:00"],
    "letter_id": [None, 7, "x"],
    "surprise": [1],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
async def test_every_field_of_every_line_is_checked_before_any_is_taken(
    name: str, value: object
) -> None:
    """Point 7: a bad value would come to light when the letter is replayed, or never."""
    lines = await exported()
    lines[1][name] = value
    queue = DeadLetterQueue()

    with pytest.raises(DeadLetterError, match=r"Line 2 of .* Nothing was imported"):
        await queue.import_(io.StringIO("\n".join(json.dumps(line) for line in lines)))

    assert await queue.count(status=None) == 0


@STORES
@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b"null", b"\xff\xfe", b'{"letter_id": 1}', b"[" * 100_000, b'{"a": ' * 100_000],
    ids=["broken", "list", "null", "no text", "too little", "deep", "deeper"],
)
async def test_a_line_that_is_no_letter_is_named(kind: str, line: bytes, tmp_path: Path) -> None:
    """Point 7: whatever is in the file, the error says where."""
    good = [json.dumps(one).encode() for one in await exported(2)]
    path = tmp_path / "letters.jsonl"
    with path.open("wb") as file:
        file.write(b"\n".join([good[0], line, good[1]]))

    async with opened_queue(kind, tmp_path) as (queue, _, _):
        with pytest.raises(DeadLetterError, match=r"Line 2 of .*letters.jsonl.*Nothing was"):
            await queue.import_(path)
        assert await queue.count(status=None) == 0


@STORES
async def test_what_is_exported_can_be_imported(kind: str, tmp_path: Path) -> None:
    """Point 7: the check refuses nothing that a store can hold."""
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        letters = bury_orders(queue, 3)
        await queue.edit(letters[0], order=7)
        await queue.discard(letters[1], "für später")
        bury(queue, CardCharged(note="snow ☃"), error=ValueError("\x00"))
        file = io.StringIO()
        number = await queue.export(file)
        other = DeadLetterQueue()
        report = await other.import_(io.StringIO(file.getvalue()))

    assert number == report.imported == 5


# -- replay --------------------------------------------------------------------------------------


class Moody(Event, name="bad.Moody"):
    text: str = ""

    @field_validator("text")
    @classmethod
    def check(cls, text: str) -> str:
        if text == "bad" and not lenient:
            raise RuntimeError("the rates service is down")
        return text


lenient: list[bool] = []


@STORES
async def test_a_letter_whose_class_fails_on_it_does_not_stop_the_others(
    kind: str, tmp_path: Path
) -> None:
    """Point 7: a validator may raise anything."""
    seen: list[object] = []

    async def handle(letter: DeadLetterEntry) -> None:
        seen.append(letter.message)

    async with opened_queue(kind, tmp_path) as (queue, _, _):
        lenient.append(True)
        for text in ("a", "bad", "b"):
            bury(queue, Moody(text=text))
        lenient.clear()
        file = io.StringIO()
        await queue.export(file)
        async with DeadLetterQueue() as other:
            # From a file: what was never decoded has to be, to be replayed.
            await other.import_(io.StringIO(file.getvalue()))
            other.connect(handle)
            dry = await other.replay_all(dry_run=True)
            report = await other.replay_all()
            (left,) = await other.find()
            with pytest.raises(UnreadableLetterError, match="rates service"):
                _ = left.message

    assert (dry.succeeded, dry.failed) == (report.succeeded, report.failed) == (2, 1)
    assert report.errors == {"UnreadableLetterError": 1}
    assert seen == [Moody(text="a"), Moody(text="b")]


@pytest.mark.parametrize("status", ["dead", "replaying"])
async def test_a_damaged_letter_does_not_stop_the_others(status: str, tmp_path: Path) -> None:
    """Point 7: a row whose checksum does not fit is counted as failed, and the rest goes on."""
    async with opened_queue("journal", tmp_path) as (queue, service, _):
        letters = bury_orders(queue, 250)
        await queue.store.flush()
        with closing(sqlite3.connect(tmp_path / "journal.db")) as other, other:
            other.execute(
                "UPDATE msgbus_letters SET handler = 'other', status = ? WHERE message_id = ?",
                (status, letters[7].message_id),
            )

        report = await queue.replay_all()

        failed = 1 if status == "dead" else 0
        assert (report.succeeded, report.failed) == (249, failed)
        assert report.errors == ({"JournalCorruptError": 1} if failed else {})
        assert 7 not in service.handled
        with pytest.raises(DeadLetterStoreError, match="checksum"):
            await queue.find(status=None)
        with pytest.raises(DeadLetterStoreError, match="checksum"):
            await queue.export(io.StringIO())


async def test_a_letter_that_its_store_cannot_change_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Point 7: what the store says of one letter is that letter's failure."""
    async with opened_queue("sqlite", tmp_path) as (queue, service, _):
        letters = bury_orders(queue, 3)
        await queue.store.flush()
        stubborn, change = number_of(letters[1].letter_id), PendingRows._update  # pyright: ignore[reportPrivateUsage]

        def refuse(rows: PendingRows, changed: Sequence[Pending]) -> None:
            if any(row.offset == stubborn for row in changed):
                raise sqlite3.DatabaseError("no")
            change(rows, changed)

        monkeypatch.setattr(PendingRows, "_update", refuse)
        report = await queue.replay_all()

    assert (report.succeeded, report.failed) == (2, 1)
    assert service.handled == [0, 2]
