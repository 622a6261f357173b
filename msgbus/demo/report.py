"""The end of the demo: a report over its own journal, by the data pipeline."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Final, Protocol, cast

from msgbus.demo.durable.folder import Folder
from msgbus.errors import MsgBusError

PIPELINE: Final = "msgbus.pipeline"
HOW_TO: Final = (
    'For a report on all this, made by Spark from the journal: pip install "msgbus[spark]", '
    "then python -m msgbus.demo --report."
)


class _Pipe(Protocol):
    def report(self, path: str) -> object: ...


class _Pipeline(Protocol):
    def open(self, url: str) -> _Pipe: ...


def is_possible() -> bool:
    """Whether the pipeline and Spark are installed. Loads neither."""
    return all(importlib.util.find_spec(name) is not None for name in (PIPELINE, "pyspark"))


def write_report(folder: Folder) -> Path:
    """Run the pipeline over the journal of the second act; gives the file it wrote.

    Raises:
        MsgBusError: It cannot be run here, and says why.
    """
    pipeline = cast("_Pipeline", importlib.import_module(PIPELINE))
    pipeline.open(folder.url).report(str(folder.report))
    if not folder.report.is_file():
        message = f"The pipeline ended well, but there is no {folder.report}."
        raise MsgBusError(message)
    return folder.report
