"""Payloads behind a codec are read and written as the journal does it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import pytest
from pyspark.sql import SparkSession

from msgbus import Event, pipeline
from msgbus.errors import PipelineOptionError
from msgbus.journal import Record, SqliteJournal
from msgbus.pipeline import Pipeline
from msgbus.pipeline.lake import read_lake
from msgbus.testing.conformance.journal.kit import fill, make_record, read_all
from tests.spark.kit import append, numbers, rows_of
from tests.spark.programs.codecs import flipped

CODEC: Final = "tests.spark.programs.codecs:flipped"


class Placed(Event, name="codecs.Placed"):
    number: int


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Ten messages behind the codec, and a last one that was written without."""

    async def write() -> None:
        async with SqliteJournal(tmp_path / "shop.db", reserve=0, codec=flipped) as journal:
            await fill(journal, 10, name="codecs.Placed")

    asyncio.run(write())
    append(tmp_path / "shop.db", [make_record(10, name="codecs.Placed")])
    return tmp_path / "shop.db"


@pytest.fixture
def pipe(path: Path, spark: SparkSession) -> Pipeline:
    return pipeline.open(str(path), spark, codec=CODEC)


@pytest.mark.parametrize("engine", ["adbc", "sqlite3"])
def test_payloads_are_decoded_and_what_cannot_be_is_corrupt(
    pipe: Pipeline, spark: SparkSession, engine: str
) -> None:
    reader = spark.read.format("msgbus").option("url", pipe.path).option("codec", CODEC)
    rows = rows_of(reader.option("engine", engine).load())

    assert [row["payload"] for row in rows] == [f'{{"number":{one}}}' for one in range(10)] + [None]
    assert [row["_corrupt"] for row in rows] == [None] * 10 + ['{"number":10}']


def test_without_it_everything_is_corrupt(path: Path, spark: SparkSession) -> None:
    counted = pipeline.open(str(path), spark).corrupt()

    assert [(row["messages"], row["corrupt"]) for row in counted.collect()] == [(11, 10)]


def test_events_and_the_lake_have_the_plain_fields(
    pipe: Pipeline, spark: SparkSession, tmp_path: Path
) -> None:
    pipe.export(tmp_path / "lake")

    events = rows_of(pipe.events(Placed).where("_corrupt is null"))
    assert [row["number"] for row in events] == numbers(0, 9)
    assert rows_of(read_lake(spark, tmp_path / "lake"))[0]["payload"] == '{"number":0}'


def test_what_is_written_back_goes_through_it(pipe: Pipeline, path: Path) -> None:
    frame = pipe.messages(until=3).select("name", "payload", "time")
    frame.write.format("msgbus").option("url", pipe.path).option("codec", CODEC).mode(
        "append"
    ).save()

    async def read() -> list[Record]:
        async with SqliteJournal(path, reserve=0, codec=flipped) as journal:
            return await read_all(journal)

    assert [record.json()["number"] for record in asyncio.run(read())[10:]] == [0, 1]


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
