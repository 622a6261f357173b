"""What `import msgbus` costs, in fresh interpreters, and what it must not bring along."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

from benchmarks.rows import Row
from benchmarks.timing import Effort, Measurement, summarise

OPTIONAL: Final = ("opentelemetry", "prometheus_client", "rich", "structlog", "trio")

PYDANTIC: Final = "import pydantic; M = type('M', (pydantic.BaseModel,), {})"
MSGBUS: Final = "import msgbus"

TIMED: Final = """
import time
began = time.perf_counter()
{statement}
print(time.perf_counter() - began)
"""

LOADED: Final = """
import sys
import msgbus
print(*[name for name in {names!r} if name in sys.modules])
"""


def output_of(program: str) -> str:
    # With its byte code kept, as for every user; else one side would be compiled each time.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, env=kept
    )
    return done.stdout.decode()


def seconds_for(statement: str) -> float:
    return float(output_of(TIMED.format(statement=statement)))


async def import_time(effort: Effort) -> Measurement:
    for statement in (PYDANTIC, MSGBUS):
        seconds_for(statement)  # writes the byte code and warms the disk's cache
    return summarise(
        [(seconds_for(PYDANTIC), seconds_for(MSGBUS)) for _ in range(effort.processes)]
    )


async def optional_packages(effort: Effort) -> Measurement:
    del effort
    found = len(output_of(LOADED.format(names=OPTIONAL)).split())
    return Measurement(value=found, low=found, high=found, repeats=1)


ROWS: Final = (
    Row(
        name="imports.time",
        title="import msgbus",
        baseline="import pydantic, one model",
        measure=import_time,
        budget=1.5,
    ),
    Row(
        name="imports.optional",
        title="optional packages it imports",
        baseline="",
        measure=optional_packages,
        budget=0,
        unit="",
    ),
)
