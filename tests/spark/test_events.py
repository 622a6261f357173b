"""Events as typed rows: old versions brought up, subclasses included, nothing that fails a job."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pyspark.sql import SparkSession

from msgbus import ConfigurationError, Event, pipeline
from msgbus.journal import DeliveryRecord, MessageCodec, Outcome, Record, upcasts
from msgbus.journal.operations import Note
from msgbus.pipeline import Pipeline
from msgbus.pipeline.arrow_decoding import classes_of
from msgbus.pipeline.source.tables import DELIVERIES
from tests.spark.kit import append, rows_of, timestamp, with_journal


class Line(BaseModel):
    sku: str
    price: Decimal


class OrderPlaced(Event, name="shop.OrderPlaced", version=3, key="order_id"):
    order_id: int
    lines: tuple[Line, ...] = ()
    placed_at: datetime
    name: str | None = None


class RushOrderPlaced(OrderPlaced, name="shop.RushOrderPlaced"):
    courier: str


class Cancelled(Event, name="shop.Cancelled"):
    order_id: int


@upcasts(OrderPlaced, from_version=1)
def _named(data: dict[str, Any]) -> dict[str, Any]:
    return {"order_id": data["id"]}


@upcasts(OrderPlaced, from_version=2)
def _dated(data: dict[str, Any]) -> dict[str, Any]:
    if data["order_id"] == 13:
        message = "no luck"
        raise RuntimeError(message)
    return {**data, "placed_at": "2020-01-01T00:00:00Z"}


MOMENT = datetime(2026, 3, 1, 12, 0, 0, 5, tzinfo=UTC)
LINES = (Line(sku="tea", price=Decimal("1.50")),)


def records() -> list[Record]:
    codec = MessageCodec()
    placed = codec.encode(
        OrderPlaced(order_id=1, lines=LINES, placed_at=MOMENT, name="Ann"), time=1.5
    )
    rush = codec.encode(RushOrderPlaced(order_id=2, placed_at=MOMENT, courier="bike"), time=2.5)
    other = codec.encode(Cancelled(order_id=3), time=3.5)

    def altered(message_id: str, version: int, payload: bytes) -> Record:
        return placed._replace(message_id=message_id, version=version, payload=payload)

    return [
        placed,
        rush,
        other,
        altered("first", 1, b'{"id":4}'),
        altered("second", 2, b'{"order_id":5}'),
        altered("unlucky", 1, b'{"id":13}'),
        altered("wrong", 3, b'{"order_id":"x","placed_at":0}'),
        altered("huge", 3, b'{"order_id":99999999999999999999,"placed_at":0}'),
        altered("future", 4, b'{"order_id":1}'),
        altered("no json", 3, b'{"order_id":\xff'),
    ]


@pytest.fixture
def pipe(spark: SparkSession, tmp_path: Path) -> Pipeline:
    append(tmp_path / "shop.db", records())
    return pipeline.open(f"sqlite:///{tmp_path / 'shop.db'}", spark)


def test_events_have_their_own_columns_and_the_rest_is_kept_beside(pipe: Pipeline) -> None:
    frame = pipe.events(OrderPlaced)
    rows = {row["offset"]: row for row in rows_of(frame)}

    assert frame.columns == [
        "offset", "message_id", "_name", "version", "time", "key", "session_id",
        "correlation_id", "causation_id", "order_id", "lines", "placed_at", "name",
        "_corrupt", "_error",
    ]  # fmt: skip
    assert list(rows) == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert rows[1]["lines"] == [{"sku": "tea", "price": Decimal("1.5")}]
    assert (rows[1]["placed_at"], rows[1]["time"]) == (MOMENT, timestamp(1.5))
    assert (rows[1]["name"], rows[1]["_name"]) == ("Ann", "shop.OrderPlaced")
    assert (rows[2]["order_id"], rows[2]["_name"]) == (2, "shop.RushOrderPlaced")
    assert [rows[one]["order_id"] for one in (4, 5)] == [4, 5]
    assert rows[4]["placed_at"] == datetime(2020, 1, 1, tzinfo=UTC)
    assert all(rows[one]["_corrupt"] is None for one in (1, 2, 4, 5))

    bad = {one: rows[one] for one in (6, 7, 8, 9, 10)}
    assert {row["order_id"] for row in bad.values()} == {None}
    assert bad[7]["_corrupt"] == '{"order_id":"x","placed_at":0}'
    assert bad[10]["_corrupt"] == '{"order_id":\\xff'
    problems = ["no luck", "does not fit", "beyond 64 bits", "Deploy the newer", "not JSON"]
    for row, problem in zip(bad.values(), problems, strict=True):
        assert problem in row["_error"]


def test_what_is_corrupt_is_counted(pipe: Pipeline) -> None:
    by_type = {
        (row["name"], row["version"]): (row["messages"], row["corrupt"])
        for row in pipe.corrupt(OrderPlaced, Cancelled).collect()
    }
    by_text = {(row["name"], row["version"]): row["corrupt"] for row in pipe.corrupt().collect()}

    assert by_type == {
        ("shop.OrderPlaced", 1): (2, 1),
        ("shop.OrderPlaced", 2): (1, 0),
        ("shop.OrderPlaced", 3): (4, 3),
        ("shop.OrderPlaced", 4): (1, 1),
        ("shop.RushOrderPlaced", 1): (1, 0),
        ("shop.Cancelled", 1): (1, 0),
    }
    assert by_text[("shop.OrderPlaced", 3)] == 1


def test_bounds_narrow_events_as_they_do_messages(pipe: Pipeline) -> None:
    assert [row["offset"] for row in rows_of(pipe.events(OrderPlaced, since=2, until=5))] == [2, 4]
    assert [row["offset"] for row in rows_of(pipe.events(RushOrderPlaced))] == [2]


def test_a_stream_can_be_decoded_as_well(pipe: Pipeline, tmp_path: Path) -> None:
    frame = pipe.decoded(pipe.stream(), Cancelled).select("offset", "order_id")
    query = (
        frame.writeStream.format("parquet")
        .option("path", str(tmp_path / "out"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(60)

    assert query.exception() is None
    assert rows_of(pipe.spark.read.parquet(str(tmp_path / "out"))) == [{"offset": 3, "order_id": 3}]


def test_two_classes_of_one_name_are_an_error_unless_one_replaces_the_other() -> None:
    class Base(Event):
        pass

    def define(place: str) -> type[Event]:
        return type("Twice", (Base,), {"__module__": place, "__qualname__": "Twice"})

    first, second = define("a"), define("a")
    assert classes_of(Base)["Twice"] is second is not first

    third = define("b")
    with pytest.raises(ConfigurationError, match=r"a\.Twice and b\.Twice"):
        classes_of(Base)
    assert third is not None


def test_deliveries_are_what_the_journal_gives(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    made = [
        DeliveryRecord(
            f"m{number}",
            "receipts",
            1 + number % 3,
            Outcome.OK if number % 2 else Outcome.FAILED,
            number / 3,
            number / 7,
            1_700_000_000.25 + number,
            None if number % 2 else "ValueError: no",
            number if number % 5 else None,
        )
        for number in range(1, 60)
    ]
    with_journal(path, lambda journal: journal.commit([Note(one) for one in made]))
    pipe = pipeline.open(str(path), spark)

    frame = pipe.deliveries()

    assert frame.schema == DELIVERIES.schema
    assert rows_of(frame, by="id") == [
        {
            "id": number,
            "offset": one.offset,
            "message_id": one.message_id,
            "handler": one.handler,
            "attempt": one.attempt,
            "outcome": one.outcome.value,
            "wait": one.wait,
            "run": one.run,
            "time": timestamp(one.time),
            "error": one.error,
            "_corrupt": None,
        }
        for number, one in enumerate(made, 1)
    ]
    assert pipe.deliveries(where={"outcome": "failed"}, columns=["id"]).count() == 29
