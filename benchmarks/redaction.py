"""The cost of redaction for errors without secrets: nearly all of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from benchmarks.rows import Row
from benchmarks.timing import Effort, Measurement, steady, summarise
from msgbus.telemetry.redaction import redact, warm_up

NUMBER: Final = 500
TEXTS: Final = (
    "author 42 not found",
    "invalid literal for int() with base 10: 'abc'",
    "Connection to db.example:5432 failed: timeout after 30.0 s, attempt 2 of 5",
    "message 0199a3c2-7c1e-7d4b-9a55-0b8f6c3d2e1f was not handled by 'update_stock'",
    "503 Server Error for url: https://api.example/v1/orders?page=2&per_page=50",
    "password must be at least 8 characters",
)
FORMATTER: Final = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")


def write(text: str) -> str:
    """Format a log record, as the standard library does for each line."""
    return FORMATTER.format(logging.LogRecord("shop", logging.ERROR, "", 0, text, (), None))


def seconds_each(make: Callable[[str], object]) -> float:
    began = time.perf_counter()
    for _ in range(NUMBER):
        for text in TEXTS:
            make(text)
    return (time.perf_counter() - began) / NUMBER / len(TEXTS)


async def innocent(effort: Effort) -> Measurement:
    warm_up()
    with steady():
        for make in (write, redact):
            seconds_each(make)
        pairs = [(seconds_each(write), seconds_each(redact)) for _ in range(effort.repeats)]
    return summarise(pairs)


ROWS: Final = (
    Row(
        name="redaction.innocent",
        title="redact an error without secrets",
        baseline="format a log record",
        measure=innocent,
        budget=3.0,
        aim=1.5,
    ),
)
