"""The harness: two sides do the same work by turns, and only their ratio is believed.

Each repeat times both sides, one right after the other, in alternating order, and gives one
ratio; the result is the median of those ratios. What slows the whole machine down slows both
sides of a repeat, so it cancels out; what hits one side only makes an outlier, which a median
ignores. Messages are built, and garbage is collected, while no clock runs; during a timing the
collector is off on both sides.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast, final

Handler: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]
Build: TypeAlias = Callable[[int], Sequence[Any]]
Run: TypeAlias = Callable[[Sequence[Any]], Awaitable[None]]
Open: TypeAlias = Callable[[Handler], AbstractAsyncContextManager[Run]]

PROOF_SIZE: Final = 50
FEWEST: Final = 200
"""Messages per timing: with fewer, what a timing costs once would count."""

MOST: Final = 5_000
"""Messages per timing: half of what a queue holds by default, so that nothing waits."""


@final
@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to measure."""

    repeats: int
    """Ratios per row."""

    seconds: float
    """How long one timing of the slower side should take."""

    processes: int
    """Ratios in rows that start an interpreter for each timing."""

    messages: int = 20_000
    """Messages in the longest journal."""


FULL: Final = Effort(repeats=61, seconds=0.004, processes=15, messages=1_000_000)
QUICK: Final = Effort(repeats=5, seconds=0.0005, processes=3)


@final
@dataclass(frozen=True, slots=True)
class Measurement:
    """What a row found. `value` is a ratio unless the row says otherwise."""

    value: float
    low: float
    """A quarter of the repeats were below."""

    high: float
    """A quarter of the repeats were above."""

    repeats: int
    baseline: float | None = None
    """Seconds per message of the plain side, median."""

    candidate: float | None = None
    """Seconds per message of the measured side, median."""


@final
@dataclass(frozen=True, slots=True)
class Side:
    """One way to do the work."""

    open: Open
    """Sets everything up around the given handler, and gives the function to time."""

    build: Build
    """Makes so many fresh messages."""

    handler: Handler
    """What handles each message."""

    calls: int = 1
    """How often each message is handled."""


class WorkNotDoneError(AssertionError):
    """A side did not handle every message: its timing would mean nothing."""


async def compare(
    baseline: Side, candidate: Side, effort: Effort, *, messages: int | None = None
) -> Measurement:
    """The candidate's time per message, in times of the baseline's.

    With `messages`, each timing takes so many of them, however long that is.
    """
    for side in (baseline, candidate):
        await prove(side)
    async with (
        baseline.open(baseline.handler) as run_plain,
        candidate.open(candidate.handler) as run_measured,
    ):
        plain = functools.partial(timed, run_plain, baseline.build)
        measured = functools.partial(timed, run_measured, candidate.build)
        with steady():
            number = messages or await _calibrate((plain, measured), effort.seconds)
            pairs: list[tuple[float, float]] = []
            for turn in range(effort.repeats):
                if turn % 2:
                    second = await measured(number)
                    first = await plain(number)
                else:
                    first = await plain(number)
                    second = await measured(number)
                pairs.append((first / number, second / number))
    return summarise(pairs)


async def prove(side: Side) -> None:
    """Run a few messages with a handler that counts.

    Raises:
        WorkNotDoneError: Not every message was handled as often as the side says.
    """
    seen = 0

    @functools.wraps(side.handler)
    async def counting(*arguments: Any, **injected: Any) -> Any:
        nonlocal seen
        for argument in arguments:
            if isinstance(argument, list):
                seen += len(cast("list[object]", argument))
                break
        else:
            seen += 1
        return await side.handler(*arguments, **injected)

    async with side.open(counting) as run:
        seen = 0  # opening it may have sent some, to warm it up
        await run(side.build(PROOF_SIZE))
    if seen != PROOF_SIZE * side.calls:
        message = f"{PROOF_SIZE} messages were handled {seen} times, not {PROOF_SIZE * side.calls}."
        raise WorkNotDoneError(message)


async def timed(run: Run, build: Build, number: int) -> float:
    """Seconds for `number` fresh messages."""
    messages = build(number)
    gc.collect()
    began = time.perf_counter()
    await run(messages)
    return time.perf_counter() - began


async def _calibrate(sides: Sequence[Callable[[int], Awaitable[float]]], seconds: float) -> int:
    """How many messages make the slower side take about `seconds`. Also the warm-up."""
    number = FEWEST
    for _ in range(3):
        slowest = max([await side(number) for side in sides])
        number = max(FEWEST, min(MOST, round(number * seconds / slowest)))
    return number


@contextmanager
def steady() -> Generator[None]:
    """Keep the collector out of timings, and what is set up already out of its sight."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def summarise(pairs: Sequence[tuple[float, float]]) -> Measurement:
    """The median of the ratios, with the middle half of them."""
    ratios = [second / first for first, second in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Measurement(
        value=middle,
        low=low,
        high=high,
        repeats=len(ratios),
        baseline=statistics.median([first for first, _ in pairs]),
        candidate=statistics.median([second for _, second in pairs]),
    )


def as_speed(found: Measurement) -> Measurement:
    """The same, as how many times as fast the candidate is."""
    return dataclasses.replace(found, value=1 / found.value, low=1 / found.high, high=1 / found.low)
