"""What the commands do."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from msgbus.errors import PipelineOptionError
from msgbus.pipeline.cli.doctor import doctor
from msgbus.pipeline.cli.options import load
from msgbus.pipeline.cli.sessions import opened
from msgbus.pipeline.handlers import BatchHandler

if TYPE_CHECKING:
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
    say(options, asdict(done), text)
    return 0


def replay(options: argparse.Namespace) -> int:
    """Fold history into a read model."""
    projection = load(options.target)
    from msgbus.pipeline.progress import showing_progress

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
    """Hand new events on, batch by batch."""
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
    """Print one of both, at once."""
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
