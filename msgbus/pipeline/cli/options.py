"""The arguments of the commands, and their help."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from msgbus.pipeline.cli.faults import CODES
from msgbus.pipeline.import_string import import_string

Run = Callable[[argparse.Namespace], int]

ABOUT: Final = f"""\
Reports, exports, replays and streams of a journal, with Spark.

  python -m msgbus.pipeline doctor                       check Java, packages, workers
  python -m msgbus.pipeline report shop.db               one HTML file with charts
  python -m msgbus.pipeline export shop.db lake/         new messages as Parquet files
  python -m msgbus.pipeline replay shop.db shop:Totals   rebuild a read model
  python -m msgbus.pipeline stream shop.db shop:notice --checkpoint state/

The journal is a path or a URL: shop.db, sqlite:///shop.db. Spark runs on this machine unless
--master says otherwise; its settings are given by --conf. The first start takes seconds.
On a terminal a line shows how many tasks are done of all.

{CODES}"""

DOCTOR: Final = """\
Show which Java and which packages are used, start Spark, run a small job, and check that the
workers can import msgbus. With a journal, read it too.

  python -m msgbus.pipeline doctor
  python -m msgbus.pipeline doctor shop.db --master spark://host:7077 --json"""

REPORT: Final = """\
Write one HTML file that needs no network to open: throughput, latency, failures by cause,
sessions, causes, and the slowest messages.

  python -m msgbus.pipeline report shop.db --out report.html
  python -m msgbus.pipeline report shop.db --lake lake/ --since 2026-01-31T00:00:00Z"""

EXPORT: Final = """\
Write what is new since the last export to a lake: Parquet files by date, which Spark, DuckDB
and Polars read. An export that was interrupted is completed by the next one, every row once.

  python -m msgbus.pipeline export shop.db lake/"""

REPLAY: Final = """\
Fold all events of a projection again, from the beginning or from --since. TARGET is where the
projection is: module:Class. Events of one key are applied in the order of the journal.

  python -m msgbus.pipeline replay shop.db shop.projections:Totals
  python -m msgbus.pipeline replay shop.db shop.projections:Totals --key customer --out totals/
  python -m msgbus.pipeline replay shop.db shop.projections:Totals --json | jq .rows"""

STREAM: Final = """\
Process new events in batches, until it is interrupted, or with --once until now. TARGET
is a function with @pipeline.on_batch, as module:function. Without one, --to names a folder, and
all messages go to Parquet files in it. --checkpoint stores the offset: start again with the
same one, and it goes on, with each event in the table exactly once.

  python -m msgbus.pipeline stream shop.db shop.batches:notice --checkpoint state/
  python -m msgbus.pipeline stream shop.db --to table/ --checkpoint state/ --once"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m msgbus.pipeline",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _doctor(commands)
    _report(commands)
    _export(commands)
    _replay(commands)
    _stream(commands)
    return parser.parse_args(arguments)


def _command(commands: Any, name: str, run: Run, about: str, short: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=short,
        description=about,
        epilog=CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    spark = parser.add_argument_group("Spark")
    spark.add_argument(
        "--master",
        metavar="URL",
        help="where to run: local[4], spark://host:7077; default local[*]",
    )
    spark.add_argument(
        "--conf",
        metavar="KEY=VALUE",
        type=_setting,
        action="append",
        default=[],
        help="a setting of Spark, such as spark.driver.memory=4g; may be given again",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print data instead of text")
    return parser


def _journal(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("journal", metavar="JOURNAL", help="shop.db or sqlite:///shop.db")
    parser.add_argument(
        "--codec", metavar="MODULE:NAME", help="what the journal's payloads were encrypted by"
    )


def _range(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--since", type=_bound, metavar="WHEN", help="first offset, or time as 2026-01-31T12:00Z"
    )
    parser.add_argument("--until", type=_bound, metavar="WHEN", help="end before this")
    parser.add_argument("--lake", metavar="FOLDER", help="read sealed messages from this lake")


def _doctor(commands: Any) -> None:
    parser = _command(commands, "doctor", _lazily("doctor"), DOCTOR, "check the installation")
    parser.add_argument("journal", metavar="JOURNAL", nargs="?", help="a journal to check too")


def _report(commands: Any) -> None:
    parser = _command(commands, "report", _lazily("report"), REPORT, "write a report as HTML")
    _journal(parser)
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("report.html"), help="default report.html"
    )
    _range(parser)


def _export(commands: Any) -> None:
    parser = _command(commands, "export", _lazily("export"), EXPORT, "write what is new to a lake")
    _journal(parser)
    parser.add_argument("lake", metavar="LAKE", help="the folder; made if it is not there")


def _replay(commands: Any) -> None:
    parser = _command(
        commands, "replay", _lazily("replay"), REPLAY, "fold history into a read model"
    )
    _journal(parser)
    parser.add_argument("target", metavar="TARGET", help="module:Class of the projection")
    parser.add_argument("--key", metavar="FIELD", help="the field that is the key")
    parser.add_argument("--out", metavar="FOLDER", help="write all rows there, as Parquet")
    parser.add_argument("--overwrite", action="store_true", help="replace what --out holds")
    parser.add_argument(
        "--limit", type=_count, default=20, metavar="ROWS", help="rows to print; default 20, 0: all"
    )
    parser.add_argument(
        "--skip-corrupt", action="store_true", help="leave out events that do not decode"
    )
    _range(parser)


def _stream(commands: Any) -> None:
    parser = _command(
        commands, "stream", _lazily("stream"), STREAM, "process new events in batches"
    )
    _journal(parser)
    parser.add_argument(
        "target", metavar="TARGET", nargs="?", help="module:function of the handler"
    )
    parser.add_argument("--to", metavar="FOLDER", help="instead of a handler: a table of messages")
    parser.add_argument(
        "--checkpoint", metavar="FOLDER", required=True, help="where the offset is stored"
    )
    parser.add_argument("--once", action="store_true", help="end with what is there now")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="a batch at most this often")
    parser.add_argument(
        "--max-rows", type=_count, metavar="ROWS", help="messages in a batch, at most"
    )
    parser.add_argument(
        "--from",
        dest="start",
        default="earliest",
        metavar="WHERE",
        help="where a new checkpoint begins: earliest, latest or an offset",
    )


def _lazily(name: str) -> Run:
    """A command that is imported when it runs: `--help` needs no Spark."""

    def run(options: argparse.Namespace) -> int:
        module = importlib.import_module("msgbus.pipeline.cli.commands")
        command: Run = getattr(module, name)
        return command(options)

    return run


# -- values ----------------------------------------------------------------------------------


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        message = f"{text!r} is not KEY=VALUE, such as spark.driver.memory=4g"
        raise argparse.ArgumentTypeError(message)
    return key, value


def _bound(text: str) -> int | datetime:
    try:
        return int(text) if text.isdigit() else datetime.fromisoformat(text)
    except ValueError:
        message = f"{text!r} is neither an offset nor a time such as 2026-01-31T12:00:00Z"
        raise argparse.ArgumentTypeError(message) from None


def _count(text: str) -> int:
    if not text.isdigit():
        message = f"{text!r} is not a whole number"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def load(target: str) -> Any:
    """Import `module:name`, from the working folder too, as `python -m` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    return import_string(target)
