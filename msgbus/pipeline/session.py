"""Spark sessions: the user's unchanged, or a new one; and their progress on a terminal."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

from msgbus.errors import MissingExtraError
from msgbus.pipeline.java import find_java, java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


try:
    from pyspark.sql import SparkSession
except ImportError as error:  # pragma: no cover (the tests have it)
    raise MissingExtraError("pyspark", extra="spark") from error

__all__ = ["existing", "session"]

DEFAULTS: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
}
"""Settings of every new session."""

LOCAL: Final[Mapping[str, str]] = {
    # Loopback: else Spark looks up the name of this host, and opens ports to the network.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 1),
}
"""Settings of a local session."""


_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_LOGGING: Final = Path(__file__).with_name("log4j2.properties").absolute()


def session(
    spark: SparkSession | None = None,
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """The given session, else the active one, both unchanged; else a new one.

    A new one runs on `master`, by default on all cores of this machine; under `spark-submit`,
    and with SPARK_REMOTE, where these say. `conf` overrides our settings.

    Raises:
        JavaNotFoundError: A new session needs Java, and there is none.
    """
    return spark or existing() or _new_session(master, dict(conf or {}))


def existing() -> SparkSession | None:
    """The existing session, if any: `getOrCreate` would change its settings."""
    # The active session is per thread; the class knows that of other threads.
    active = SparkSession.getActiveSession()
    return active or getattr(SparkSession, "_instantiatedSession", None)


def _new_session(master: str | None, conf: dict[str, str]) -> SparkSession:
    builder = SparkSession.builder.appName("msgbus")
    if master is None and "SPARK_REMOTE" in os.environ:
        for key, value in {**DEFAULTS, **conf}.items():
            if key.startswith("spark.sql."):  # the others are the server's
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
    """Settings that log errors only."""
    if {"SPARK_CONF_DIR", "SPARK_HOME"} & os.environ.keys():
        return {"spark.log.level": conf.get("spark.log.level", "ERROR")}
    mine = f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"
    return {_JAVA_OPTIONS: f"{mine} {conf.get(_JAVA_OPTIONS, '')}".rstrip()}


@contextmanager
def _local_environment() -> Generator[None, None, None]:
    """Set environment variables for the JVM of a local session, where they are unset."""
    wanted = {
        # For the workers: the Python on PATH may lack pyarrow, or be another version.
        "PYSPARK_PYTHON": sys.executable,
        # Else Spark looks up an address of this host, and warns if that is loopback.
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


EVERY: Final = 0.25
_WIDTH: Final = 30


class Tasks(NamedTuple):
    """Tasks of the running stages."""

    done: int
    total: int


@contextmanager
def showing_progress(
    spark: SparkSession, label: str, stream: IO[str] | None = None
) -> Generator[None]:
    """Show Spark's progress on one line while the block runs, and clear it afterwards.

    Nothing is shown unless the stream is a terminal, nor through Spark Connect.
    """
    out = sys.stderr if stream is None else stream
    tracker = tracker_of(spark) if out.isatty() else None
    if tracker is None:
        yield
        return
    done = threading.Event()
    thread = threading.Thread(
        target=_show, args=(tracker, label, out, done), name="msgbus-progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def tracker_of(spark: SparkSession) -> Any:
    """Spark's status tracker; `None` through Spark Connect."""
    try:
        return spark.sparkContext.statusTracker()
    except Exception:  # Connect raises its own errors
        return None


def tasks_of(tracker: Any) -> Tasks:
    """The tasks of all running stages."""
    done = total = 0
    for stage_id in tracker.getActiveStageIds():
        stage = tracker.getStageInfo(stage_id)
        if stage is not None:
            done += stage.numCompletedTasks
            total += stage.numTasks
    return Tasks(done, total)


def line_of(label: str, tasks: Tasks) -> str:
    """The line to show: `export [######--------] 12 of 40 tasks`."""
    if not tasks.total:
        return f"{label} ..."
    filled = _WIDTH * tasks.done // tasks.total
    bar = "#" * filled + "-" * (_WIDTH - filled)
    return f"{label} [{bar}] {tasks.done} of {tasks.total} tasks"


def _show(tracker: Any, label: str, out: IO[str], done: threading.Event) -> None:
    shown = 0
    while not done.wait(EVERY):
        try:
            line = line_of(label, tasks_of(tracker))
        except Exception:  # the session was stopped
            break
        out.write("\r" + line.ljust(shown))
        out.flush()
        shown = len(line)
    out.write("\r" + " " * shown + "\r")
    out.flush()
