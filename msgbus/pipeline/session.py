"""Spark sessions: the user's as it is, or one of our own with settings that work."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Final

from msgbus.errors import MissingExtraError
from msgbus.pipeline.java import find_java, java_home

try:
    from pyspark.sql import SparkSession
except ImportError as error:  # pragma: no cover (the tests have it)
    raise MissingExtraError("pyspark", extra="spark") from error

DEFAULTS: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
}
"""What every session of ours has."""

LOCAL: Final[Mapping[str, str]] = {
    # Loopback: else Spark asks the network for a name of this host, and opens ports on it.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 1),
}
"""What a session on this machine has as well."""


def session(
    spark: SparkSession | None = None,
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """The given session as it is, else the active one as it is, else a new one.

    A new one runs on `master`, by default on all cores of this machine; under `spark-submit`,
    and where SPARK_REMOTE is set, it runs where these say. `conf` comes on top.

    Raises:
        JavaNotFoundError: A new one is needed, and there is no Java for it.
    """
    return spark or existing() or _new_session(master, dict(conf or {}))


def existing() -> SparkSession | None:
    """A session that is there already: `getOrCreate` would put our settings into it."""
    # Active is what this thread has used; in others only the class remembers.
    active = SparkSession.getActiveSession()
    return active or getattr(SparkSession, "_instantiatedSession", None)


def _new_session(master: str | None, conf: dict[str, str]) -> SparkSession:
    builder = SparkSession.builder.appName("msgbus")
    if master is None and "SPARK_REMOTE" in os.environ:
        for key, value in {**DEFAULTS, **conf}.items():
            if key.startswith("spark.sql."):  # the rest is the server's own affair
                builder = builder.config(key, value)
        return builder.getOrCreate()
    settings = {**DEFAULTS, **conf}
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        # spark-submit has started the JVM, and knows the master.
        if master is not None:
            settings["spark.master"] = master
        return _built(builder, settings)
    master = master or conf.get("spark.master") or os.environ.get("MASTER") or "local[*]"
    if master.startswith("local"):
        settings = {**LOCAL, **settings}
    settings["spark.master"] = master
    with java_home(find_java()), _workers_python(master):
        return _built(builder, settings)


def _built(builder: SparkSession.Builder, settings: Mapping[str, str]) -> SparkSession:
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


@contextmanager
def _workers_python(master: str) -> Generator[None, None, None]:
    """Have local workers run this Python: PATH's own may lack pyarrow, or be another version."""
    if not master.startswith("local") or "PYSPARK_PYTHON" in os.environ:
        yield
        return
    os.environ["PYSPARK_PYTHON"] = sys.executable
    try:
        yield
    finally:
        del os.environ["PYSPARK_PYTHON"]
