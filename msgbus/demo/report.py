"""The end of the demo: a report over its own journal, by the data pipeline."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Final, Protocol, cast

from msgbus.demo.durable.folder import Folder
from msgbus.errors import MissingExtraError

PIPELINE: Final = "msgbus.pipeline"
NEEDED: Final = (PIPELINE, "pyspark")
HOW_TO: Final = (
    'For a report on all this, made by Spark from the journal: pip install "msgbus[spark]", '
    "then python -m msgbus.demo --report."
)


class _Pipe(Protocol):
    def report(self, path: Path) -> Path: ...


class _Pipeline(Protocol):
    def open(self, url: str) -> _Pipe: ...


def is_possible() -> bool:
    """Whether the pipeline and Spark are installed. Loads neither."""
    return all(importlib.util.find_spec(name) is not None for name in NEEDED)


def write_report(folder: Folder) -> Path:
    """Run the pipeline over the journal of the second act; gives the file it wrote.

    Raises:
        MissingExtraError: PySpark is not installed.
        MsgBusError: Something else is missing, such as Java.
    """
    if not is_possible():
        package = "pyspark"
        raise MissingExtraError(package, extra="spark")
    pipeline = cast("_Pipeline", importlib.import_module(PIPELINE))
    return pipeline.open(folder.url).report(folder.report)
