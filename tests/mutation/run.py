"""Changes the code of resilience in many small ways; each change should make a test fail.

Run it by `make mutate`. It works on a copy, takes half an hour, and prints the share of
changes that were found, and those that were not.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
TESTS: Final = {
    "breaker": (
        "test_breaker",
        "test_breaker_calls",
        "test_breaker_half_open",
        "test_breaker_windows",
    ),
    "retry": ("test_retry",),
}
ENOUGH: Final = 0.9
PLUGINS: Final = "-p pytest_asyncio.plugin -p pytest_timeout"

# Annotations are never run (`A | B` there is no sum), so to change them changes nothing.
# Nor does `==` for `is`, between states and `None`.
CONFIG: Final = """
[cosmic-ray]
module-path = "msgbus/resilience/{module}.py"
timeout = 30.0
excluded-modules = []
test-command = "{python} -m pytest -q -x {plugins} -k 'not trio' {tests}"
[cosmic-ray.distributor]
name = "local"
[cosmic-ray.filters.operators-filter]
exclude-operators = [
    "core/ReplaceBinaryOperator_BitOr_.*",
    "core/ReplaceComparisonOperator_Is_Eq",
    "core/ReplaceComparisonOperator_IsNot_NotEq",
]
"""

RESULTS: Final = """
select test_outcome, operator_name, start_pos_row from work_results
join mutation_specs on mutation_specs.job_id = work_results.job_id
where worker_outcome = 'NORMAL'
"""


def mutate(module: str, folder: Path) -> float:
    """Change one module; the share of changes that a test found."""
    tests = " ".join(f"tests/unit/resilience/{name}.py" for name in TESTS[module])
    config = CONFIG.format(module=module, python=sys.executable, plugins=PLUGINS, tests=tests)
    (folder / "config.toml").write_text(config, encoding="utf-8")
    session = f"{module}.sqlite"
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    tools = Path(sys.executable).parent
    for command in (
        ["cosmic-ray", "init", "config.toml", session],
        ["cr-filter-operators", session, "config.toml"],
        ["cosmic-ray", "exec", "config.toml", session],
    ):
        arguments = [str(tools / command[0]), *command[1:]]
        subprocess.run(arguments, cwd=folder, env=environment, check=True)
    with sqlite3.connect(folder / session) as database:
        results = database.execute(RESULTS).fetchall()
    survivors = [(row, name) for outcome, name, row in results if outcome == "SURVIVED"]
    share = 1 - len(survivors) / len(results)
    print(f"{module}.py: {len(results)} changes, {share:.1%} found by a test")
    for row, name in sorted(survivors):
        print(f"  line {row}: {name.removeprefix('core/')}")
    return share


def main() -> int:
    modules = sys.argv[1:] or list(TESTS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("msgbus", "tests"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copy(ROOT / "pyproject.toml", folder)
        shares = [mutate(module, folder) for module in modules]
    return 0 if min(shares) >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
