"""What `make test` leaves to `make stress`, and which tests stay together on one worker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow

TIERS = """
import pytest

def test_plain(): ...

@pytest.mark.stress("spark")
def test_both(): ...

@pytest.mark.stress("spark", only=True)
def test_rare(): ...

@pytest.mark.parametrize(
    "number", [1, pytest.param(2, marks=pytest.mark.stress("spark", only=True))]
)
def test_some(number): ...
"""

MANY = """
import pytest

@pytest.mark.parametrize("number", range(9))
def test_one(number): ...
"""


def pytest_in(folder: Path, *options: str, **env: str) -> str:
    """What pytest prints of the tests in a folder, with the conftest of this repository."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = stress\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(folder), "-c", str(folder / "pytest.ini"), *options, str(folder)]
    settings = {**os.environ, "STRESS": "0", **env}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=settings, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_only_for_stress_is_left_out_otherwise(tmp_path: Path) -> None:
    (tmp_path / "test_tiers.py").write_text(TIERS)

    def chosen(**env: str) -> list[str]:
        return sorted(re.findall(r"::(\S+)", pytest_in(tmp_path, "--collect-only", "-q", **env)))

    assert chosen() == ["test_both", "test_plain", "test_some[1]"]
    assert chosen(STRESS="1") == [
        *("test_both", "test_plain", "test_rare", "test_some[1]", "test_some[2]")
    ]


def test_tests_of_one_group_run_on_one_worker_and_those_of_two_on_two(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "spark"
    folder.mkdir(parents=True)
    for name in ("cluster", "killed", "reading", "writing"):
        (folder / f"test_{name}.py").write_text(MANY)

    printed = pytest_in(tmp_path, "-n", "2", "--dist", "loadgroup", "-v")

    workers: defaultdict[str, set[str]] = defaultdict(set)
    for worker, name in re.findall(r"\[(gw\d)\].*test_(\w+)\.py::", printed):
        workers[name].add(worker)
    assert len(workers["reading"]) == 1
    assert workers["reading"] == workers["writing"]
    assert workers["cluster"] == workers["killed"] != workers["reading"]
