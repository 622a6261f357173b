"""`python -m benchmarks.soak`: the command line of a soak, and of each of its processes."""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

import anyio

from benchmarks.soak.board import MODES, Board
from benchmarks.soak.picture import draw
from benchmarks.soak.processes import handle, publish
from benchmarks.soak.runner import WORKERS, Soak, soak

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "soak.svg"


def role(words: list[str]) -> int:
    """Be one of the processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--process", type=int)
    parser.add_argument("--board", type=Path)
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--url")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--control", action="store_true")
    options = parser.parse_args(words)
    board = Board(options.board, options.capacity, WORKERS + 1)
    if options.process == 0:
        work = partial(publish, is_control=options.control)
        anyio.run(work, board, options.url, options.rate, options.limit)
    else:
        anyio.run(handle, board, options.url, options.process)
    return 0


def verdict(found: Soak) -> bool:
    """Print the outcome; tell whether nothing was lost and nothing has grown."""
    print(
        f"\n{found.acknowledged:,} messages acknowledged in {found.seconds / 60:.1f} minutes, "
        f"{len(found.kills)} kills"
    )
    for mode in MODES:
        print(f"  {mode:11} {found.lost[mode]:,} lost, {found.repeated[mode]:,} repeated")
    growth = {
        "memory": found.growth(lambda one: float(one.memory)),
        "file": found.growth(lambda one: float(one.file)),
        "lag": found.growth(lambda one: float(one.lag + 100)),
        "median latency": found.growth(lambda one: one.median),
    }
    for name, ratio in growth.items():
        print(f"  {name:14} last quarter / second quarter: {ratio:.2f}")
    return not any(found.lost.values()) and all(ratio < 1.5 for ratio in growth.values())


def main() -> int:
    """Run a soak."""
    if sys.argv[1:2] == ["--role"]:
        return role(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kill-every", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--rate", type=float, help="messages a second; half the highest by default")
    parser.add_argument("--picture", type=Path, help=f"draw it here, such as {PICTURE.name}")
    parser.add_argument("--save", type=Path, help="write all samples here, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
        found = soak(
            Path(folder),
            options.minutes * 60,
            rate=options.rate,
            kill_every=options.kill_every,
            tell=lambda line: print(line, flush=True),
        )
    if options.save:
        found.save(options.save)
    if options.picture:
        options.picture.write_text(draw(found), encoding="utf-8")
    return 0 if verdict(found) else 1


if __name__ == "__main__":
    sys.exit(main())
