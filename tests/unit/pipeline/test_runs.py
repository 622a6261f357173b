"""What is read from Spark's checkpoints, and what is written to the journal about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from msgbus.journal import SqliteJournal
from msgbus.pipeline.runs import committed, move_cursor, read_up_to
from msgbus.pipeline.tracebacks import what_happened
from msgbus.testing.conformance.journal.kit import cursor_of, fill


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    (folder / "offsets").mkdir(parents=True)
    (folder / "commits").mkdir()
    for batch, offset in enumerate([20, 40, 55]):
        text = f'v1\n{{"batchWatermarkMs":0}}\n{{"offset": {offset}}}'
        (folder / "offsets" / str(batch)).write_text(text)
    for batch in range(2):
        (folder / "commits" / str(batch)).write_text("v1\n{}")
        (folder / "commits" / f".{batch}.crc").write_bytes(b"crc")
    return folder


def test_what_is_committed_is_the_end_of_the_last_complete_batch(checkpoint: Path) -> None:
    assert committed(str(checkpoint)) == 40
    assert committed(checkpoint.as_uri()) == 40
    assert read_up_to(str(checkpoint), 2) == 55


def test_nothing_is_known_of_a_checkpoint_that_is_not_to_be_seen(checkpoint: Path) -> None:
    (checkpoint / "offsets" / "2").write_text("v1\nhalf a li")

    assert committed("hdfs://host/state") is None
    assert read_up_to(str(checkpoint), 2) is None
    assert read_up_to(str(checkpoint), -1) is None


async def test_a_cursor_can_be_moved_where_an_event_loop_runs(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    async with SqliteJournal(path, reserve=0) as journal:
        await fill(journal, 5)

        move_cursor(str(path), "pipeline.totals", 2)
        move_cursor(str(path), "pipeline.totals", 4)
        move_cursor(str(path), "pipeline.totals", 3)
        cursor = await cursor_of(journal, "pipeline.totals")

    assert (cursor.acked, cursor.fetched, cursor.owner) == (4, 4, None)


OURS = '  File "/x/site-packages/msgbus/pipeline/replay.py", line 9, in run\n    x()\n'
THEIRS = '  File "/srv/shop.py", line 15, in apply\n    return {}["sku"]\n           ~~^^^^\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[X] failed\n  File y\nKeyError: 'sku'\n\tat org.apache", "KeyError: 'sku'."),
        ("It broke.\nmore", "It broke."),
        (f"Traceback\n{OURS}ValueError: no.\n SQLSTATE: 38000", "ValueError: no."),
        (f"Traceback\n{OURS}{THEIRS}KeyError", "KeyError (shop.py, line 15, in apply)."),
        (
            f"Traceback\n{OURS}{THEIRS}shop.TillError: x\nAt offset 7: shop.Placed 01a.\n\tat org",
            "shop.TillError: x (shop.py, line 15, in apply). At offset 7: shop.Placed 01a.",
        ),
    ],
)
def test_what_happened_is_found(text: str, said: str) -> None:
    assert what_happened(text) == said
