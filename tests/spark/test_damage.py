"""A damaged journal and a damaged lake: nothing is taken for data, and nothing lost in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import BaseModel
from pyspark.errors import PythonException
from pyspark.sql import SparkSession

from msgbus import Event, pipeline
from msgbus.errors import JournalCorruptError
from msgbus.journal import DeliveryRecord, MessageCodec, Outcome
from msgbus.journal.operations import Append, Note
from msgbus.pipeline import Pipeline, Projection, fold
from msgbus.pipeline.lake import Lake, reading
from msgbus.pipeline.source.journal_file import DAMAGED, MISSING
from msgbus.testing.conformance.journal.kit import TIME
from tests.spark.kit import rows_of, with_journal
from tests.unit.journal.sqlite.files import change

COUNT: Final = 12
DAMAGE: Final = (
    "UPDATE msgbus_messages SET payload = x'00' WHERE offset = 3",
    "UPDATE msgbus_messages SET name = 'x' WHERE offset = 5",
    "DELETE FROM msgbus_messages WHERE offset = 8",
    "UPDATE msgbus_deliveries SET run = 9 WHERE id = 4",
)
LOST: Final = {3: DAMAGED, 5: DAMAGED, 8: MISSING}


class Sold(Event, name="damage.Sold", key="sku"):
    sku: str
    number: int


class Sales(BaseModel):
    sku: str
    numbers: list[int] = []


class SalesOf(Projection[Sales, Sold]):
    def initial(self, key: str) -> Sales:
        return Sales(sku=key)

    def apply(self, state: Sales, event: Sold) -> Sales:
        return Sales(sku=state.sku, numbers=[*state.numbers, event.number])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path, codec = tmp_path / "shop.db", MessageCodec()
    events = [Sold(sku=f"s{number % 2}", number=number) for number in range(COUNT)]
    records = [codec.encode(one, time=TIME) for one in events]
    notes = [
        Note(DeliveryRecord(one.message_id, "ship", 1, Outcome.OK, 0.5, 0.25, TIME))
        for one in records
    ]
    with_journal(path, lambda journal: journal.commit([*map(Append, records), *notes]))
    return path


@pytest.fixture
def damaged(path: Path) -> Path:
    for statement in DAMAGE:
        change(path, statement)
    return path


def opened(path: Path, spark: SparkSession) -> Pipeline:
    return pipeline.open(f"sqlite:///{path}", spark)


def reasons(rows: list[dict[str, Any]], position: str = "offset") -> dict[int, str]:
    """Why rows cannot be read, by position; nothing else of them is there."""
    found = [row for row in rows if row["_corrupt"] is not None]
    for row in found:
        names = {name for name, value in row.items() if value is not None}
        assert names <= {position, "_corrupt", "_error"}
    return {row[position]: row["_corrupt"] for row in found}


def test_a_damaged_record_is_shown_in_every_read(
    damaged: Path, spark: SparkSession, tmp_path: Path
) -> None:
    pipe = opened(damaged, spark)
    stream = (
        pipe.stream()
        .writeStream.format("parquet")
        .option("path", str(tmp_path / "out"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    stream.awaitTermination(60)
    events = rows_of(pipe.events(Sold))

    assert reasons(rows_of(pipe.messages())) == LOST
    assert reasons(rows_of(spark.read.parquet(str(tmp_path / "out")))) == LOST
    assert reasons(events) == LOST
    assert [row["offset"] for row in events] == list(range(1, COUNT + 1))
    assert [row["_error"] for row in events if row["_error"]] == list(LOST.values())
    assert reasons(rows_of(pipe.deliveries(), by="id"), "id") == {4: DAMAGED}
    assert {(row["name"], row["corrupt"]) for row in pipe.corrupt().collect()} == {
        ("damage.Sold", 0),
        (None, 3),
    }


def test_a_replay_fails_at_a_damaged_record_unless_it_may_be_skipped(
    damaged: Path, spark: SparkSession
) -> None:
    pipe = opened(damaged, spark)

    with pytest.raises(PythonException, match="Message 3 of the journal is damaged or missing"):
        pipe.replay(SalesOf).collect()
    with pytest.raises(JournalCorruptError, match="Message 3"):
        with_journal(damaged, lambda journal: fold(journal, SalesOf))
    rows = pipe.replay(SalesOf, skip_corrupt=True).collect()

    expected = {"s0": [0, 6, 8, 10], "s1": [1, 3, 5, 9, 11]}
    assert {row["sku"]: row["numbers"] for row in rows} == expected


def test_an_export_leaves_out_what_is_damaged_and_says_so(
    damaged: Path, spark: SparkSession, tmp_path: Path
) -> None:
    pipe = opened(damaged, spark)
    before = rows_of(pipe.messages())
    report = pipe.export(tmp_path / "lake")
    sealed = Lake(tmp_path / "lake")

    assert (report.messages, report.deliveries) == (COUNT - 3, COUNT - 1)
    assert (report.damaged, report.damaged_deliveries) == (tuple(LOST), (4,))
    assert [one.damaged for one in sealed.segments("messages")] == [tuple(LOST)]
    files = [str(file) for file in sealed.files("messages")]
    assert spark.read.parquet(*files).count() == COUNT - 3
    # Readers of the lake see what those of the journal see.
    after = rows_of(pipe.messages())
    assert reasons(after) == dict.fromkeys(LOST, reading.LEFT_OUT)
    assert [row for row in after if not row["_corrupt"]] == [
        row for row in before if not row["_corrupt"]
    ]
    assert reasons(rows_of(pipe.deliveries(), by="id"), "id") == {4: reading.LEFT_OUT}
    assert reasons(rows_of(pipe.messages(since=4, until=8))) == {5: reading.LEFT_OUT}
    with pytest.raises(PythonException, match="Message 3 of the journal"):
        pipe.replay(SalesOf).collect()
    assert pipe.export().damaged == ()


def test_a_flipped_bit_of_a_sealed_file_is_not_read_as_data(
    path: Path, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = opened(path, spark)
    pipe.export(tmp_path / "lake")
    (file,) = Lake(tmp_path / "lake").files("messages")
    truth, whole = rows_of(pipe.messages()), file.read_bytes()
    at = whole.index(b"damage.Sold")
    file.write_bytes(whole[:at] + b"X" + whole[at + 1 :])

    with pytest.raises(Exception, match=r"CRC checksum verification failed"):
        rows_of(pipe.messages())
    # Control: without the check of pages, what was changed is read as if it had been written.
    monkeypatch.setattr(reading, "_VERIFY", ("parquet.page.verify-checksum.enabled", "false"))
    found = rows_of(pipe.messages())
    assert found != truth
    assert {row["_corrupt"] for row in found} == {None}
