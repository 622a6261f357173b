"""An export in a process of its own, in small ranges, to be killed: `JOURNAL LAKE`."""

from __future__ import annotations

import sys

from msgbus import pipeline
from msgbus.pipeline.lake import SealedSegment, export
from msgbus.pipeline.session import session


def tell(segment: SealedSegment) -> None:
    """Say what is sealed."""
    print("sealed", segment.last, flush=True)


def main(journal: str, lake: str) -> None:
    """Export everything, three messages at a time."""
    spark = session(master="local[1]", conf={"spark.driver.memory": "512m"})
    export(pipeline.open(f"sqlite:///{journal}", spark), lake, segment=3, on_sealed=tell)


if __name__ == "__main__":
    main(*sys.argv[1:])
