"""Replays a journal on a master, and waits in the middle of it until it may go on.

Arguments: the journal, the master, a folder. Prints `folding` when tasks of the fold are at
work on all workers, ends when the file `go` is there and the rows are in `rows.json`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from msgbus import pipeline
from msgbus.pipeline.session import session
from tests.spark.programs.shop import Balance, Balances, Ordered, Refunded

WORKERS = 2


class Waiting(Balances):
    """Waits at its first event in each process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def apply(self, state: Balance, event: Ordered | Refunded) -> Balance:
        if not (self.folder / "go").exists():
            (self.folder / f"waits-{time.monotonic_ns()}").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.05)
        return super().apply(state, event)


def tell_when_folding(folder: Path) -> None:
    while len(list(folder.glob("waits-*"))) < WORKERS:
        time.sleep(0.05)
    print("folding", flush=True)


def main() -> None:
    journal, master, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.adaptive.coalescePartitions.enabled": "false",
        "spark.log.level": "WARN",
    }
    spark = session(master=master, conf=conf)
    pipe = pipeline.open(journal, spark)
    threading.Thread(target=tell_when_folding, args=(folder,), daemon=True).start()
    rows = pipe.replay(Waiting(folder), partitions=4).collect()
    found = sorted((row.asDict() for row in rows), key=lambda row: row["customer"])
    (folder / "rows.json").write_text(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main()
