"""A file that runs wherever Spark does: here, by spark-submit, and through Spark Connect.

Arguments: the journal, the file to write what was found to, and what to do, by the names in
`PARTS`. Lake, report and tables go beside the file.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as sql

from msgbus import pipeline
from msgbus.pipeline import Pipeline, on_batch
from tests.spark.programs.shop import Balances, Ordered, Refunded, Thanked


@on_batch(Refunded, returns=Thanked)
def thank(refunds: DataFrame) -> DataFrame:
    return refunds.groupBy("customer").agg(sql.sum("cents").alias("cents"))


def streamed(pipe: Pipeline, folder: Path) -> int:
    """How many messages a stream has put into a table."""
    stream = pipe.stream(max_rows=3000, columns=["offset"]).writeStream.format("parquet")
    stream = stream.option("checkpointLocation", str(folder / "state"))
    query = stream.trigger(availableNow=True).start(str(folder / "table"))
    query.awaitTermination()
    return pipe.spark.read.parquet(str(folder / "table")).distinct().count()


def copied(pipe: Pipeline, folder: Path) -> int:
    """How many messages are in a journal to which some have been written, twice."""
    url = str(folder / "copy.db")
    for _ in range(2):
        rows = pipe.messages(until=11)
        rows.write.format("msgbus").option("url", url).mode("append").save()
    return pipeline.open(url, pipe.spark).messages().count()


def thanked(pipe: Pipeline, folder: Path) -> int:
    """The sum of what a batch handler has written to a copy of the journal."""
    path = folder / "handled.db"
    shutil.copy(pipe.path, path)
    other = pipeline.open(str(path), pipe.spark)
    with other.run(thank, checkpoint=str(folder / "handlers"), once=True) as run:
        run.await_end()
    rows = other.events(Thanked).agg(sql.sum("cents").alias("cents")).collect()
    return int(rows[0]["cents"])


def by_name(pipe: Pipeline, _folder: Path) -> dict[str, int]:
    """How many messages of each name there are."""
    rows = pipe.messages().groupBy("name").agg(sql.count("*").alias("count")).collect()
    return {row["name"]: row["count"] for row in rows}


def from_the_third_on(pipe: Pipeline, _folder: Path) -> int:
    """How many messages the data source gives from an offset on."""
    source = pipe.spark.read.format("msgbus").option("url", pipe.path).option("start", "3")
    return source.load().count()


def cents(pipe: Pipeline, _folder: Path) -> int:
    """The sum of a field of events."""
    rows = pipe.events(Ordered).agg(sql.sum("cents").alias("cents")).collect()
    return int(rows[0]["cents"])


def replayed(pipe: Pipeline, _folder: Path) -> list[dict[str, Any]]:
    """The rows of a projection."""
    return [row.asDict() for row in pipe.replay(Balances).orderBy("customer").collect()]


def report(pipe: Pipeline, folder: Path) -> str:
    """How a report begins."""
    return pipe.report(folder / "report.html").read_text(encoding="utf-8")[:15]


def exported(pipe: Pipeline, folder: Path) -> tuple[int, int]:
    """How many messages went to a lake, and how many there are with it."""
    sealed = pipe.export(folder / "lake").messages
    return sealed, pipe.messages(columns=["offset"]).distinct().count()


PARTS: Final[dict[str, Callable[[Pipeline, Path], object]]] = {
    one.__name__: one
    for one in (
        by_name, from_the_third_on, cents, replayed, report, streamed, copied, thanked, exported,
    )
}  # fmt: skip


def main() -> None:
    journal, out, *parts = sys.argv[1:]
    pipe = pipeline.open(journal)
    found = {name: PARTS[name](pipe, Path(out).parent) for name in parts}
    Path(out).write_text(json.dumps(found))
    pipe.spark.stop()


if __name__ == "__main__":
    main()
