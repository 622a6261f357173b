"""What it costs to make a message: the same fields in a plain frozen model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from pydantic import BaseModel, ConfigDict

from benchmarks.rows import Row
from benchmarks.subjects import Add
from benchmarks.timing import Effort, Measurement, steady, summarise

NUMBER: Final = 2_000


class PlainAdd(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    left: int
    right: int


def seconds_each(make: Callable[..., object]) -> float:
    began = time.perf_counter()
    for index in range(NUMBER):
        make(left=index, right=1)
    return (time.perf_counter() - began) / NUMBER


async def creation(effort: Effort) -> Measurement:
    with steady():
        for make in (PlainAdd, Add):
            seconds_each(make)
        pairs = [(seconds_each(PlainAdd), seconds_each(Add)) for _ in range(effort.repeats)]
    return summarise(pairs)


ROWS: Final = (
    Row(
        name="messages.creation",
        title="make a message of 2 fields",
        baseline="frozen pydantic model",
        measure=creation,
    ),
)
