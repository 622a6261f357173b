"""A journal read as a stream: each row once, across restarts, limits and repeated batches."""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from msgbus import pipeline
from msgbus.journal import DeliveryRecord, Outcome, Retention
from msgbus.journal.operations import Note
from msgbus.pipeline import Pipeline
from msgbus.testing.conformance.journal.kit import TIME, make_record
from tests.spark.kit import (
    append,
    forget_last_batch,
    mixed_records,
    numbers,
    offsets_of,
    records_in,
    row_of,
    rows_of,
    with_journal,
)


class Stream:
    """A streaming query that copies a journal into Parquet, whenever it is run."""

    def __init__(self, pipe: Pipeline, folder: Path, **options: Any) -> None:
        self.pipe = pipe
        self.folder = folder
        self.options = options

    def run(self) -> list[int]:
        """Handle what there is now, and give the sizes of the batches."""
        query = (
            self.pipe.stream(**self.options)
            .writeStream.format("parquet")
            .option("path", str(self.folder / "out"))
            .option("checkpointLocation", str(self.folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(60)
        error = query.exception()
        if error is not None:
            raise error
        return [one.numInputRows for one in query.recentProgress if one.numInputRows]

    def out(self) -> DataFrame:
        return self.pipe.spark.read.parquet(str(self.folder / "out"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    append(tmp_path / "shop.db", mixed_records(200))
    return tmp_path / "shop.db"


@pytest.fixture
def pipe(path: Path, spark: SparkSession) -> Pipeline:
    return pipeline.open(f"sqlite:///{path}", spark)


def test_a_stream_gives_what_the_journal_has_and_goes_on_where_it_was(
    pipe: Pipeline, path: Path, tmp_path: Path
) -> None:
    stream = Stream(pipe, tmp_path, max_rows=90)

    assert stream.run() == [90, 90, 20]
    append(path, [make_record(number) for number in range(5)])
    assert stream.run() == [5]
    assert stream.run() == []

    assert rows_of(stream.out()) == [row_of(record) for record in records_in(path)]


def test_a_new_stream_may_begin_later_and_read_less(
    pipe: Pipeline, path: Path, tmp_path: Path
) -> None:
    late = Stream(pipe, tmp_path / "a", start=191, columns=["offset"], where={"version": [1, 2]})
    latest = Stream(pipe, tmp_path / "b", start="latest")

    late.run()
    assert latest.run() == []
    append(path, [make_record(1)])
    assert latest.run() == [1]

    expected = [
        one.offset for one in records_in(path) if one.version < 3 and 191 <= one.offset <= 200
    ]
    assert (late.out().columns, offsets_of(late.out())) == (["offset"], expected)
    assert offsets_of(latest.out()) == [201]


def test_deliveries_stream_as_well(pipe: Pipeline, path: Path, tmp_path: Path) -> None:
    stream = Stream(pipe, tmp_path, table="deliveries", max_rows=4)

    def deliver(*attempts: int) -> None:
        made = [
            DeliveryRecord(record.message_id, "mail", attempt, Outcome.OK, 0.0, 0.0, TIME)
            for record in records_in(path)[-2:]
            for attempt in attempts
        ]
        with_journal(path, lambda journal: journal.commit([Note(one) for one in made]))

    assert stream.run() == []
    deliver(1, 2, 3)
    assert stream.run() == [4, 2]
    # Retention takes deliveries with their messages: ids go on all the same.
    with_journal(path, lambda journal: journal.trim(Retention(max_count=0)))
    assert stream.run() == []
    append(path, [make_record(number) for number in range(2)])
    deliver(4)
    assert stream.run() == [2]

    found = rows_of(stream.out(), by="id")
    assert [(row["id"], row["attempt"]) for row in found] == list(
        zip(numbers(1, 8), [1, 2, 3, 1, 2, 3, 4, 4], strict=True)
    )


def test_a_batch_that_is_repeated_has_the_same_rows(
    pipe: Pipeline, path: Path, tmp_path: Path
) -> None:
    seen: dict[int, list[int]] = {}
    folder = tmp_path / "checkpoint"

    def keep(frame: DataFrame, batch: int) -> None:
        rows = offsets_of(frame)
        assert seen.setdefault(batch, rows) == rows

    def run() -> None:
        stream = pipe.stream(max_rows=60).writeStream.foreachBatch(keep)
        query = stream.option("checkpointLocation", str(folder)).trigger(availableNow=True).start()
        query.awaitTermination(60)
        assert query.exception() is None

    run()
    last = forget_last_batch(folder)
    append(path, [make_record(number) for number in range(7)])
    run()

    assert sorted(chain.from_iterable(seen.values())) == numbers(1, 207)
    assert seen[last] == numbers(181, 200)


def test_what_was_trimmed_before_it_was_read_stops_a_stream_unless_told_otherwise(
    pipe: Pipeline, path: Path, tmp_path: Path
) -> None:
    stream = Stream(pipe, tmp_path, max_rows=50, columns=["offset"])
    stream.run()
    append(path, [make_record(number) for number in range(100)])
    with_journal(path, lambda journal: journal.trim(Retention(max_count=40)))

    with pytest.raises(
        StreamingQueryException, match=r"offset 201 was requested, and the oldest left is 261"
    ):
        stream.run()

    lossy = (
        pipe.spark.readStream.format("msgbus")
        .option("url", str(path))
        .option("failOnDataLoss", "false")
        .schema("offset long")
        .load()
        .writeStream.format("parquet")
        .option("path", str(tmp_path / "out"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    lossy.awaitTermination(60)
    assert lossy.exception() is None
    assert offsets_of(stream.out()) == numbers(1, 200) + numbers(261, 300)


def test_a_checkpoint_of_another_journal_is_refused(
    pipe: Pipeline, path: Path, spark: SparkSession, tmp_path: Path
) -> None:
    copy = shutil.copy(path, tmp_path / "copy.db")
    append(path, [make_record(1)])
    Stream(pipe, tmp_path).run()
    append(tmp_path / "other.db", [make_record(1)])

    refusals = {copy: r"read up to offset 201, but .* at 200:", tmp_path / "other.db": "replaced"}
    for file, says in refusals.items():
        with pytest.raises(StreamingQueryException, match=says):
            Stream(pipeline.open(str(file), spark), tmp_path).run()
