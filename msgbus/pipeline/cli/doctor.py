"""`doctor`: what is there, what is used, and whether it works."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final, final

from msgbus.pipeline.cli.faults import EXTRA, Fault, explain
from msgbus.pipeline.cli.sessions import started

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGES: Final = ("msgbus", "pyspark", "pyarrow", "pandas")
_TASKS: Final = 4


@final
class Examination:
    """Findings, printed as they are made."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._is_json = options.json
        self.findings: list[dict[str, Any]] = []
        self.code = 0

    def check(self, what: str, look: Callable[[], str]) -> bool:
        """Whether looking went well; the first thing that did not gives the exit code."""
        began = time.perf_counter()
        try:
            self._add(what, look(), began, is_fine=True)
        except Exception as error:  # each finding stands for itself
            self.refuse(what, explain(error), began)
            return False
        return True

    def refuse(self, what: str, fault: Fault, began: float | None = None) -> None:
        """Something is wrong."""
        self.code = self.code or fault.code
        self._add(what, fault.text, began, is_fine=False)

    def _add(self, what: str, text: str, began: float | None, *, is_fine: bool) -> None:
        seconds = 0.0 if began is None else round(time.perf_counter() - began, 3)
        self.findings.append({"what": what, "ok": is_fine, "text": text, "seconds": seconds})
        if not self._is_json:
            mark = "ok  " if is_fine else "FAIL"
            took = f"  ({seconds:.1f} s)" if seconds >= 0.5 else ""
            lines = text.replace("\n", "\n" + " " * 16)
            sys.stdout.write(f"{mark}  {what:<9} {lines}{took}\n")
            sys.stdout.flush()

    def close(self) -> int:
        """Print data, if that is wanted, and give the exit code."""
        if self._is_json:
            data = {"ok": self.code == 0, "code": self.code, "findings": self.findings}
            sys.stdout.write(json.dumps(data, indent=2) + "\n")
        elif self.code == 0:
            sys.stdout.write("Everything is there and works.\n")
        return self.code


def doctor(options: argparse.Namespace) -> int:
    """Look at everything that a pipeline takes."""
    found = Examination(options)
    found.check("python", lambda: f"{platform.python_version()}, {sys.executable}")
    has_packages = _packages(found)
    has_java = found.check("java", _java)
    if has_packages:
        found.check("reader", _reader)
        if options.journal is not None:
            found.check("journal", lambda: _journal(options.journal))
        if has_java:
            _try(found, options)
    return found.close()


def _packages(found: Examination) -> bool:
    missing = [name for name in PACKAGES if _version(name) is None]
    if missing:
        text = f'{", ".join(missing)} is not installed. Run: pip install "msgbus[spark]"'
        found.refuse("packages", Fault(EXTRA, text))
        return False
    return found.check("packages", lambda: ", ".join(f"{one} {_version(one)}" for one in PACKAGES))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _java() -> str:
    from msgbus.pipeline.java import find_java

    java = find_java()
    return f"{java.version}, from {java.source}: {java.home}"


def _reader() -> str:
    from msgbus.pipeline.source.journal_file import engine_of

    engine = engine_of("auto")
    if engine == "adbc":
        return f"adbc-driver-sqlite {_version('adbc-driver-sqlite')}"
    return "sqlite3 of Python; pip install adbc-driver-sqlite reads about twice as fast"


def _journal(url: str) -> str:
    from msgbus.pipeline.source.options import journal_path
    from msgbus.pipeline.source.ranges import bounds_of

    path = journal_path(url)
    bounds = bounds_of(path)
    return f"offsets {bounds.first} to {bounds.last}, {path}"


# -- with Spark ------------------------------------------------------------------------------


def _try(found: Examination, options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        sessions: list[SparkSession] = []

        def start() -> str:
            spark = stack.enter_context(started(options))
            sessions.append(spark)
            return f"Spark {spark.version} on {spark.conf.get('spark.master', 'a server')}"

        if not found.check("session", start):
            return
        (spark,) = sessions
        if not found.check("job", lambda: _job(spark)):
            return
        has_msgbus = found.check("workers", lambda: _workers(spark))
        if has_msgbus and options.journal is not None:
            found.check("reading", lambda: _reading(spark, options.journal))


def _job(spark: SparkSession) -> str:
    total = spark.range(0, 1000, 1, _TASKS).selectExpr("sum(id) AS total").collect()[0]["total"]
    return f"the numbers up to 999 make {total}, in {_TASKS} tasks"


def _workers(spark: SparkSession) -> str:
    from msgbus.pipeline.source.tasks import mapped

    frame = spark.range(0, _TASKS, 1, _TASKS)
    rows = mapped(frame, look_around, "msgbus string, python string, engine string").collect()
    seen = sorted({(row["msgbus"], row["python"], row["engine"]) for row in rows})
    return "; ".join(f"msgbus {one} on Python {two}, read by {three}" for one, two, three in seen)


def look_around(batches: Iterator[Any]) -> Iterator[Any]:
    """What a worker has; where it cannot even be imported, msgbus is missing."""
    from msgbus.pipeline.arrow import pa
    from msgbus.pipeline.source.journal_file import engine_of

    for _ in batches:
        row = {
            "msgbus": version("msgbus"),
            "python": platform.python_version(),
            "engine": engine_of("auto"),
        }
        yield pa.RecordBatch.from_pylist([row])


def _reading(spark: SparkSession, url: str) -> str:
    from msgbus.pipeline.pipeline import Pipeline

    pipe = Pipeline(url, spark)
    head = pipe.journal(columns=["offset"]).selectExpr("max(offset) AS head").collect()[0]["head"]
    return f"a worker has read the journal up to offset {head or 0}"
