"""Dead letters as files, out and in."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from msgbus.errors import DeadLetterError
from msgbus.resilience import DeadLetterEntry, DeadLetterQueue, LetterStatus
from tests.unit.resilience.letter_fakes import (
    STORES,
    CardCharged,
    ChargeCard,
    bury,
    bury_orders,
    opened_queue,
)


@STORES
async def test_letters_go_to_a_file_and_back(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        letters = bury_orders(queue, 3)
        await queue.discard(letters[1], "no")
        path = tmp_path / "letters.jsonl"

        assert await queue.export(path) == 3
        other = DeadLetterQueue()
        report = await other.import_(path)
        again = await other.import_(str(path))

        assert (report.imported, report.known) == (3, 0)
        assert (again.imported, again.known) == (0, 3)
        assert await other.find(status=None) == await queue.find(status=None)
        assert len(path.read_text().splitlines()) == 3
        assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]  # noqa: PTH208


async def test_an_export_can_be_filtered_and_go_to_an_open_file() -> None:
    queue = DeadLetterQueue()
    bury(queue, ChargeCard())
    bury(queue, CardCharged())
    file = io.StringIO()

    assert await queue.export(file, CardCharged) == 1

    assert json.loads(file.getvalue())["message_type"] == "letters.CardCharged"


@STORES
async def test_a_bad_line_is_named_and_nothing_is_imported(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        source = DeadLetterQueue()
        bury_orders(source, 2)
        path = tmp_path / "letters.jsonl"
        await source.export(path)
        good = path.read_text()

        for bad in ("{", "[]", '{"letter_id": "x"}'):
            path.write_text(f"{good}\n{bad}\n")
            with pytest.raises(DeadLetterError, match=r"Line 4 of .*letters\.jsonl .*Nothing was"):
                await queue.import_(path)

        assert await queue.count(status=None) == 0


async def test_files_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    queue = DeadLetterQueue()

    with pytest.raises(DeadLetterError, match=r"missing.* cannot be written: No such file"):
        await queue.export(tmp_path / "missing" / "x")
    with pytest.raises(DeadLetterError, match=r"missing cannot be read: No such file"):
        await queue.import_(tmp_path / "missing")


async def test_a_letter_that_was_being_replayed_is_imported_as_dead() -> None:
    queue, other = DeadLetterQueue(), DeadLetterQueue()
    letter = bury(queue, CardCharged())
    file = io.StringIO()

    async def export_meanwhile(letter: DeadLetterEntry) -> object:
        await queue.export(file)
        return None

    queue.connect(export_meanwhile)
    await queue.replay(letter)
    await other.import_(io.StringIO(file.getvalue()))

    assert (await other.get(letter)).status is LetterStatus.DEAD
