"""Replays a journal wherever it is submitted to, and waits in the middle until it may go on.

Arguments: the journal, a folder. Prints `folding` when tasks of the fold are at work on all
workers, ends when the file `go` is there and the rows are in `rows.json`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from msgbus import pipeline
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
    journal, folder = sys.argv[1], Path(sys.argv[2])
    pipe = pipeline.open(journal)
    threading.Thread(target=tell_when_folding, args=(folder,), daemon=True).start()
    rows = pipe.replay(Waiting(folder), partitions=4).collect()
    found = sorted((row.asDict() for row in rows), key=lambda row: row["customer"])
    (folder / "rows.json").write_text(json.dumps(found))
    pipe.spark.stop()


if __name__ == "__main__":
    main()
