"""Messages and deliveries as plain dicts, and as frames of the columns that a journal has."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from pyspark.sql import DataFrame, SparkSession, functions as sql
from pyspark.sql.types import StructType, TimestampType

from msgbus.pipeline.source.tables import DELIVERIES, MESSAGES

Row: TypeAlias = dict[str, Any]

START: Final = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def at(seconds: float) -> datetime:
    """A moment after the start."""
    return START + timedelta(microseconds=round(seconds * 1e6))


def message(offset: int, name: str, seconds: float, cause: Row | None = None, **more: Any) -> Row:
    """A message published so many seconds after the start."""
    message_id = f"m{offset}"
    return {
        "offset": offset,
        "message_id": message_id,
        "name": name,
        "version": 1,
        "topic": f"shop.{name}",
        "key": None,
        "kind": "event",
        "time": at(seconds),
        "correlation_id": message_id if cause is None else cause["correlation_id"],
        "causation_id": None if cause is None else cause["message_id"],
        "root_id": message_id if cause is None else cause["root_id"],
        "depth": 0 if cause is None else cause["depth"] + 1,
        "session_id": None if cause is None else cause["session_id"],
        "headers": {},
        "payload": "{}",
        "_corrupt": None,
        **more,
    }


def delivery(
    id: int,  # noqa: A002
    of: Row,
    handler: str,
    outcome: str = "ok",
    *,
    attempt: int = 1,
    wait: float = 0.0,
    run: float = 0.0,
    error: str | None = None,
) -> Row:
    """A try that ended `wait + run` seconds after the message was published."""
    return {
        "id": id,
        "offset": of["offset"],
        "message_id": of["message_id"],
        "handler": handler,
        "attempt": attempt,
        "outcome": outcome,
        "wait": wait,
        "run": run,
        "time": of["time"] + timedelta(microseconds=round((wait + run) * 1e6)),
        "error": error,
        "_corrupt": None,
    }


def messages_frame(spark: SparkSession, rows: Sequence[Row]) -> DataFrame:
    """A frame like `pipe.messages()`."""
    return frame_of(spark, _tuples(rows, MESSAGES.columns), MESSAGES.schema)


def deliveries_frame(spark: SparkSession, rows: Sequence[Row]) -> DataFrame:
    """A frame like `pipe.deliveries()`."""
    return frame_of(spark, _tuples(rows, DELIVERIES.columns), DELIVERIES.schema)


def frame_of(
    spark: SparkSession, rows: Sequence[tuple[Any, ...]], schema: StructType | str
) -> DataFrame:
    """A frame of these rows."""
    untyped: Any = spark  # Spark's own types of createDataFrame are half known
    frame: DataFrame = untyped.createDataFrame(rows, schema)
    return frame


def collected(frame: DataFrame, *order: str) -> list[Row]:
    """The rows as dicts, by `order` if given; times as seconds after the start.

    Spark gives timestamps to Python in the zone of the machine and without saying so.
    """
    for field in frame.schema.fields:
        if isinstance(field.dataType, TimestampType):
            frame = frame.withColumn(field.name, sql.unix_micros(sql.col(field.name)))
    rows = [row.asDict(recursive=True) for row in frame.collect()]
    times = [field.name for field in frame.schema.fields if field.name in TIMES]
    for row in rows:
        for name in times:
            if row[name] is not None:
                row[name] = row[name] / 1e6 - START.timestamp()
    return sorted(rows, key=lambda row: [str(row[name]) for name in order]) if order else rows


TIMES: Final = {"minute", "time", "first", "last", "started", "ended"}


def _tuples(rows: Iterable[Row], columns: Mapping[str, object]) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in columns) for row in rows]


# -- random ------------------------------------------------------------------------------------

HANDLERS: Final = {
    "PlaceOrder": ("place_order",),
    "OrderPlaced": ("reserve_stock", "send_receipt"),
    "StockReserved": ("charge_card",),
    "CardCharged": ("ship_order", "update_books"),
    "OrderShipped": (),
}
_NEXT: Final = {
    "PlaceOrder": ("OrderPlaced",),
    "OrderPlaced": ("StockReserved", "CardCharged"),
    "StockReserved": ("CardCharged",),
    "CardCharged": ("OrderShipped", "StockReserved"),
    "OrderShipped": (),
}
_ERRORS: Final = (
    "ConnectionError: no route to 10.0.0.{}",
    "KeyError: 'sku-{}'",
    "TimeoutError",
    None,
)


def random_journal(seed: int, size: int, seconds: float = 600.0) -> tuple[list[Row], list[Row]]:
    """Chains of messages, some of them in sessions, with attempts, failures and gaps."""
    dice = random.Random(seed)
    messages: list[Row] = []
    offset = 0
    while len(messages) < size:
        offset += dice.choice((1, 1, 1, 2))
        cause = dice.choice(messages[-8:]) if messages and dice.random() < 0.7 else None
        if cause is not None and _NEXT[cause["name"]] and cause["depth"] < 12:
            name = dice.choice(_NEXT[cause["name"]])
        else:
            name, cause = "PlaceOrder", None
        session = cause["session_id"] if cause else dice.choice((None, f"s{dice.randrange(30)}"))
        messages.append(
            message(
                offset,
                name,
                seconds * len(messages) / size + dice.random(),
                cause,
                session_id=session,
                kind="command" if name == "PlaceOrder" else "event",
            )
        )
    deliveries: list[Row] = []
    for one in messages:
        for handler in HANDLERS[one["name"]]:
            if dice.random() < 0.95:
                _try(dice, one, handler, deliveries)
    deliveries.sort(key=lambda row: (row["time"], row["message_id"], -row["run"]))
    for number, row in enumerate(deliveries, 1):
        row["id"] = number
    return messages, deliveries


def _try(dice: random.Random, one: Row, handler: str, into: list[Row]) -> None:
    wait = 0.0
    for attempt in range(1, 4):
        wait += dice.expovariate(5)
        run = dice.lognormvariate(-4, 1.5)
        roll = dice.random()
        outcome, error = "ok", None
        if roll < 0.35:
            outcome = dice.choice(("failed", "failed", "timed_out", "cancelled", "refused"))
            error = dice.choice(_ERRORS)
        is_last = outcome in {"failed", "timed_out"} and attempt == 3
        # What was decided is the last try's outcome, or a row of its own.
        is_own_row = is_last and dice.random() < 0.5
        if is_last and not is_own_row:
            outcome = "dead_lettered"
        text = None if error is None else error.format(dice.randrange(99))
        into.append(
            delivery(0, one, handler, outcome, attempt=attempt, wait=wait, run=run, error=text)
        )
        if is_own_row:
            into.append(delivery(0, one, handler, "dead_lettered", attempt=3, wait=wait + run))
            return
        if outcome not in {"failed", "timed_out"}:
            return
        wait += run
