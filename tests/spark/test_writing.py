"""Rows written back are messages: all or none of them, each once, with ids that stay."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, functions as f

from msgbus import pipeline
from msgbus.journal import Kind, MessageCodec, SqliteJournal
from msgbus.messages.message import Event
from msgbus.testing.conformance.journal.kit import make_record
from tests.spark.kit import (
    append,
    forget_last_batch,
    mixed_records,
    numbers,
    records_in,
    timestamp,
    with_journal,
)

MOMENT = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


class Priced(Event, name="shop.Priced", key="sku"):
    sku: str
    prices: list[float]
    tags: Mapping[str, int]
    at: datetime | None = None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.db"


def save(frame: DataFrame, path: Path, **options: str) -> None:
    frame.write.format("msgbus").option("url", str(path)).options(**options).mode("append").save()


def ten(spark: SparkSession) -> DataFrame:
    payload = f.concat(f.lit('{"number":'), f.col("id").cast("string"), f.lit("}"))
    return spark.range(10).select(
        f.lit("shop.Counted").alias("name"),
        payload.alias("payload"),
        f.lit(MOMENT).alias("time"),
    )


def numbers_in(path: Path) -> list[int]:
    return sorted(record.json()["number"] for record in records_in(path))


@pytest.fixture(autouse=True)
def _sources(spark: SparkSession) -> None:
    pipeline.register(spark)


# -- what is written -----------------------------------------------------------------------


def test_rows_of_one_journal_are_the_same_messages_in_another(
    spark: SparkSession, tmp_path: Path, path: Path
) -> None:
    append(tmp_path / "in.db", mixed_records(300))

    save(pipeline.open(str(tmp_path / "in.db"), spark).messages(), path)

    def plain(file: Path) -> dict[str, object]:
        return {
            one.message_id: one._replace(
                offset=0, headers=dict(one.headers), time=timestamp(one.time).timestamp()
            )
            for one in records_in(file)
        }

    assert plain(path) == plain(tmp_path / "in.db")
    assert not (tmp_path / "out.db.staging").exists()
    assert with_journal(path, SqliteJournal.verify).is_sound


def test_an_events_own_columns_become_its_payload(spark: SparkSession, path: Path) -> None:
    frame = spark.sql(
        "select 'tea' as sku, array(1.5D, 2D) as prices, map('a', 1) as tags, "
        "timestamp'2026-03-01T12:00:00Z' as at, 'job' as session_id, map('tenant', 'x') as headers"
    )

    save(frame, path, name="shop.Priced")

    (record,) = records_in(path)
    found = MessageCodec([Priced]).decode(record)
    assert found == Priced(
        sku="tea", prices=[1.5, 2.0], tags={"a": 1}, at=datetime(2026, 3, 1, 12, tzinfo=UTC)
    )
    assert (record.session_id, dict(record.headers)) == ("job", {"tenant": "x"})
    assert (record.kind, record.topic, record.version) == (Kind.EVENT, "shop.Priced", 1)
    assert record.root_id == record.correlation_id == record.message_id


def test_ids_have_the_time_of_the_row_and_the_layout_of_version_7(
    spark: SparkSession, path: Path
) -> None:
    save(ten(spark), path)

    records = records_in(path)
    ids = [UUID(record.message_id) for record in records]
    assert {one.version for one in ids} == {7}
    assert {one.int >> 80 for one in ids} == {int(MOMENT.timestamp() * 1000)}
    assert len(set(ids)) == 10
    assert MessageCodec().decode(records[0]).created_at == MOMENT.replace(microsecond=123000)


# -- once ----------------------------------------------------------------------------------


def test_the_same_rows_written_again_are_known(spark: SparkSession, path: Path) -> None:
    save(ten(spark), path)
    save(ten(spark).repartition(3), path)

    assert numbers_in(path) == numbers(0, 9)


def test_equal_rows_of_one_write_are_different_messages(spark: SparkSession, path: Path) -> None:
    doubled = ten(spark).unionAll(ten(spark))

    save(doubled, path)
    save(doubled.repartition(4), path)

    assert numbers_in(path) == sorted(2 * numbers(0, 9))


def test_a_job_is_done_once_even_without_times(spark: SparkSession, path: Path) -> None:
    frame = ten(spark).drop("time")

    save(frame, path, job="nightly 2026-03-01")
    save(frame, path, job="nightly 2026-03-01")
    save(frame, path, job="nightly 2026-03-02")

    assert numbers_in(path) == sorted(2 * numbers(0, 9))


def test_a_write_with_one_bad_row_keeps_nothing(spark: SparkSession, path: Path) -> None:
    append(path, [make_record(77)])
    bad = ten(spark).withColumn("payload", f.expr("if(payload like '%7%', '{', payload)"))

    with pytest.raises(PySparkException, match="payload that is not JSON"):
        save(bad, path)

    assert numbers_in(path) == [77]
    assert list(path.parent.glob("*.staging")) == []


@pytest.mark.parametrize(
    ("select", "problem"),
    [
        ("'{}' as payload", "Rows need a wire name"),
        ("'a' as name, 5 as payload", "'payload' is JSON text or a struct, not int"),
        ("'a' as name, '5' as version", "'version' of messages is long, not string"),
        ("'a' as name, 'task' as kind", "has the kind 'task'; write event or command"),
        ("'a..b' as name", "has the topic 'a..b'"),
        ("cast(null as string) as name", "has no name"),
    ],
)
def test_what_cannot_be_a_message_says_why(
    spark: SparkSession, path: Path, select: str, problem: str
) -> None:
    with pytest.raises(PySparkException, match=problem):
        save(spark.sql(f"select {select}"), path)


def test_a_journal_is_never_overwritten(spark: SparkSession, path: Path) -> None:
    save(ten(spark), path)

    with pytest.raises(PySparkException, match="only be appended to"):
        ten(spark).write.format("msgbus").option("url", str(path)).mode("overwrite").save()

    assert len(records_in(path)) == 10


# -- streams -------------------------------------------------------------------------------


def copy_stream(spark: SparkSession, folder: Path, *, into: str = "out.db") -> None:
    pipe = pipeline.open(str(folder / "in.db"), spark)
    frame = pipe.stream(max_rows=40).select("payload", f.lit("shop.Copied").alias("name"))
    query = (
        frame.writeStream.format("msgbus")
        .option("url", str(folder / into))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(60)
    error = query.exception()
    if error is not None:
        raise error


def test_a_stream_writes_each_row_once_though_a_batch_is_repeated(
    spark: SparkSession, tmp_path: Path, path: Path
) -> None:
    append(tmp_path / "in.db", [make_record(number) for number in range(100)])

    copy_stream(spark, tmp_path)
    forget_last_batch(tmp_path / "checkpoint")
    append(tmp_path / "in.db", [make_record(number) for number in range(100, 110)])
    copy_stream(spark, tmp_path)

    assert numbers_in(path) == numbers(0, 109)
    assert not (tmp_path / "out.db.staging").exists()


def test_a_new_query_at_an_old_checkpoint_is_a_new_query(
    spark: SparkSession, tmp_path: Path, path: Path
) -> None:
    append(tmp_path / "in.db", [make_record(number) for number in range(10)])

    copy_stream(spark, tmp_path)
    (tmp_path / "checkpoint").rename(tmp_path / "old")
    copy_stream(spark, tmp_path)

    assert numbers_in(path) == sorted(2 * numbers(0, 9))
