"""Spark sessions: the user's as it is, or one of our own with settings that work."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
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
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 1),
}
"""What a session on this machine has as well."""


_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_LOGGING: Final = Path(__file__).with_name("log4j2.properties").absolute()


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
    settings["spark.master"] = master
    if not master.startswith("local"):
        with java_home(find_java()):
            return _built(builder, settings)
    with java_home(find_java()), _local_environment():
        return _built(builder, {**LOCAL, **settings, **_quiet(conf)})


def _built(builder: SparkSession.Builder, settings: Mapping[str, str]) -> SparkSession:
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _quiet(conf: Mapping[str, str]) -> dict[str, str]:
    """Errors only: Spark has much to say at its start that is no use to anybody."""
    if {"SPARK_CONF_DIR", "SPARK_HOME"} & os.environ.keys():
        # The rest is as it was set up there.
        return {"spark.log.level": conf.get("spark.log.level", "ERROR")}
    mine = f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"
    return {_JAVA_OPTIONS: f"{mine} {conf.get(_JAVA_OPTIONS, '')}".rstrip()}


@contextmanager
def _local_environment() -> Generator[None, None, None]:
    """What the JVM of a local session finds in its environment, unless it is there already."""
    wanted = {
        # Of the workers: PATH's own may lack pyarrow, or be another version.
        "PYSPARK_PYTHON": sys.executable,
        # Else it looks for an address of this host, and warns if that is loopback.
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
