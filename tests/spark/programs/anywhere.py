"""A file that runs wherever Spark does: here, by spark-submit, and through Spark Connect.

Arguments: the journal, and the file to write what was found to; lake and report go beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import functions as sql

from msgbus import pipeline
from tests.spark.programs.shop import Balances, Ordered


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
    }
    out.write_text(json.dumps(found))
    pipe.spark.stop()


if __name__ == "__main__":
    main()
