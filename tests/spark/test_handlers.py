"""Batch handlers: every event once, in batches that come again unchanged if they are not done."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession, functions as f

from msgbus import Command, ConfigurationError, Event, pipeline
from msgbus.errors import PipelineError
from msgbus.journal import MessageCodec, Retention
from msgbus.pipeline import MicroBatch, Pipeline, on_batch
from msgbus.testing.conformance.journal.kit import TIME
from tests.spark.kit import append, forget_last_batch, records_in, with_journal


class Ordered(Event, name="batch.Ordered", key="customer"):
    customer: str
    cents: int


class Rushed(Ordered, name="batch.Rushed"):
    by: str = "bike"


class Other(Event, name="batch.Other"):
    pass


class Thank(Command[None], name="batch.Thank", version=2, topic="mail.thanks", key="customer"):
    customer: str
    cents: int


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "shop.db"
    order(made, 0, 10)
    return made


@pytest.fixture
def pipe(path: Path, spark: SparkSession) -> Pipeline:
    return pipeline.open(str(path), spark)


def order(path: Path, low: int, high: int) -> None:
    """Two messages for each number; the second is of another class."""
    codec = MessageCodec()
    events: list[Event] = []
    for number in range(low, high):
        kind = Rushed if number % 5 == 4 else Ordered
        events += [kind(customer=f"c{number % 3}", cents=number), Other()]
    append(path, [codec.encode(one, time=TIME + place) for place, one in enumerate(events)])


class Seen:
    """A handler that keeps what it was given."""

    def __init__(self, fail_in: int | None = None) -> None:
        self.batches: list[tuple[int, list[int]]] = []
        self.keys: list[str] = []
        self.columns: list[str] = []
        self.fail_in = fail_in
        self.has_begun = threading.Event()

    def __call__(self, orders: DataFrame, batch: MicroBatch) -> None:
        self.columns = orders.columns
        found = sorted(row["cents"] for row in orders.select("cents").collect())
        self.batches.append((batch.id, found))
        self.keys.append(batch.key)
        self.has_begun.set()
        if batch.id == self.fail_in:
            raise ArithmeticError("too much")

    @property
    def cents(self) -> list[int]:
        return sorted(one for _, found in self.batches for one in found)


def run_once(pipe: Pipeline, seen: Any, **options: Any) -> None:
    handler: Any = on_batch(Ordered, name="seen")(seen)
    assert pipe.run(handler, once=True, **options).await_end()


def cursor_of(path: Path, name: str) -> int | None:
    found = with_journal(path, lambda journal: journal.cursors(f"pipeline.{name}"))
    return found[0].acked if found else None


def test_a_handler_gets_every_event_once_and_goes_on_after_a_restart(
    pipe: Pipeline, path: Path
) -> None:
    first, second, third = Seen(), Seen(), Seen()

    run_once(pipe, first, max_rows=6)
    order(path, 10, 14)
    run_once(pipe, second)
    run_once(pipe, third)

    assert first.cents == list(range(10))
    assert [number for number, _ in first.batches] == [0, 1, 2, 3]
    assert second.batches == [(4, [10, 11, 12, 13])]
    assert third.batches == []
    assert {"offset", "customer", "cents", "_corrupt"} <= set(first.columns)
    assert cursor_of(path, "seen") == 28
    assert (Path(f"{path}.checkpoints") / "seen").is_dir()


def test_a_batch_that_failed_comes_again_with_the_same_key_and_rows(
    pipe: Pipeline, path: Path, tmp_path: Path
) -> None:
    failing, mended = Seen(fail_in=1), Seen()
    folder = str(tmp_path / "state")

    with pytest.raises(PipelineError, match=r"'seen' has failed.*ArithmeticError: too much"):
        run_once(pipe, failing, max_rows=8, checkpoint=folder)
    order(path, 10, 12)
    reached = cursor_of(path, "seen")
    run_once(pipe, mended, max_rows=8, checkpoint=folder)

    assert reached == 8
    assert mended.batches[0] == failing.batches[1]
    assert mended.keys[0] == failing.keys[1]
    assert mended.cents == list(range(4, 12))


def test_rows_that_are_returned_are_written_back_once_for_each_batch(
    pipe: Pipeline, path: Path, tmp_path: Path
) -> None:
    @on_batch(Ordered, returns=Thank)
    def thank(orders: DataFrame) -> DataFrame:
        return orders.groupBy("customer").agg(f.sum("cents").alias("cents"))

    folder = tmp_path / "state"
    pipe.run(thank, once=True, checkpoint=str(folder)).await_end()
    forget_last_batch(folder / "thank")
    pipe.run(thank, once=True, checkpoint=str(folder)).await_end()

    written = [one for one in records_in(path) if one.name == "batch.Thank"]
    assert sorted((one.key, one.json()["cents"]) for one in written) == [
        ("c0", 18),
        ("c1", 12),
        ("c2", 15),
    ]
    assert {(one.kind.value, one.version, one.topic) for one in written} == {
        ("command", 2, "mail.thanks")
    }
    decoded = [MessageCodec([Thank]).decode(one) for one in written]
    assert all(isinstance(one, Thank) for one in decoded)


def test_a_run_waits_for_more_until_it_is_stopped(pipe: Pipeline, path: Path) -> None:
    seen = Seen()
    handler: Any = on_batch(Ordered, name="waiting")(seen)

    with pipe.run(handler, every=0.01, start="latest") as run:
        assert not run.await_end(0.01)
        assert run.is_active
        run.queries[0].processAllAvailable()
        order(path, 20, 22)
        assert seen.has_begun.wait(60)
        run.queries[0].processAllAvailable()

    assert not run.is_active
    assert seen.cents == [20, 21]
    assert cursor_of(path, "waiting") == 24


def test_the_journal_keeps_what_a_handler_has_not_seen(pipe: Pipeline, path: Path) -> None:
    run_once(pipe, Seen())
    order(path, 10, 12)

    trimmed = with_journal(path, lambda journal: journal.trim(Retention(max_count=1)))

    assert trimmed.held_back_by == ("pipeline.seen",)
    assert trimmed.first == 21
    late = Seen()
    run_once(pipe, late)
    assert late.cents == [10, 11]


def test_handlers_of_one_run_have_names_of_their_own(pipe: Pipeline) -> None:
    one: Any = on_batch(Ordered, name="same")(Seen())
    two: Any = on_batch(Ordered, name="same")(Seen())

    with pytest.raises(ConfigurationError, match="a name of its own, not same, same"):
        pipe.run(one, two)
    with pytest.raises(ConfigurationError, match="a name of its own, not none"):
        pipe.run()
