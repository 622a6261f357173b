"""Each job against a plain Python computation, over random journals."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import pytest
from pyspark.sql import DataFrame, SparkSession

from msgbus.pipeline import jobs
from msgbus.pipeline.jobs.failures import cause_of
from tests.counts import RANDOM_JOURNALS
from tests.evidence import Evidence
from tests.spark.buckets import bucket_of, percentile
from tests.spark.tables import (
    START,
    Row,
    at,
    collected,
    deliveries_frame,
    messages_frame,
    random_journal,
)

pytestmark = pytest.mark.spark

ANSWERED = {"ok", "refused"}
SECONDS = 600.0


class Journal(NamedTuple):
    messages: list[Row]
    deliveries: list[Row]
    by_id: dict[str, Row]
    frames: tuple[DataFrame, DataFrame]

    def pairs(self) -> dict[tuple[str, str], list[Row]]:
        """Tries by message and handler, in order."""
        found: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in self.deliveries:
            found[row["message_id"], row["handler"]].append(row)
        return found


@pytest.fixture(scope="module", params=RANDOM_JOURNALS)
def journal(spark: SparkSession, request: pytest.FixtureRequest) -> Journal:
    messages, deliveries = random_journal(request.param, 800, SECONDS)
    # One message is gone: its attempts have no type any more.
    tried = {row["message_id"] for row in deliveries}
    messages.remove(next(one for one in messages[100:] if one["message_id"] in tried))
    frames = (
        messages_frame(spark, messages).select(*jobs.MESSAGE_COLUMNS).repartition(3),
        deliveries_frame(spark, deliveries).repartition(3),
    )
    return Journal(messages, deliveries, {one["message_id"]: one for one in messages}, frames)


def is_try(row: Row) -> bool:
    return bool(row["outcome"] != "dead_lettered" or row["run"] > 0)


def is_failed(row: Row) -> bool:
    return is_try(row) and row["outcome"] in {"failed", "timed_out", "dead_lettered"}


def seconds(row: Row, name: str = "time") -> float:
    return float((row[name] - START).total_seconds())


def minute(row: Row) -> float:
    return seconds(row) // 60 * 60


def type_of(journal: Journal, row: Row) -> str | None:
    found = journal.by_id.get(row["message_id"])
    return None if found is None else str(found["name"])


COMPARED = "jobs against plain Python on random journals"


@pytest.fixture(autouse=True)
def _compared(evidence: Evidence) -> None:
    evidence(COMPARED, comparisons=1)


def test_the_journal_has_something_of_everything(journal: Journal, evidence: Evidence) -> None:
    outcomes = Counter(row["outcome"] for row in journal.deliveries)
    assert set(outcomes) == {*ANSWERED, "failed", "timed_out", "cancelled", "dead_lettered"}
    assert {is_try(row) for row in journal.deliveries} == {True, False}
    assert max(row["depth"] for row in journal.messages) > 3
    assert None in {type_of(journal, row) for row in journal.deliveries}
    messages, deliveries = len(journal.messages), len(journal.deliveries)
    evidence(COMPARED, seeds=1, messages=messages, deliveries=deliveries)


def test_throughput(journal: Journal) -> None:
    expected: dict[tuple[float, str | None], Counter[str]] = defaultdict(Counter)
    for one in journal.messages:
        expected[minute(one), one["name"]]["published"] += 1
    names = {one["message_id"]: one["name"] for one in journal.messages}
    for row in journal.deliveries:
        count = expected[minute(row), names.get(row["message_id"])]
        count["attempts"] += is_try(row)
        count["succeeded"] += row["outcome"] == "ok"
        count["failed"] += is_failed(row)
        count["retries"] += is_try(row) and row["attempt"] > 1
        count["dead_letters"] += row["outcome"] == "dead_lettered"
    found = collected(jobs.throughput(*journal.frames))
    assert {(row["minute"], row["name"]) for row in found} == set(expected)
    for row in found:
        count = expected[row["minute"], row["name"]]
        columns = ("published", "attempts", "succeeded", "failed", "retries", "dead_letters")
        assert {name: row[name] for name in columns} == {name: count[name] for name in columns}
        rate = count["failed"] / count["attempts"] if count["attempts"] else None
        assert row["failure_rate"] == rate


def test_latency(journal: Journal) -> None:
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    exact: dict[str, list[float]] = defaultdict(list)
    for row in journal.deliveries:
        if is_try(row):
            total = row["wait"] + row["run"]
            counts[row["handler"]][bucket_of(total)] += 1
            exact[row["handler"]].append(total)
    histogram = jobs.histogram(*journal.frames)
    found = collected(jobs.percentiles(histogram, "handler"))
    assert {row["handler"] for row in found} == set(exact)
    for row in found:
        values = sorted(exact[row["handler"]])
        assert row["count"] == len(values)
        assert row["mean"] == pytest.approx(sum(values) / len(values))
        assert row["longest"] == pytest.approx(values[-1])
        for quantile, column in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99")):
            assert row[column] == pytest.approx(percentile(counts[row["handler"]], quantile))
            rank = math.ceil(quantile * len(values))
            assert row[column] == pytest.approx(values[rank - 1], rel=0.0453)


def test_failures_retries_and_dead_letters(journal: Journal) -> None:
    names = {one["message_id"]: one["name"] for one in journal.messages}
    failures: Counter[Any] = Counter()
    letters: Counter[Any] = Counter()
    for row in journal.deliveries:
        where = (names.get(row["message_id"]), row["handler"])
        cause = cause_of(row["error"])
        if row["outcome"] != "ok":
            failures[(*where, row["outcome"], cause)] += 1
        if row["outcome"] == "dead_lettered":
            letters[(*where, cause)] += 1
    retries: dict[Any, Counter[str]] = defaultdict(Counter)
    ends = {"ok": "recovered", "refused": "recovered", "dead_lettered": "dead"}
    for (message_id, handler), rows in journal.pairs().items():
        bad = [row for row in rows if is_failed(row)]
        tried = sum(map(is_try, rows))
        if bad:
            count = retries[names.get(message_id), handler, cause_of(bad[0]["error"])]
            count["messages"] += 1
            count["retried"] += tried > 1
            count["retries"] += tried - 1
            count[ends.get(rows[-1]["outcome"], "unfinished")] += 1

    found = collected(jobs.failures(*journal.frames))
    fine = ("name", "handler", "outcome", "cause")
    assert {tuple(row[key] for key in fine): row["count"] for row in found} == failures
    found = collected(jobs.dead_letters(*journal.frames))
    keys = ("name", "handler", "cause")
    assert {tuple(row[key] for key in keys): row["letters"] for row in found} == letters
    found = collected(jobs.retries(*journal.frames))
    assert {tuple(row[key] for key in keys) for row in found} == set(retries)
    for row in found:
        count = retries[tuple(row[key] for key in keys)]
        columns = ("messages", "retried", "retries", "recovered", "dead", "unfinished")
        assert {name: row[name] for name in columns} == {name: count[name] for name in columns}


def test_sessions(journal: Journal) -> None:
    by_session: dict[str, list[Row]] = defaultdict(list)
    for one in journal.messages:
        if one["session_id"] is not None:
            by_session[one["session_id"]].append(one)
    pairs = journal.pairs()
    found = collected(jobs.sessions(*journal.frames))
    assert {row["session_id"] for row in found} == set(by_session)
    for row in found:
        messages = by_session[row["session_id"]]
        ids = {one["message_id"] for one in messages}
        tried = [tries for (message_id, _), tries in pairs.items() if message_id in ids]
        every = [one for tries in tried for one in tries]
        times = [seconds(one) for one in (*messages, *every)]
        failed = sum(map(is_failed, every))
        ended_badly = any(tries[-1]["outcome"] not in ANSWERED for tries in tried)
        assert row["outcome"] == ("failed" if ended_badly else "recovered" if failed else "ok")
        assert row["duration"] == pytest.approx(max(times) - min(times), abs=1e-5)
        assert (row["messages"], row["failed"]) == (len(ids), failed)
        assert row["attempts"] == sum(map(is_try, every))


def test_chains(journal: Journal) -> None:
    by_root: dict[str, list[Row]] = defaultdict(list)
    for one in journal.messages:
        by_root[one["root_id"]].append(one)
    by_id = journal.by_id
    found = collected(jobs.chains(journal.frames[0]))
    assert {row["root_id"] for row in found} == set(by_root)
    for row in found:
        messages = by_root[row["root_id"]]
        last: Row | None = max(messages, key=lambda one: (one["time"], one["offset"]))
        path: list[str] = []
        while last is not None:
            path.insert(0, last["message_id"])
            last = by_id.get(last["causation_id"])
        causes = Counter(one["causation_id"] for one in messages if one["causation_id"])
        assert [step["message_id"] for step in row["critical_path"]] == path
        assert row["messages"] == len(messages)
        assert row["depth"] == max(one["depth"] for one in messages)
        assert row["widest"] == max(causes.values(), default=0)


def test_slowest(journal: Journal) -> None:
    totals: list[tuple[float, str, str]] = []
    for (message_id, handler), rows in journal.pairs().items():
        ran = [row for row in rows if is_try(row)]
        if ran:
            totals.append((ran[-1]["wait"] + ran[-1]["run"], message_id, handler))
    found = collected(jobs.slowest(*journal.frames, limit=10))
    assert [(row["message_id"], row["handler"]) for row in found] == [
        (message_id, handler) for _, message_id, handler in sorted(totals, reverse=True)[:10]
    ]


def handlers_of(journal: Journal) -> dict[str, dict[str, int]]:
    """The first offset that each handler has handled of each type."""
    since: dict[str, dict[str, int]] = defaultdict(dict)
    for row in journal.deliveries:
        one = journal.by_id.get(row["message_id"])
        if row["outcome"] == "ok" and one is not None:
            first = since[one["name"]].get(row["handler"], one["offset"])
            since[one["name"]][row["handler"]] = min(first, one["offset"])
    return since


def test_stuck(journal: Journal) -> None:
    pairs = journal.pairs()
    since = handlers_of(journal)
    tried = {message_id for message_id, _ in pairs}
    old = {one["message_id"]: one for one in journal.messages if seconds(one) <= SECONDS - 100}
    ends = {"ok", "dead_lettered", "refused", "dropped"}
    expected: set[tuple[str, str | None, str]] = {
        (message_id, handler, "unfinished")
        for (message_id, handler), rows in pairs.items()
        if message_id in old and not ends & {row["outcome"] for row in rows}
    }
    for mine, one in old.items():
        if mine not in tried and not since[one["name"]]:
            expected.add((mine, None, "unhandled"))
        for handler, first in since[one["name"]].items():
            if (mine, handler) not in pairs and one["offset"] >= first:
                expected.add((mine, handler, "undelivered"))
    found = collected(jobs.stuck(*journal.frames, now=at(SECONDS), older_than=100.0))
    assert {(row["message_id"], row["handler"], row["reason"]) for row in found} == expected
    assert len(found) == len(expected)
    assert {reason for *_, reason in expected} == {"unhandled", "undelivered", "unfinished"}
