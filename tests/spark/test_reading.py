"""A journal read as a batch is what the journal itself gives: every row, once, in full."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession, functions as f

from msgbus import pipeline
from msgbus.journal import Record
from msgbus.pipeline import Pipeline
from msgbus.pipeline.source.tables import MESSAGES
from msgbus.testing.conformance.journal.kit import TIME, make_record
from tests.spark.kit import (
    append,
    mixed_records,
    numbers,
    offsets_of,
    records_in,
    row_of,
    rows_of,
)

COUNT = 3000


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("journals") / "it's a shop ü.db"
    append(path, mixed_records(COUNT))
    return path


@pytest.fixture(scope="module")
def records(journal: Path) -> list[Record]:
    return records_in(journal)


@pytest.fixture
def pipe(journal: Path, spark: SparkSession) -> Pipeline:
    return pipeline.open(f"sqlite:///{journal}", spark)


def read(spark: SparkSession, journal: Path, **options: object) -> DataFrame:
    reader = spark.read.format("msgbus").option("url", f"sqlite:///{journal}")
    return reader.options(**{key: str(value) for key, value in options.items()}).load()


# -- everything ----------------------------------------------------------------------------


def test_messages_are_what_the_journal_gives(pipe: Pipeline, records: list[Record]) -> None:
    assert rows_of(pipe.messages()) == [row_of(record) for record in records]
    assert pipe.messages().schema == MESSAGES.schema


@pytest.mark.parametrize("engine", ["adbc", "sqlite3"])
@pytest.mark.parametrize("batch_rows", [1, 1000])
def test_both_engines_give_the_same_whatever_the_size_of_batches(
    spark: SparkSession,
    pipe: Pipeline,
    journal: Path,
    records: list[Record],
    engine: str,
    batch_rows: int,
) -> None:
    # The first half has no cause, key, session and headers at all, so that in small batches
    # these columns begin with NULLs only.
    first = 1 if batch_rows > 1 else COUNT // 2 - 50
    frame = read(spark, journal, engine=engine, batchRows=batch_rows, start=first, end=first + 2900)

    expected = [row_of(record) for record in records[first - 1 : first + 2899]]
    assert rows_of(frame) == expected


@pytest.mark.parametrize("partitions", [1, 7])
def test_ranges_side_by_side_lose_and_double_no_row(
    spark: SparkSession, pipe: Pipeline, journal: Path, partitions: int
) -> None:
    frame = read(spark, journal, partitions=partitions).select(
        "offset", f.spark_partition_id().alias("task")
    )

    rows = frame.collect()

    assert sorted(row["offset"] for row in rows) == numbers(1, COUNT)
    assert len({row["task"] for row in rows}) == partitions


def test_an_empty_journal_is_an_empty_table(spark: SparkSession, tmp_path: Path) -> None:
    append(tmp_path / "empty.db", [])
    pipe = pipeline.open(str(tmp_path / "empty.db"), spark)

    assert pipe.messages().collect() == []
    assert pipe.deliveries().collect() == []


def test_a_frame_shows_the_journal_as_it_was_at_its_first_use(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = tmp_path / "shop.db"
    append(path, [make_record(1)])
    pipe = pipeline.open(str(path), spark)
    frame = pipe.messages()

    assert frame.count() == 1
    append(path, [make_record(2)])
    assert (frame.count(), pipe.messages().count()) == (1, 2)


# -- less than everything ------------------------------------------------------------------


def test_bounds_are_offsets_or_times(pipe: Pipeline, records: list[Record]) -> None:
    moment = datetime.fromtimestamp(TIME, UTC) + timedelta(seconds=300)
    later = moment + timedelta(seconds=100)
    timed = [one.offset for one in records if TIME + 300 <= one.time < TIME + 400]

    assert offsets_of(pipe.messages(since=11, until=21)) == numbers(11, 20)
    assert offsets_of(pipe.messages(since=-5, until=3)) == [1, 2]
    assert offsets_of(pipe.messages(since=COUNT - 1, until=10**12)) == [COUNT - 1, COUNT]
    assert offsets_of(pipe.messages(since=moment, until=later)) == timed
    assert offsets_of(pipe.messages(since=moment.replace(tzinfo=None), until=later)) == timed
    assert len(timed) > 100
    assert pipe.messages(since=COUNT + 1).collect() == []


def test_only_the_columns_that_are_named_are_read(pipe: Pipeline, records: list[Record]) -> None:
    frame = pipe.messages(columns=["time", "headers", "offset"])

    assert frame.columns == ["time", "headers", "offset"]
    assert rows_of(frame) == [
        {name: row_of(record)[name] for name in frame.columns} for record in records
    ]


def test_any_column_can_be_read_alone(pipe: Pipeline, records: list[Record]) -> None:
    for column in MESSAGES.columns:
        frame = pipe.messages(columns=[column], since=COUNT - 30)

        found = rows_of(frame, by="")
        assert found == [{column: row_of(record)[column]} for record in records[COUNT - 31 :]]


def test_rows_can_be_counted_without_any_column(pipe: Pipeline) -> None:
    assert pipe.messages().count() == COUNT
    assert pipe.messages(columns=[]).count() == COUNT


FILTERS: dict[str, Callable[[Record], bool]] = {
    "offset > 2990": lambda one: one.offset > 2990,
    "offset >= 10 and offset < 20 and offset <> 12": lambda one: (
        10 <= one.offset < 20 and one.offset != 12
    ),
    "offset = 77": lambda one: one.offset == 77,
    "offset in (5, 2999, 99999)": lambda one: one.offset in (5, 2999),
    "offset <= 0": lambda one: False,
    "name = 'shop.Event3' and version = 2": lambda one: (
        one.name == "shop.Event3" and one.version == 2
    ),
    "name in ('shop.Event1', 'it''s')": lambda one: one.name == "shop.Event1",
    "name > 'shop.Event3'": lambda one: one.name > "shop.Event3",
    "name like 'shop.E%'": lambda one: one.name.startswith("shop.E"),
    "name like 'SHOP.E%'": lambda one: False,
    "topic like '%.3'": lambda one: one.topic.endswith(".3"),
    "key is null and kind = 'command'": lambda one: one.key is None and one.kind == "command",
    "key is not null": lambda one: one.key is not None,
    "key <=> null and offset < 20": lambda one: one.key is None and one.offset < 20,
    "key <=> 'k3'": lambda one: one.key == "k3",
    "not (key = 'k3')": lambda one: one.key is not None and one.key != "k3",
    "session_id = 's0' or depth = 4": lambda one: one.session_id == "s0" or one.depth == 4,
    "time >= timestamp'2023-11-14T22:13:20.5Z'": lambda one: one.time >= TIME + 0.5,
    "time < timestamp'2023-11-14T22:13:21Z'": lambda one: one.time < TIME + 1,
    "correlation_id = root_id": lambda one: one.correlation_id == one.root_id,
    "headers['tenant'] = 't1'": lambda one: one.headers.get("tenant") == "t1",
    "payload like '%99%'": lambda one: b"99" in one.payload,
    "_corrupt is null and payload is not null and offset < 4": lambda one: one.offset < 4,
}


def test_filters_of_spark_give_what_they_say_however_often_a_frame_is_used(
    pipe: Pipeline, records: list[Record]
) -> None:
    frame = pipe.messages()
    found = {one: offsets_of(frame.where(one)) for one in FILTERS}

    assert found == {
        one: [record.offset for record in records if fits(record)] for one, fits in FILTERS.items()
    }
    both = frame.where("offset < 5").unionAll(frame.where("offset > 2998"))
    assert offsets_of(both) == [1, 2, 3, 4, 2999, 3000]


def test_filters_of_the_file_give_what_they_say(pipe: Pipeline, records: list[Record]) -> None:
    wheres: list[tuple[dict[str, Any], Callable[[Record], bool]]] = [
        ({"name": "shop.Event1"}, lambda one: one.name == "shop.Event1"),
        ({"name": ["shop.Event1", "it's"]}, lambda one: one.name == "shop.Event1"),
        ({"version": {2, 3}, "kind": "event"}, lambda one: one.version > 1 and one.kind == "event"),
        ({"key": None}, lambda one: one.key is None),
        ({"key": (None, "k3")}, lambda one: one.key in (None, "k3")),
        ({"offset": [5, 99999]}, lambda one: one.offset == 5),
        ({"session_id": []}, lambda one: False),
    ]
    for where, fits in wheres:
        wanted = [record.offset for record in records if fits(record)]
        assert offsets_of(pipe.messages(where=where)) == wanted, where


def test_filters_of_the_file_come_with_bounds_and_columns(pipe: Pipeline) -> None:
    frame = pipe.messages(
        since=2000, until=2100, where={"name": "shop.Event0"}, columns=["offset", "payload"]
    )

    assert offsets_of(frame.where("payload like '%5,%'")) == [
        offset for offset in range(2001, 2100) if (offset - 1) % 10 == 5
    ]
