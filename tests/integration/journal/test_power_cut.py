"""A power cut at any moment loses nothing that the journal has acknowledged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from msgbus.journal import SqliteJournal
from msgbus.journal.operations import Pass
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    append,
    join,
    make_record,
    read_all,
    take,
)
from tests.counts import POWER_CUTS
from tests.evidence import Evidence
from tests.integration.journal.power import Recorder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.stress("journal"),
    pytest.mark.timeout(240),
    pytest.mark.asyncio_only("the disk does not know the loop"),
]

PUBLISHERS = 20
EACH = 60


@dataclass
class Losses:
    """What the images of one run have shown."""

    images: int = 0
    acked: int = 0
    lost: int = 0
    with_loss: int = 0
    damaged: int = 0


async def work(file: Path, recorder: Recorder) -> None:
    """Publish, and move a cursor behind it, noting each acknowledgement on the disk's notes."""
    journal = SqliteJournal(file, reserve=0, _connect=recorder.connect)
    member = await join(journal)
    cursor = await take(journal, member, "reader", EVENTS)

    async def publish(publisher: int) -> None:
        for number in range(EACH):
            message_id = f"{publisher}.{number}"
            record = make_record(number, message_id=message_id, payload=bytes(2_000))
            (offset,) = await append(journal, record)
            recorder.ack(message_id)
            if publisher == 0:
                await journal.commit([Pass(cursor, offset, offset)], member)
                recorder.ack(offset)

    async with anyio.create_task_group() as publishers:
        for publisher in range(PUBLISHERS):
            publishers.start_soon(publish, publisher)
    # No clean end: closing it would sync.
    await journal.close()


def write_all(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


async def look(folder: Path, files: dict[str, bytes], acked: set[object]) -> tuple[int, bool]:
    """How many acknowledged things an image has lost, and whether it is sound."""
    write_all(folder, files)
    async with SqliteJournal(folder / "journal.db", reserve=0) as journal:
        found: set[object] = {record.message_id for record in await read_all(journal)}
        cursors = await journal.cursors("reader")
        reached = max((cursor.acked for cursor in cursors), default=0)
        is_sound = (await journal.verify()).is_sound
    lost = sum(one > reached if isinstance(one, int) else one not in found for one in acked)
    return lost, is_sound


async def cut_often(tmp_path: Path, synchronous: str, *, tear: bool) -> Losses:
    recorder = Recorder(f"{tmp_path.name}-{synchronous}-{tear}", synchronous=synchronous)
    await work(tmp_path / "journal.db", recorder)
    losses = Losses()
    acked: set[object] = set()
    seen = 0
    for number, (files, moment) in enumerate(recorder.images(POWER_CUTS, seed=5, tear=tear)):
        acked |= {note.ack for note in recorder.notes[seen:moment] if note.what == "ack"}
        seen = moment
        if not acked:
            continue
        lost, is_sound = await look(tmp_path / str(number), files, acked)
        losses.images += 1
        losses.acked += len(acked)
        losses.lost += lost
        losses.with_loss += lost > 0
        losses.damaged += not is_sound
    return losses


@pytest.mark.parametrize("tear", [False, True], ids=["dropped", "torn"])
async def test_a_power_cut_loses_nothing_acknowledged(
    tmp_path: Path, tear: bool, evidence: Evidence
) -> None:
    losses = await cut_often(tmp_path, "FULL", tear=tear)

    assert losses.images >= POWER_CUTS * 0.85
    assert (losses.lost, losses.damaged) == (0, 0)
    how = "torn" if tear else "dropped"
    evidence(
        f"power cut, unsynced writes {how}",
        images=losses.images,
        acknowledged=losses.acked,
        lost=losses.lost,
    )


async def test_the_check_finds_the_loss_if_commits_are_not_synced(
    tmp_path: Path, evidence: Evidence
) -> None:
    losses = await cut_often(tmp_path, "NORMAL", tear=False)

    assert losses.with_loss > POWER_CUTS / 10
    evidence(
        "control: power cut with commits that are not synced",
        images=losses.images,
        acknowledged=losses.acked,
        lost=losses.lost,
    )
