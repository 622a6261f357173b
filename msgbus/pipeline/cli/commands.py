"""The commands: report, export, replay, stream and doctor."""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final, final

from msgbus.errors import PipelineOptionError
from msgbus.pipeline.cli.faults import EXTRA, CommandFailure, explain
from msgbus.pipeline.cli.options import load
from msgbus.pipeline.handlers import BatchHandler

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from msgbus.pipeline.pipeline import Pipeline
    from msgbus.pipeline.runs import BatchRun


__all__ = ["doctor", "export", "replay", "report", "stream"]


def report(options: argparse.Namespace) -> int:
    """Write a report."""
    with opened(options) as pipe:
        path = pipe.report(options.out, since=options.since, until=options.until)
    say(options, {"report": str(path)}, f"The report is in {path}.")
    return 0


def export(options: argparse.Namespace) -> int:
    """Write what is new to a lake."""
    with opened(options) as pipe:
        done = pipe.export(options.lake)
    text = (
        f"{done.messages} messages and {done.deliveries} deliveries were added to {options.lake}, "
        f"in {done.files} files. It holds everything up to offset {done.sealed}."
    )
    if done.missing:
        gaps = ", ".join(f"{first} to {last}" for first, last in done.missing)
        text += f"\nTrimmed from the journal before they could be exported: offsets {gaps}."
    if done.damaged or done.damaged_deliveries:
        text += (
            f"\nLeft out, as they are damaged or missing: {len(done.damaged)} messages and "
            f"{len(done.damaged_deliveries)} deliveries. They stay in the journal. Check it with "
            f"journal.verify(), and restore a backup."
        )
    say(options, asdict(done), text)
    return 0


def replay(options: argparse.Namespace) -> int:
    """Fold history into a read model."""
    projection = load(options.target)
    from msgbus.pipeline.session import showing_progress

    with opened(options) as pipe, showing_progress(pipe.spark, "replay"):
        frame = pipe.replay(
            projection,
            key=options.key,
            since=options.since,
            until=options.until,
            skip_corrupt=options.skip_corrupt,
        )
        if options.out is not None:
            mode = "overwrite" if options.overwrite else "error"
            frame.write.mode(mode).parquet(options.out)
            count = pipe.spark.read.parquet(options.out).count()
            say(options, {"rows": count, "out": options.out}, f"{count} rows are in {options.out}.")
            return 0
        # One more than is shown, to know whether there are more.
        most = options.limit
        rows = (frame.limit(most + 1) if most else frame).collect()
        columns = frame.columns
    shown = [row.asDict(recursive=True) for row in (rows[:most] if most else rows)]
    is_cut = bool(most) and len(rows) > most
    more = "\nThere are more rows: see --limit and --out." if is_cut else ""
    text = table(columns, shown) + more if shown else "No rows."
    say(options, {"rows": shown, "is_cut": is_cut}, text)
    return 0


def stream(options: argparse.Namespace) -> int:
    """Process new events in batches."""
    if (options.target is None) == (options.to is None):
        message = "Name a handler, as module:function, or a folder with --to; not both."
        raise PipelineOptionError(message, option="target")
    handler = None if options.target is None else _handler(options.target)
    with opened(options) as pipe, _terminable():
        run = _run(pipe, handler, options)
        try:
            _follow(run, options)
        except KeyboardInterrupt:
            sys.stderr.write(
                "Stopped. Start it again with the same --checkpoint, and it goes on.\n"
            )
        finally:
            run.stop()
    return 0


def _handler(target: str) -> BatchHandler[Any]:
    found: BatchHandler[Any] = load(target)
    if not _is_handler(found):
        message = f"{target} is not decorated with @pipeline.on_batch(...)."
        raise PipelineOptionError(message, option="target")
    return found


def _is_handler(found: object) -> bool:
    return isinstance(found, BatchHandler)


def _run(
    pipe: Pipeline, handler: BatchHandler[Any] | None, options: argparse.Namespace
) -> BatchRun:
    settings: dict[str, Any] = {
        "checkpoint": options.checkpoint,
        "once": options.once,
        "every": options.every,
        "max_rows": options.max_rows,
        "start": options.start,
    }
    if handler is not None:
        return pipe.run(handler, **settings)
    from msgbus.pipeline.runs import into_table

    return into_table(pipe, options.to, **settings)


def _follow(run: BatchRun, options: argparse.Namespace) -> None:
    """Print a line for each batch until the stream ends."""
    seen = -1
    is_over = False
    while not is_over:
        is_over = run.await_end(1)
        for query in run.queries:
            for progress in query.recentProgress:
                batch, rows = int(progress["batchId"]), int(progress["numInputRows"])
                if batch <= seen or not rows:
                    continue
                seen = batch
                data = {
                    "batch": batch,
                    "rows": rows,
                    "offset": _end_offset(progress),
                    "milliseconds": progress["batchDuration"],
                }
                say(
                    options,
                    data,
                    f"batch {batch}: {rows} messages up to offset {data['offset']}, "
                    f"{data['milliseconds']} ms",
                )


def _end_offset(progress: Mapping[str, Any]) -> int | None:
    end = progress["sources"][0]["endOffset"]
    found = json.loads(end) if isinstance(end, str) else end
    return None if found is None else int(found["offset"])


@contextmanager
def _terminable() -> Generator[None, None, None]:
    """Let a service manager's SIGTERM end a stream as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# -- output ----------------------------------------------------------------------------------


def say(options: argparse.Namespace, data: Mapping[str, Any], text: str) -> None:
    """Print data as JSON, or text, and flush."""
    shown = json.dumps(data, default=str) if options.json else text
    sys.stdout.write(f"{shown}\n")
    sys.stdout.flush()


def table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as aligned text."""
    cells = [[str(row[name]) if row[name] is not None else "" for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = [columns, ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


PACKAGES: Final = ("msgbus", "pyspark", "pyarrow", "pandas")
_TASKS: Final = 4


@final
class Examination:
    """Runs checks, and prints each finding."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._is_json = options.json
        self.findings: list[dict[str, Any]] = []
        self.code = 0

    def check(self, what: str, look: Callable[[], str]) -> bool:
        """Run a check; the first that fails gives the exit code."""
        began = time.perf_counter()
        try:
            self._add(what, look(), began, is_fine=True)
        except Exception as error:  # the other checks run all the same
            self.refuse(what, explain(error), began)
            return False
        return True

    def refuse(self, what: str, failure: CommandFailure, began: float | None = None) -> None:
        """Add a failed check."""
        self.code = self.code or failure.code
        self._add(what, failure.text, began, is_fine=False)

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
        """Print the summary, and return the exit code."""
        if self._is_json:
            data = {"ok": self.code == 0, "code": self.code, "findings": self.findings}
            sys.stdout.write(json.dumps(data, indent=2) + "\n")
        elif self.code == 0:
            sys.stdout.write("Everything works.\n")
        return self.code


def doctor(options: argparse.Namespace) -> int:
    """Check everything that the pipeline needs."""
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
        found.refuse("packages", CommandFailure(EXTRA, text))
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
    from msgbus.pipeline.source.journal_file import bounds_of
    from msgbus.pipeline.source.options import journal_path

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
    from msgbus.pipeline.arrow import mapped

    frame = spark.range(0, _TASKS, 1, _TASKS)
    rows = mapped(frame, worker_versions, "msgbus string, python string, engine string").collect()
    seen = sorted({(row["msgbus"], row["python"], row["engine"]) for row in rows})
    return "; ".join(f"msgbus {one} on Python {two}, read by {three}" for one, two, three in seen)


def worker_versions(batches: Iterator[Any]) -> Iterator[Any]:
    """Versions on a worker; fails where msgbus cannot be imported."""
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


@contextmanager
def opened(options: argparse.Namespace) -> Generator[Pipeline, None, None]:
    """The pipeline of a command; errors of the journal come before Spark starts."""
    import_module("msgbus.pipeline.session")  # fails if the extra is missing
    from msgbus.pipeline.cli.options import load
    from msgbus.pipeline.pipeline import Pipeline
    from msgbus.pipeline.source.journal_file import bounds_of
    from msgbus.pipeline.source.options import journal_path

    bounds_of(journal_path(options.journal))
    if options.codec is not None:
        load(options.codec)
    lake = None if options.command == "export" else getattr(options, "lake", None)
    with started(options) as spark:
        yield Pipeline(options.journal, spark, lake=lake, codec=options.codec)


@contextmanager
def started(options: argparse.Namespace) -> Generator[SparkSession, None, None]:
    """A session for the command; stopped after it unless it existed before."""
    from msgbus.pipeline.session import existing, session

    before = existing()
    spark = session(before, master=options.master, conf=dict(options.conf))
    try:
        yield spark
    finally:
        if before is None:
            spark.stop()
