"""A file that runs wherever Spark does: here, by spark-submit, and through Spark Connect.

Arguments: the journal, and the file to write what was found to; lake, report and
tables go beside it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from pyspark.sql import DataFrame, functions as sql

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


def main() -> None:
    journal, out = sys.argv[1], Path(sys.argv[2])
    pipe = pipeline.open(journal)
    by_name = pipe.messages().groupBy("name").agg(sql.count("*").alias("count")).collect()
    source = pipe.spark.read.format("msgbus").option("url", journal).option("start", "3").load()
    ordered = pipe.events(Ordered).agg(sql.sum("cents").alias("cents")).collect()
    rows = pipe.replay(Balances).orderBy("customer").collect()
    report = pipe.report(out.with_name("report.html"))
    exported = pipe.export(out.with_name("lake"))
    found = {
        "by_name": {row["name"]: row["count"] for row in by_name},
        "from_the_third_on": source.count(),
        "cents": ordered[0]["cents"],
        "rows": [row.asDict() for row in rows],
        "report": report.read_text(encoding="utf-8")[:15],
        "exported": exported.messages,
        "with_lake": pipe.messages(columns=["offset"]).distinct().count(),
        "streamed": streamed(pipe, out.parent),
        "copied": copied(pipe, out.parent),
        "thanked": thanked(pipe, out.parent),
    }
    out.write_text(json.dumps(found))
    pipe.spark.stop()


if __name__ == "__main__":
    main()
