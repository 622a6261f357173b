"""Which tests stay together on one worker of `pytest -n 2 --dist loadgroup`.

Tests with Spark share a JVM, whose start takes longer than most of them. There are two groups of
about equal weight, so that two cores have the same to do; xdist begins with the largest groups.

By file, because a scheduler knows the names of tests and nothing else. The mark `xdist_group`
would have to change them, which it cannot since pytest 9.2 (pytest-dev/pytest-xdist#1386).
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

from xdist.scheduler import (  # pyright: ignore[reportMissingTypeStubs]
    LoadScopeScheduling,
)

FIRST: Final = {"cli", "cluster", "guides", "killed", "report", "sealing"}
"""Of the tests in tests/spark: those that start processes of their own, and some more."""


def group_of(nodeid: str) -> str:
    """The name of a test's group: those of one name run on one worker, one after the other."""
    path = PurePosixPath(nodeid.partition("::")[0])
    if path.parent != PurePosixPath("tests/spark"):
        return nodeid
    return "spark-1" if path.stem.removeprefix("test_") in FIRST else "spark-2"


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each worker one group after the other."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
