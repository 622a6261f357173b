"""What is measured inside of one Spark session; a process of its own, as heap and cores are its."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, final

from pyspark.sql import DataFrame, SparkSession

from benchmarks.spark.data import Customers, OrderPlaced, Seen
from benchmarks.spark.memory import Watch
from benchmarks.spark.rounds import Timing, by_turns, drain, timed
from msgbus import pipeline
from msgbus.journal import SqliteJournal
from msgbus.pipeline import Pipeline, fold, jobs
from msgbus.pipeline.session import session
from msgbus.pipeline.source.journal_file import JournalQuery, batches, bounds_of
from msgbus.pipeline.source.tables import MESSAGES

Work = Callable[[], object]

LOOP: Final = 1_000_000
"""Events of the loops in one process, at most: they only give a rate."""

HEAP: Final = "1g"
NOW: Final = datetime(2027, 1, 1, tzinfo=UTC)


def tell(name: str, rows: int, timing: Timing) -> None:
    """One result, for the process that asked."""
    data = {"name": name, "rows": rows, "seconds": timing.seconds}
    sys.stdout.write(f"@ {json.dumps(data)}\n")
    sys.stdout.flush()


@final
class Bench:
    """One journal, and the same rows elsewhere."""

    def __init__(self, spark: SparkSession, journal: Path, rounds: int) -> None:
        self.spark = spark
        self.journal = journal
        self.rounds = rounds
        self.folder = journal.parent
        self.rows = bounds_of(str(journal)).last
        self.parquet = str(self.folder / "messages.parquet")
        self.json = str(self.folder / "messages.jsonl")
        self.lake = str(self.folder / "lake")

    def pipe(self, **options: Any) -> Pipeline:
        return pipeline.open(str(self.journal), self.spark, **options)

    # -- reading ---------------------------------------------------------------------------

    def read(self) -> None:
        """Full rows: the journal against Parquet, by turns, and the rest."""
        if not Path(self.parquet).exists():
            self.pipe().journal().write.parquet(self.parquet)
        turns: dict[str, Work] = {
            "parquet": lambda: drain(self.spark.read.parquet(self.parquet)),
            "source": lambda: drain(self.pipe().journal()),
            "tail": lambda: drain(self.pipe().journal(since=self.rows - self.rows // 100 + 1)),
        }
        for name, timing in by_turns(turns, self.rounds).items():
            tell(f"read.{name}", self.rows, timing)

    def read_others(self) -> None:
        """The slower ways, and what one process without Spark could do."""
        if not Path(self.json).exists():
            self.pipe().journal().write.json(self.json)
        stdlib = self.spark.read.format("msgbus").option("url", str(self.journal))
        works: dict[str, Work] = {
            "json": lambda: drain(self.spark.read.schema(MESSAGES.schema).json(self.json)),
            "sqlite3": lambda: drain(stdlib.option("engine", "sqlite3").load()),
            "limit.adbc": partial(self._one_process, "adbc"),
            "limit.sqlite3": partial(self._one_process, "sqlite3"),
            "limit.parquet": self._one_process_parquet,
        }
        for name, work in works.items():
            tell(f"read.{name}", self.rows, timed(work, 1, warm=False))

    def _one_process(self, engine: str) -> None:
        columns = tuple(MESSAGES.columns)
        query = JournalQuery(str(self.journal), MESSAGES, columns, 1, self.rows)
        found = sum(batch.num_rows for batch in batches(query, engine))
        check(found, self.rows)

    def _one_process_parquet(self) -> None:
        dataset = import_module("pyarrow.dataset").dataset(self.parquet, format="parquet")
        check(sum(batch.num_rows for batch in dataset.to_batches()), self.rows)

    # -- lake ------------------------------------------------------------------------------

    def export(self) -> None:
        """Everything to a new lake, as for the first time."""
        shutil.rmtree(self.lake, ignore_errors=True)
        tell("export", self.rows, timed(lambda: self.pipe().export(self.lake), 1, warm=False))

    def lake_and_tail(self) -> None:
        """The lake with the rows that came after it, against Parquet of all of them."""
        turns: dict[str, Work] = {
            "parquet": lambda: drain(self.spark.read.parquet(self.parquet)),
            "union": lambda: drain(self.pipe(lake=self.lake).messages()),
        }
        for name, timing in by_turns(turns, self.rounds).items():
            tell(f"lake.{name}", self.rows, timing)

    # -- jobs and replay -------------------------------------------------------------------

    def jobs(self) -> None:
        for name, work in self._jobs():
            tell(f"job.{name}", self.rows, timed(partial(_drained, work), 1, warm=False))

    def _messages(self) -> DataFrame:
        return self.pipe().messages(columns=jobs.MESSAGE_COLUMNS)

    def _jobs(self) -> Iterator[tuple[str, Callable[[], DataFrame]]]:
        def both(job: Callable[..., DataFrame], *more: Any) -> Callable[[], DataFrame]:
            return lambda: job(self._messages(), self.pipe().deliveries(), *more)

        yield "throughput", both(jobs.throughput)
        yield "latency", lambda: jobs.percentiles(both(jobs.histogram)(), "name", "handler")
        yield "failures", both(jobs.failures)
        yield "retries", both(jobs.retries)
        yield "dead_letters", both(jobs.dead_letters)
        yield "sessions", both(jobs.sessions)
        yield "causation", lambda: jobs.chains(self._messages())
        yield "slowest", both(jobs.slowest)
        yield "stuck", both(jobs.stuck, NOW)

    def replay(self) -> None:
        """The fold in Spark."""
        self._replay({"spark": self._replayed})

    def replay_and_loop(self) -> None:
        """The same by turns with a loop as one would write it by hand, and by other ways."""
        self._replay({"spark": self._replayed, "loop": self._plain_loop})
        field = partial(_drained, lambda: self.pipe().replay(Customers, key="customer"))
        tell("replay.field", self.rows, timed(field, 1, warm=False))
        tell("replay.fold", self._cut, timed(self._fold, 1, warm=False))

    def _replay(self, turns: dict[str, Work]) -> None:
        for name, timing in by_turns(turns, self.rounds, warm=False).items():
            tell(f"replay.{name}", self._cut if name == "loop" else self.rows, timing)

    @property
    def _cut(self) -> int:
        return min(self.rows, LOOP)

    def _replayed(self) -> None:
        _drained(lambda: self.pipe().replay(Customers))

    def _plain_loop(self) -> None:
        """No library but sqlite3 and pydantic: no versions, no metadata, no checks."""
        projection, states = Customers(), dict[str, dict[str, int]]()
        classes = {one.__wire__.name: one for one in (OrderPlaced, Seen)}
        query = "SELECT name, key, payload FROM msgbus_messages WHERE offset <= ? ORDER BY offset"
        with closing(sqlite3.connect(self.journal)) as connection:
            for name, key, payload in connection.execute(query, (self._cut,)):
                event = classes[name].model_validate_json(payload)
                state = states[key] if key in states else projection.initial(key)
                states[key] = projection.apply(state, event)
        rows = [projection.result(key, state) for key, state in states.items()]
        check(sum(row.orders + row.seen for row in rows), self._cut)

    def _fold(self) -> None:
        """What the library gives for small journals."""

        async def run() -> None:
            async with SqliteJournal(self.journal, reserve=0) as journal:
                await fold(journal, Customers, until=self._cut + 1)

        asyncio.run(run())


def _drained(work: Callable[[], DataFrame]) -> None:
    drain(work())


def check(found: int, expected: int) -> None:
    if found != expected:
        message = f"{found} rows were read of {expected}."
        raise SystemExit(message)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("journal", type=Path)
    parser.add_argument("works", nargs="+")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    conf = {"spark.driver.memory": HEAP, "spark.sql.shuffle.partitions": str(2 * options.cores)}
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    watch, began = Watch(), time.perf_counter()
    spark = session(master=f"local[{options.cores}]", conf=conf)
    spark.range(10).count()
    tell("start", 1, Timing((time.perf_counter() - began,)))
    bench = Bench(spark, options.journal.absolute(), options.rounds)
    for work in options.works:
        getattr(bench, work)()
    watch.close()
    spark.stop()
    for kind, size in watch.peaks.items():
        tell(f"memory.{kind}", 1, Timing((size / 2**20,)))


if __name__ == "__main__":
    main()
