"""Payloads behind a codec are read and written as the journal does it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import pytest
from pyspark.sql import SparkSession

from msgbus import Event, pipeline
from msgbus.errors import JournalOpenError, PipelineOptionError
from msgbus.journal import DeliveryRecord, Outcome, Record, SqliteJournal
from msgbus.journal.operations import Note
from msgbus.pipeline import Pipeline
from msgbus.pipeline.lake import read_lake
from msgbus.pipeline.source.journal_file import REFUSED
from msgbus.testing.conformance.journal.kit import TIME, fill, read_all
from tests.spark.kit import numbers, rows_of
from tests.spark.programs.codecs import flipped
from tests.unit.journal.sqlite.sealing import rewrite

CODEC: Final = "tests.spark.programs.codecs:flipped"


class Placed(Event, name="codecs.Placed"):
    number: int


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Eleven messages behind the codec; the last one has what is none of its own."""
    path, headers = tmp_path / "shop.db", {"token": "t"}
    delivery = DeliveryRecord("m", "ship", 1, Outcome.FAILED, 0.5, 0.1, TIME, "E: no stock")

    async def write() -> None:
        async with SqliteJournal(path, reserve=0, codec=flipped) as journal:
            await fill(journal, 11, name="codecs.Placed", headers=headers)
            await journal.commit([Note(delivery)])

    asyncio.run(write())
    payload = "payload = (SELECT payload FROM msgbus_messages WHERE offset = 1)"
    rewrite(path, "messages", payload, "offset = 11")
    return path


@pytest.fixture
def pipe(path: Path, spark: SparkSession) -> Pipeline:
    return pipeline.open(str(path), spark, codec=CODEC)


@pytest.mark.parametrize("engine", ["adbc", "sqlite3"])
def test_what_is_stored_is_decoded_and_what_was_moved_is_damaged(
    pipe: Pipeline, spark: SparkSession, engine: str
) -> None:
    reader = spark.read.format("msgbus").option("url", pipe.path).option("codec", CODEC)
    reader = reader.option("engine", engine)
    rows = rows_of(reader.load())
    deliveries = rows_of(reader.option("table", "deliveries").load())

    assert [row["payload"] for row in rows] == [f'{{"number":{one}}}' for one in range(10)] + [None]
    assert [row["headers"] for row in rows] == [{"token": "t"}] * 10 + [None]
    assert [row["_corrupt"] for row in rows] == [None] * 10 + [REFUSED]
    assert [row["error"] for row in deliveries] == ["E: no stock"]


def test_without_it_everything_is_corrupt(path: Path, spark: SparkSession) -> None:
    counted = pipeline.open(str(path), spark).corrupt()

    assert [(row["messages"], row["corrupt"]) for row in counted.collect()] == [(11, 11)]


def test_events_and_the_lake_have_the_plain_fields(
    pipe: Pipeline, spark: SparkSession, tmp_path: Path
) -> None:
    report = pipe.export(tmp_path / "lake")

    assert (report.messages, report.damaged) == (10, (11,))
    events = rows_of(pipe.events(Placed).where("_corrupt is null"))
    assert [row["number"] for row in events] == numbers(0, 9)
    (row, *_) = rows_of(read_lake(spark, tmp_path / "lake"))
    assert (row["payload"], row["headers"]) == ('{"number":0}', {"token": "t"})


def test_nothing_is_sealed_that_could_not_be_decoded(
    path: Path, spark: SparkSession, tmp_path: Path
) -> None:
    with pytest.raises(JournalOpenError, match="was made with a codec"):
        pipeline.open(str(path), spark).export(tmp_path / "lake")


def test_what_is_written_back_goes_through_it(pipe: Pipeline, path: Path) -> None:
    frame = pipe.messages(until=3).select("name", "payload", "headers", "time")
    frame.write.format("msgbus").option("url", pipe.path).option("codec", CODEC).mode(
        "append"
    ).save()

    async def read() -> list[Record]:
        async with SqliteJournal(path, reserve=0, codec=flipped) as journal:
            return await read_all(journal)

    written = asyncio.run(read())[10:]
    assert [(record.json()["number"], record.headers["token"]) for record in written] == [
        (0, "t"),
        (1, "t"),
    ]


@pytest.mark.parametrize(
    ("codec", "problem"),
    [
        ("flipped", "names no object"),
        ("no_such_module:flipped", "no module 'no_such_module'"),
        ("tests.spark.programs.codecs:other", "has no 'other'"),
        ("tests.spark.programs.codecs:Flipped", "is no codec"),
    ],
)
def test_a_codec_that_is_not_there_is_said_before_spark_starts(
    path: Path, codec: str, problem: str
) -> None:
    with pytest.raises(PipelineOptionError, match=problem) as caught:
        pipeline.open(str(path), codec=codec)
    assert caught.value.option == "codec"
