"""Staged rows become messages in one transaction, once: without a JVM."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from msgbus.errors import PipelineError
from msgbus.journal import SqliteJournal
from msgbus.pipeline.arrow import pa
from msgbus.pipeline.source.options import WriteOptions, write_options
from msgbus.pipeline.source.writer import WRITES, StagedRows, WriteOnce, load, stage
from tests.spark.kit import records_in, with_journal


@pytest.fixture
def options(tmp_path: Path) -> WriteOptions:
    return write_options({"url": str(tmp_path / "shop.db"), "name": "shop.Counted"})


def staged(options: WriteOptions, *numbers: int) -> list[StagedRows]:
    """Two batches for each file, so that a write is more than one statement."""
    batches = [pa.RecordBatch.from_pydict({"number": [number]}) for number in numbers]
    return [stage(f"{options.staging}/write", iter(batches))]


def numbers_in(options: WriteOptions) -> list[int]:
    return [record.json()["number"] for record in records_in(Path(options.path))]


def test_a_batch_of_a_stream_is_written_once_and_never_after_a_later_one(
    options: WriteOptions,
) -> None:
    written = [
        load(options, staged(options, number), WriteOnce("stream:x", batch))
        for number, batch in enumerate([0, 1, 1, 4, 3, 0, 5])
    ]

    assert written == [True, True, False, True, False, False, True]
    assert numbers_in(options) == [0, 1, 3, 6]


def test_a_stream_is_one_row_however_many_batches_it_has(options: WriteOptions) -> None:
    for batch in range(5):
        load(options, staged(options, batch), WriteOnce("stream:x", batch))
    load(options, staged(options, 9), WriteOnce("job:y"))

    async def read(journal: SqliteJournal) -> list[bytes | None]:
        found = [await journal.instance(WRITES, key) for key in ("stream:x", "job:y")]
        return [None if one is None else one.state for one in found]

    assert with_journal(Path(options.path), read) == [b"4", b"0"]
    with closing(sqlite3.connect(options.path)) as connection:
        assert connection.execute("SELECT count(*) FROM msgbus_instances").fetchone() == (2,)


def test_a_write_that_fails_may_come_again(options: WriteOptions) -> None:
    bad = pa.RecordBatch.from_pydict({"topic": ["a..b"], "number": [2]})
    good = pa.RecordBatch.from_pydict({"topic": ["a.b"], "number": [1]})
    messages = [stage(f"{options.staging}/write", iter([good, bad]))]

    with pytest.raises(PipelineError, match="Nothing of this write was stored"):
        load(options, messages, WriteOnce("job:x"))

    assert numbers_in(options) == []
    assert load(options, staged(options, 7, 8), WriteOnce("job:x"))
    assert numbers_in(options) == [7, 8]


def test_control_records_cannot_be_written(options: WriteOptions) -> None:
    rows = pa.RecordBatch.from_pydict({"kind": ["control"]})

    with pytest.raises(PipelineError, match="has the kind 'control'; write event or command"):
        load(options, [stage(f"{options.staging}/write", iter([rows]))], None)
