"""A batch handler whose process is killed in the middle of a batch, for `stream` on the
command line. FOLDER in the environment says where it leaves what it was given."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from pyspark.sql import DataFrame

from msgbus import Event
from msgbus.pipeline import MicroBatch, on_batch
from tests.spark.programs.shop import Ordered


class Counted(Event, name="cluster.Counted"):
    customer: str
    orders: int


@on_batch(Ordered, returns=Counted)
def count_orders(orders: DataFrame, batch: MicroBatch) -> DataFrame:
    folder = Path(os.environ["FOLDER"])
    rows = [
        (row["offset"], row["customer"]) for row in orders.select("offset", "customer").collect()
    ]
    # Once for a batch, however often it comes: the file of a batch is replaced as a whole.
    part = folder / f"{batch.id}.part"
    part.write_text(json.dumps({"key": batch.key, "rows": rows}))
    part.replace(folder / f"{batch.id}.json")
    print(f"wrote batch {batch.id}", flush=True)
    if batch.id == int(os.environ.get("HANG_IN", "-1")):
        while True:
            time.sleep(60)  # until it is killed
    return orders.groupBy("customer").count().withColumnRenamed("count", "orders")
