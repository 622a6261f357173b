"""What it costs that a message is stored as it was sent: little, for most classes.

The same codec encodes the same messages, once as it is and once with a writer that only writes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol, cast

from pydantic import BaseModel

from benchmarks.journal import make_folder
from benchmarks.rows import Row
from benchmarks.timing import Effort, Measurement, WorkNotDoneError, steady, summarise, timed
from msgbus import Event, MessageBus
from msgbus.journal import MessageCodec

NUMBER: Final = 1_000
PUBLISHED: Final = 2_000
NOON: Final = datetime(2026, 1, 1, tzinfo=UTC)


class Flat(Event):
    number: int
    place: str = "greenhouse"
    celsius: float = 21.5
    at: datetime = NOON
    tags: tuple[str, ...] = ("a", "b")
    text: str = "x" * 200


class Line(BaseModel):
    sku: str = "tea"
    quantity: int = 1
    price: float = 2.5


class Listed(Event):
    number: int
    place: str = "greenhouse"
    celsius: float = 21.5
    tags: list[str] = []  # noqa: RUF012 (pydantic copies it)
    text: str = "x" * 200


class Nested(Event):
    number: int
    lines: tuple[Line, ...] = (Line(), Line(), Line())
    text: str = "x" * 200


class Compared(Event):
    number: int
    place: str = "greenhouse"
    celsius: float = 21.5
    anything: Any = None
    text: str = "x" * 200


class Long(Event):
    number: int
    numbers: tuple[int, ...] = tuple(range(20_000))


class Write(Protocol):
    def __call__(self, message: Any, **options: Any) -> bytes: ...


class PlainWriter:
    """Writes, and checks nothing."""

    def __init__(self, message_type: type[Event]) -> None:
        self._to_json = cast("Write", message_type.__pydantic_serializer__.to_json)

    def write(self, message: Event, **_: object) -> bytes:
        return self._to_json(message, round_trip=True, by_alias=False)


def codecs(message_type: type[Event]) -> tuple[MessageCodec, MessageCodec]:
    plain, checking = MessageCodec([message_type]), MessageCodec([message_type])
    writers: dict[type[Event], Any] = vars(plain)["_writers"]
    writers[message_type] = PlainWriter(message_type)
    return plain, checking


def seconds_each(codec: MessageCodec, messages: Sequence[Event]) -> float:
    began = time.perf_counter()
    for message in messages:
        codec.encode(message, time=0.0)
    return (time.perf_counter() - began) / len(messages)


def encode(message_type: Callable[..., Event], number: int = NUMBER) -> Any:
    async def measure(effort: Effort) -> Measurement:
        messages = [message_type(number=index) for index in range(number)]
        plain, checking = codecs(type(messages[0]))
        pairs: list[tuple[float, float]] = []
        with steady():
            for codec in (plain, checking):
                seconds_each(codec, messages)
            for turn in range(effort.repeats):
                if turn % 2:
                    second = seconds_each(checking, messages)
                    first = seconds_each(plain, messages)
                else:
                    first = seconds_each(plain, messages)
                    second = seconds_each(checking, messages)
                pairs.append((first, second))
        return summarise(pairs)

    return measure


async def publish(effort: Effort) -> Measurement:
    """Many messages of a class that is compared, and as many of one that is not."""
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
        url = f"sqlite:///{make_folder(folder, 'bus') / 'journal.db'}"
        async with MessageBus(journal=url) as bus:

            async def run(events: Sequence[Event]) -> None:
                await bus.publish_many(events)

            def build(message_type: Callable[..., Event]) -> Callable[[int], list[Event]]:
                return lambda number: [message_type(number=index) for index in range(number)]

            repeats = max(3, effort.repeats // 4)
            with steady():
                for _ in range(repeats):
                    first = await timed(run, build(Flat), PUBLISHED)
                    second = await timed(run, build(Compared), PUBLISHED)
                    pairs.append((first / PUBLISHED, second / PUBLISHED))
            assert bus.journal is not None
            if await bus.journal.head() != 2 * repeats * PUBLISHED:
                message = "Not every event was published."
                raise WorkNotDoneError(message)
    return summarise(pairs)


BASELINE: Final = "the same without a check"

ROWS: Final = (
    Row(
        name="encoding.plain",
        title="encode, a class found safe",
        baseline=BASELINE,
        measure=encode(Flat),
        budget=1.3,
        aim=1.15,
    ),
    Row(
        name="encoding.long",
        title="encode, a safe class with 20,000 numbers",
        baseline=BASELINE,
        measure=encode(Long, 5),
        budget=1.15,
        aim=1.05,
    ),
    Row(
        name="encoding.listed",
        title="encode, a safe class with a list",
        baseline=BASELINE,
        measure=encode(Listed),
        budget=3.0,
    ),
    Row(
        name="encoding.nested",
        title="encode, a class with models, which is read back",
        baseline=BASELINE,
        measure=encode(Nested),
        budget=3.2,
    ),
    Row(
        name="encoding.compared",
        title="encode, a class with Any, which is compared",
        baseline=BASELINE,
        measure=encode(Compared),
        budget=4.0,
    ),
    Row(
        name="encoding.publish",
        title="publish_many, durable, a class with Any",
        baseline="one found safe",
        measure=publish,
        budget=1.4,
        heavy=True,
    ),
)
