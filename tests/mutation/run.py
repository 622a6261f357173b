"""Changes the code of resilience in many small ways; each change should make a test fail.

Run it by `make mutate`, with `ARGS="breaker stores"` for some modules only, and with
`ARGS="--most 100"` for a hundred changes of each, drawn by a fixed seed. It prints the share of
changes that were found, and those that were not. No file is changed: each change is tried in
a process of its own, which imports the changed module in place of the real one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any, Final, NoReturn

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
LETTERS: Final = (
    "test_letters_queue",
    "test_letters_replay",
    "test_letters_stores",
    "test_letters_files",
    "test_letters_gaps",
)
TESTS: Final = {
    "breaker": (
        "test_breaker",
        "test_breaker_calls",
        "test_breaker_half_open",
        "test_breaker_windows",
    ),
    "retry": ("test_retry",),
    "dead_letters": (*LETTERS, "test_dead_letters_on_the_bus"),
    "replay": LETTERS,
    "stores": LETTERS,
}
ENOUGH: Final = 0.9
WORKERS: Final = os.cpu_count() or 1

# One event loop and one store are enough here: what is changed does not know which it is.
OPTIONS: Final = (
    *("-q", "-x", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider"),
    *("-k", "not trio and not sqlite and not journal", "--timeout=20", "--timeout-method=thread"),
)
# Loaded once, before the processes part: what takes long to import, and nothing of msgbus.
HEAVY: Final = ("anyio", "pydantic", "sqlite3", "structlog", "trio")

# Changes that mean the same: `|` stands in annotations only, which are not run; states and
# `None` are equal only to themselves; `@final` is for type checkers.
SAME_OPERATORS: Final = re.compile(
    "core/(ReplaceBinaryOperator_BitOr_.*"
    "|ReplaceComparisonOperator_Is_Eq|ReplaceComparisonOperator_IsNot_NotEq)"
)
SAME_LINES: Final = ("@final",)


@dataclass(frozen=True)
class Change:
    """One way in which a module is changed."""

    operator: str
    row: int
    line: str
    source: str


class ChangedModule(SourceFileLoader):
    """Imports one module from a text instead of its file."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        super().__init__(name, str(path))
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return spec_from_file_location(name, self.path, loader=self) if name == self.name else None


def changes(path: Path) -> Iterator[Change]:
    """Every change of the module that is Python, and means something else."""
    mutating = importlib.import_module("cosmic_ray.mutating")
    plugins = importlib.import_module("cosmic_ray.plugins")
    tree = importlib.import_module("cosmic_ray.ast")
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    nodes = list(tree.ast_nodes(tree.get_ast(source)))
    for name in plugins.operator_names():
        kind = plugins.get_operator(name)
        if kind.arguments() or SAME_OPERATORS.match(name):
            continue
        places: list[tuple[tuple[int, int], tuple[int, int]]] = [
            place for node in nodes for place in kind().mutation_positions(node)
        ]
        for number, ((row, _), _) in enumerate(places):
            line = lines[row - 1].strip()
            changed = mutating.mutate_code(source, kind(), number)
            if line not in SAME_LINES and is_python(changed):
                yield Change(name.removeprefix("core/"), row, line, changed)


def is_python(source: str) -> bool:
    """Whether Python takes it without a warning; what it says itself needs no test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            compile(source, "changed", "exec", dont_inherit=True)
        except SyntaxError:
            return False
    return True


def start(module: str, path: Path, source: str) -> int:
    """Run the module's tests in a process of their own, on this source; its id."""
    return os.fork() or run_tests(module, path, source)


def run_tests(module: str, path: Path, source: str) -> NoReturn:
    code = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.meta_path.insert(0, ChangedModule(f"msgbus.resilience.{module}", path, source))
        files = [ROOT / "tests/unit/resilience" / f"{name}.py" for name in TESTS[module]]
        code = pytest.main([*OPTIONS, *map(str, files)])
    finally:
        os._exit(code)


def unnoticed(module: str, path: Path, tried: Sequence[Change]) -> list[Change]:
    """The changes that no test found."""
    running: dict[int, Change] = {}
    survivors: list[Change] = []

    def end_one() -> None:
        pid, status = os.wait()
        change = running.pop(pid)
        if os.waitstatus_to_exitcode(status) == 0:
            survivors.append(change)

    for change in tried:
        if len(running) == WORKERS:
            end_one()
        running[start(module, path, change.source)] = change
    while running:
        end_one()
    return sorted(survivors, key=lambda change: (change.row, change.operator))


def mutate(module: str, most: int | None) -> float:
    """Change one module in at most so many ways; the share of changes that a test found."""
    path = ROOT / "msgbus/resilience" / f"{module}.py"
    _, status = os.waitpid(start(module, path, path.read_text(encoding="utf-8")), 0)
    if status != 0:
        sys.exit(f"The tests of {module}.py fail as it is.")
    possible = list(changes(path))
    tried = possible if most is None else random.Random(1).sample(possible, most)
    survivors = unnoticed(module, path, tried)
    share = 1 - len(survivors) / len(tried)
    print(f"{module}.py: {len(tried)} of {len(possible)} changes, {share:.1%} found. Not found:")
    for change in survivors:
        print(f"  line {change.row}: {change.operator}: {change.line}", flush=True)
    return share


def main() -> int:
    os.chdir(ROOT)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path.insert(0, str(ROOT))
    for name in HEAVY:
        importlib.import_module(name)
    parser = argparse.ArgumentParser(description="Change modules; a test must see each change.")
    parser.add_argument("modules", nargs="*", default=list(TESTS), help="all unless given")
    parser.add_argument("--most", type=int, help="changes of a module, drawn by a fixed seed")
    options = parser.parse_args()
    shares = [mutate(module, options.most) for module in options.modules]
    return 0 if min(shares) >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
