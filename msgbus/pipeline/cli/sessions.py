"""A session for one command, and what it shows while it works."""

from __future__ import annotations

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from msgbus.pipeline.pipeline import Pipeline


@contextmanager
def opened(options: argparse.Namespace) -> Generator[Pipeline, None, None]:
    """The pipeline of a command; what is wrong with the journal is said before Spark starts."""
    import_module("msgbus.pipeline.session")  # says which extra is missing
    from msgbus.pipeline.cli.options import load
    from msgbus.pipeline.pipeline import Pipeline
    from msgbus.pipeline.source.options import journal_path
    from msgbus.pipeline.source.ranges import bounds_of

    bounds_of(journal_path(options.journal))
    if options.codec is not None:
        load(options.codec)
    lake = None if options.command == "export" else getattr(options, "lake", None)
    with started(options) as spark:
        yield Pipeline(options.journal, spark, lake=lake, codec=options.codec)


@contextmanager
def started(options: argparse.Namespace) -> Generator[SparkSession, None, None]:
    """A session for the command, ended with it, unless it was there before."""
    from msgbus.pipeline.session import existing, session

    before = existing()
    spark = session(before, master=options.master, conf=dict(options.conf))
    try:
        yield spark
    finally:
        if before is None:
            spark.stop()
