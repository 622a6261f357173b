"""A journal as a lake: exported once, and read by everybody, with what came since."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from msgbus import pipeline
from msgbus.errors import PipelineOptionError, WrongLakeError
from msgbus.journal import DeliveryRecord, Kind, Outcome, Record
from msgbus.journal.operations import Note
from msgbus.pipeline.lake import Frames, Lake, export, read_lake
from msgbus.pipeline.pipeline import Pipeline
from msgbus.pipeline.source.selection import Bound
from msgbus.pipeline.source.tables import DELIVERIES, MESSAGES
from msgbus.testing.conformance.journal.kit import make_record
from tests.spark.kit import append, mixed_records, numbers, offsets_of, rows_of, with_journal
from tests.spark.tables import deliveries_frame, messages_frame, random_journal

duckdb: Any = import_module("duckdb")
polars: Any = import_module("polars")

MIDNIGHT: Final = datetime(2026, 3, 2, tzinfo=UTC)


def around_midnight(count: int) -> list[Record]:
    """Messages a second apart, half of them before midnight, by clocks that do not quite agree."""
    start = MIDNIGHT.timestamp() - count / 2
    return [
        record._replace(time=start + number + (7 if number % 5 == 0 else 0) + 1e-6)
        for number, record in enumerate(mixed_records(count))
    ]


def deliver(path: Path, records: list[Record], handler: str = "ship") -> None:
    """A failed try and a successful one for each."""

    def named_deliveries(record: Record) -> list[Note]:
        time = record.time + 1
        bad = DeliveryRecord(
            record.message_id, handler, 1, Outcome.FAILED, 0.5, 0.25, time, "E: no 'x'"
        )
        good = DeliveryRecord(record.message_id, handler, 2, Outcome.OK, 1.5, 0.125, time + 1)
        return [Note(bad), Note(good)]

    operations = [one for record in records for one in named_deliveries(record)]
    with_journal(path, lambda journal: journal.commit(operations))


@pytest.fixture
def pipe(spark: SparkSession, tmp_path: Path) -> Pipeline:
    path = tmp_path / "shop.db"
    records = around_midnight(40)
    append(path, records)
    deliver(path, records)
    return pipeline.open(f"sqlite:///{path}", spark)


@contextmanager
def zone(spark: SparkSession, name: str) -> Generator[None]:
    before = str(spark.conf.get("spark.sql.session.timeZone"))
    spark.conf.set("spark.sql.session.timeZone", name)
    try:
        yield
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_everybody_reads_the_same_rows(pipe: Pipeline, tmp_path: Path) -> None:
    expected = {
        "messages": rows_of(pipe.messages()),
        "deliveries": rows_of(pipe.deliveries(), by="id"),
    }
    lake = tmp_path / "lake"
    with zone(pipe.spark, "America/New_York"):
        report = pipe.export(lake)
    assert (report.messages, report.deliveries, report.sealed) == (40, 80, 40)
    assert report.missing == ()

    for table, position in (("messages", "offset"), ("deliveries", "id")):
        glob = f"{lake}/{table}/*/*.parquet"
        found = duckdb.sql(
            f"SELECT * FROM read_parquet('{glob}', hive_partitioning = true) "
            f'ORDER BY "{position}"'
        )
        columns = [column[0] for column in found.description]
        by_duckdb = [dict(zip(columns, row, strict=True)) for row in found.fetchall()]
        by_polars = polars.read_parquet(glob, hive_partitioning=True).sort(position).to_dicts()
        for mine, theirs, others in zip(expected[table], by_duckdb, by_polars, strict=True):
            day = mine["time"].date()
            assert theirs.pop("date") == day
            assert others.pop("date") == day
            theirs["time"] = theirs["time"].astimezone(UTC)
            if table == "messages":
                others["headers"] = _as_dict(others["headers"])
            assert theirs == mine
            assert others == mine
    days = {path.name for path in (lake / "messages").iterdir()}
    assert days == {"date=2026-03-01", "date=2026-03-02"}
    parquet: Any = import_module("pyarrow.parquet")
    for file in Lake(lake).files("messages"):
        made = parquet.ParquetFile(file)
        assert made.metadata.row_group(0).column(0).compression == "ZSTD"
        assert str(made.schema_arrow.field("time").type) == "timestamp[us, tz=UTC]"


def _as_dict(headers: Any) -> dict[str, str]:
    """A map as Polars gives it: older ones as a list of entries."""
    entries: list[Any] = list(headers)
    if entries and isinstance(entries[0], dict):
        return {entry["key"]: entry["value"] for entry in entries}
    return dict(headers)


def test_an_export_adds_what_is_new_and_nothing_else(pipe: Pipeline, tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    pipe.export(lake.path)
    files = lake.files("messages") + lake.files("deliveries")
    again = pipe.export()
    assert (again.messages, again.deliveries, again.files) == (0, 0, 0)
    assert lake.files("messages") + lake.files("deliveries") == files

    more = mixed_records(10)
    append(Path(pipe.path), more)
    deliver(Path(pipe.path), more[:2])
    third = pipe.export()
    assert (third.messages, third.deliveries, third.sealed) == (10, 4, 50)
    assert offsets_of(read_lake(pipe.spark, lake.path)) == numbers(1, 50)


def test_ranges_are_sealed_one_by_one(pipe: Pipeline, tmp_path: Path) -> None:
    sealed: list[tuple[str, int, int]] = []
    export(
        pipe,
        tmp_path / "lake",
        segment=25,
        on_sealed=lambda one: sealed.append((one.table, one.first, one.last)),
    )
    assert sealed == [
        ("messages", 1, 25),
        ("messages", 26, 40),
        ("deliveries", 1, 25),
        ("deliveries", 26, 50),
        ("deliveries", 51, 75),
        ("deliveries", 76, 80),
    ]
    assert offsets_of(read_lake(pipe.spark, tmp_path / "lake")) == numbers(1, 40)


def test_the_lake_and_the_journal_behind_it_are_one_table(pipe: Pipeline, tmp_path: Path) -> None:
    before = rows_of(pipe.messages())
    pipe.export(tmp_path / "lake")
    more = [one._replace(time=one.time + 1e9) for one in mixed_records(6)]
    append(Path(pipe.path), more)
    deliver(Path(pipe.path), more)
    both = pipeline.open(f"sqlite:///{pipe.path}", pipe.spark, lake=str(tmp_path / "lake"))
    live = both.journal()
    found = rows_of(both.messages())
    assert found == rows_of(live)
    assert found[:40] == before
    assert rows_of(both.deliveries(), by="id") == rows_of(both.journal(DELIVERIES), by="id")
    assert both.messages().schema == live.schema


def test_bounds_and_conditions_are_the_same_with_a_lake(pipe: Pipeline, tmp_path: Path) -> None:
    pipe.export(tmp_path / "lake")
    append(Path(pipe.path), [one._replace(time=1.9e9) for one in mixed_records(6)])
    every = rows_of(pipe.journal())

    def is_between(row: dict[str, Any], since: Bound | None, until: Bound | None) -> bool:
        low = row["time" if isinstance(since, datetime) else "offset"]
        high = row["time" if isinstance(until, datetime) else "offset"]
        return (since is None or low >= since) and (until is None or high < until)

    near = (MIDNIGHT - timedelta(seconds=5), MIDNIGHT + timedelta(seconds=5))
    bounds: list[tuple[Bound | None, Bound | None]] = [
        *((None, 41), (39, 43), (44, None), (50, None), (None, 5)),
        *((MIDNIGHT, None), (None, MIDNIGHT), near, (20, MIDNIGHT)),
    ]
    for since, until in bounds:
        wanted = [row["offset"] for row in every if is_between(row, since, until)]
        found = pipe.messages(since=since, until=until, columns=["offset"])
        assert offsets_of(found) == wanted
    conditions: list[dict[str, Any]] = [
        {"name": "shop.Event1"},
        {"key": ["k1", None], "depth": [1, 2]},
        {"name": []},
    ]
    for where in conditions:
        wanted = [row["offset"] for row in every if _fits(row, where)]
        assert offsets_of(pipe.messages(where=where, columns=["offset"])) == wanted
    with pytest.raises(PipelineOptionError, match="cannot compare 'headers'"):
        pipe.messages(where={"headers": "x"})


def test_control_records_are_sealed_and_read_if_they_are_asked_for(
    pipe: Pipeline, tmp_path: Path
) -> None:
    path, control = Path(pipe.path), [make_record(kind=Kind.CONTROL) for _ in range(2)]
    append(path, control[:1])
    exported = pipe.export(tmp_path / "lake")
    append(path, control[1:])

    assert exported.messages == 41
    assert pipe.messages().count() == read_lake(pipe.spark, tmp_path / "lake").count() == 40
    assert rows_of(pipe.messages(columns=["offset"])) == [{"offset": n} for n in numbers(1, 40)]
    asked = pipe.messages(where={"kind": "control"}, columns=["offset", "kind"])
    assert rows_of(asked) == [{"offset": offset, "kind": "control"} for offset in (41, 42)]


def _fits(row: dict[str, Any], where: Mapping[str, Any]) -> bool:
    return all(
        row[name] in (value if isinstance(value, list) else [value])
        for name, value in where.items()
    )


def test_what_is_sealed_may_be_trimmed(pipe: Pipeline, tmp_path: Path) -> None:
    expected = rows_of(pipe.messages())
    path = Path(pipe.path)
    pipe.export(tmp_path / "lake")
    assert pipe.trimmable() == 41
    # A delivery that the lake does not have would go with its message.
    late = DeliveryRecord(expected[9]["message_id"], "audit", 1, Outcome.OK, 0.0, 0.0, 1.8e9)
    with_journal(path, lambda journal: journal.commit([Note(late)]))
    assert pipe.trimmable() == 10
    pipe.export()
    before = pipe.trimmable()
    assert before == 41
    attempts = rows_of(pipe.journal(DELIVERIES), by="id")
    trimmed = with_journal(path, lambda journal: journal.trim(before=before))
    assert trimmed.removed == 40
    assert rows_of(pipe.messages()) == expected
    assert rows_of(pipe.deliveries(), by="id") == attempts

    # Ids are not given twice, although nothing is left of the old ones.
    more = mixed_records(4)
    append(path, more)
    deliver(path, more)
    report = pipe.export()
    assert (report.messages, report.deliveries, report.missing) == (4, 8, ())
    assert offsets_of(read_lake(pipe.spark, tmp_path / "lake")) == numbers(1, 44)
    assert len(rows_of(pipe.deliveries(), by="id")) == 89


def test_what_was_trimmed_before_it_was_sealed_is_said_to_be_missing(
    pipe: Pipeline, tmp_path: Path
) -> None:
    path = Path(pipe.path)
    with_journal(path, lambda journal: journal.trim(before=6))
    # A first export knows of nothing that was before it.
    assert pipe.export(tmp_path / "lake").missing == ()
    append(path, mixed_records(10))
    with_journal(path, lambda journal: journal.trim(before=46))
    report = pipe.export()
    assert report.missing == ((41, 45),)
    assert report.messages == 5


def test_a_frame_that_is_older_than_a_trim_fails_and_lacks_nothing(
    pipe: Pipeline, tmp_path: Path
) -> None:
    path = Path(pipe.path)
    pipe.export(tmp_path / "lake")
    append(path, mixed_records(10))
    messages, deliveries = pipe.messages(), pipe.deliveries()
    pipe.export()
    with_journal(path, lambda journal: journal.trim(before=pipe.trimmable()))
    for frame in (messages, deliveries):
        with pytest.raises(PySparkException, match="was trimmed"):
            frame.collect()
    assert offsets_of(pipe.messages()) == numbers(1, 50)


def test_one_lake_holds_one_journal(pipe: Pipeline, tmp_path: Path) -> None:
    pipe.export(tmp_path / "lake")
    path = tmp_path / "other.db"
    append(path, mixed_records(10))
    other = pipeline.open(f"sqlite:///{path}", pipe.spark)
    with pytest.raises(WrongLakeError, match="offset 40"):
        other.export(tmp_path / "lake")
    append(path, mixed_records(40))
    with pytest.raises(WrongLakeError, match="another journal"):
        other.export(tmp_path / "lake")


def test_an_export_needs_to_know_where(pipe: Pipeline) -> None:
    with pytest.raises(PipelineOptionError, match="which lake"):
        pipe.export()


def test_an_empty_journal_makes_an_empty_lake(spark: SparkSession, tmp_path: Path) -> None:
    append(tmp_path / "shop.db", [])
    pipe = pipeline.open(f"sqlite:///{tmp_path}/shop.db", spark)
    report = pipe.export(tmp_path / "lake")
    assert (report.messages, report.files, report.sealed) == (0, 0, 0)
    assert rows_of(pipe.messages()) == []
    assert rows_of(read_lake(spark, tmp_path / "lake")) == []


def test_frames_of_any_origin_are_exported(spark: SparkSession, tmp_path: Path) -> None:
    messages, deliveries = random_journal(3, 50)
    frames = Frames(messages_frame(spark, messages), deliveries_frame(spark, deliveries))
    report = export(frames, tmp_path / "lake")
    assert (report.messages, report.deliveries) == (50, len(deliveries))
    assert export(frames, tmp_path / "lake").messages == 0
    found = read_lake(spark, tmp_path / "lake", MESSAGES, columns=["message_id"])
    assert {row[0] for row in found.collect()} == {row["message_id"] for row in messages}
    dates = {path.name for path in (tmp_path / "lake" / "messages").iterdir()}
    assert dates == {f"date={date(2026, 3, 1)}"}
