"""A journal with rows of every kind in every table, and every answer it gives."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from msgbus.errors import MsgBusError
from msgbus.journal import SqliteJournal
from msgbus.journal.letters import LetterSelection
from msgbus.journal.operations import Append, Note, Pass, Put, Reply, Save
from msgbus.journal.records import (
    DELAYED,
    DeliveryRecord,
    Instance,
    Kind,
    Member,
    Order,
    Outcome,
    Pending,
    Record,
    Selection,
    State,
)
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    LETTER,
    SHARED,
    TIME,
    append,
    fill,
    join,
    make_command,
    make_record,
    make_row,
    take,
)

KEYED: Final = Selection(order=Order.KEY, partitions=4, text="keyed")
QUEUE: Final = "commands:shop.Pack"
NAMES: Final = ("orders", "ship", "audit", QUEUE, DELAYED)
LOGGED: Final = 60
TRIMMED: Final = 12


def opened(path: Path) -> SqliteJournal:
    """The journal, with nothing beside it."""
    return SqliteJournal(path, reserve=0, lock_timeout=0.5)


def records() -> list[Record]:
    """Messages of many shapes; some need pages of their own."""
    chance = random.Random(0)
    return [
        make_record(
            number,
            message_id=f"m{number:02}",
            name=f"shop.Event{number % 3}",
            topic=f"shop.topic{number % 2}",
            key=f"k{number % 5}" if number % 2 else None,
            kind=Kind.COMMAND if number % 9 == 8 else Kind.EVENT,
            session_id="s" if number % 3 else None,
            correlation_id="m20" if number in (21, 22) else f"m{number:02}",
            causation_id=f"m{number - 1:02}" if number in (21, 22) else None,
            headers={"tenant": "größe"} if number % 4 else {},
            payload=chance.randbytes(chance.choice([20, 300, 6_000])),
        )
        for number in range(LOGGED)
    ]


async def fill_everything(path: Path) -> None:
    """Make a journal in which all tables have rows, and all states occur."""
    async with opened(path) as journal:
        await fill(journal, TRIMMED)
        await journal.trim(before=TRIMMED + 1)
        await append(journal, *records())
        head = TRIMMED + LOGGED
        member = await join(journal, orders="", ship="keyed")
        await join(journal, audit="")
        await _subscribe(journal, member, head)
        await journal.commit([Put(*one) for one in _rows(member)], member)
        await journal.commit(_beside())
        await journal.claim(member, "audit", 4, TIME, selection=SHARED)


async def _subscribe(journal: SqliteJournal, member: Member, head: int) -> None:
    orders = await take(journal, member, "orders", EVENTS)
    await journal.commit([Pass(orders, 30, head)], member)
    await journal.open("ship", KEYED, 0)
    for partition in range(3):
        cursor = await journal.acquire(member, "ship", partition, KEYED)
        assert cursor is not None
        await journal.commit([Pass(cursor, 20 + partition, head)], member)
    await journal.open("audit", SHARED, TRIMMED)


def _rows(member: Member) -> list[tuple[Pending, Any]]:
    body = make_record(7, message_id="aside", key="k")
    return [
        (make_row("orders", 20, State.DEAD, key="", error="no stock"), LETTER),
        (make_row("orders", 21, State.PARKED, key=""), None),
        (make_row("orders", 22, State.PARKED, key=""), None),
        (make_row("orders", 23, due=TIME + 5, attempt=2, alone=True), None),
        (make_row("orders", 24, State.CLAIMED, owner=member.id), None),
        (make_row("orders", 32, State.DONE), None),
        (make_row("orders", 33, State.KEPT), None),
        (make_row("orders", 34, State.DAMAGED, error="damaged"), None),
        (make_row("ship", 19, key="k1", partition=1, due=TIME), None),
        (make_row("ship", 21, State.PARKED, key="k1", partition=1), None),
        (make_row("ship", 22, State.DEAD, body=body, unique="u"), LETTER._replace(note="seen")),
    ]


def _beside() -> list[Any]:
    deliveries = [
        DeliveryRecord(
            f"m{number:02}",
            "ship" if number % 2 else "orders",
            1 + number % 3,
            tuple(Outcome)[number % len(Outcome)],
            number / 7,
            number / 11,
            TIME + number * 7,
            None if number % 3 else "E: no 'x'",
            None if number % 5 == 0 else TRIMMED + 1 + number,
        )
        for number in range(30)
    ]
    return [
        *map(Note, deliveries),
        Append(make_command(60, message_id="c1"), queue=QUEUE, unique="u"),
        Append(make_command(61, message_id="c2"), queue=QUEUE, due=TIME + 9),
        Append(make_record(62, message_id="d1"), queue=DELAYED, due=TIME),
        Append(make_record(63, message_id="d2"), queue=DELAYED, due=TIME + 50),
        *(Reply(f"m{n}", TIME + n, b"%d" % n, None if n % 2 else "error") for n in range(20, 30)),
        *(Save(Instance("manager", f"k{n}", b"{}" * n, TIME + n, 1)) for n in range(4)),
    ]


Answers: TypeAlias = dict[str, Any]

Question: TypeAlias = Callable[[], Awaitable[Any]]


def _general(journal: SqliteJournal) -> dict[str, Question]:
    mentioned = [f"m{number}" for number in range(20, 30)]
    return {
        "head": journal.head,
        "first": journal.first,
        "cursors": journal.cursors,
        "members": journal.members,
        "count": journal.count,
        "groups": journal.letter_groups,
        "find": partial(journal.find, None, tuple(State), limit=1_000),
        "letters": partial(journal.find_letters, LetterSelection(), limit=1_000),
        "totals": partial(journal.total_letters, LetterSelection()),
        "counts": partial(journal.delivery_counts, 0, TIME * 2),
        "flow": partial(journal.flow, "m20"),
        "instances": partial(journal.due_instances, TIME * 2),
        "results": partial(journal.results, mentioned),
        "log": partial(_log, journal, Selection()),
        "log of commands": partial(_log, journal, Selection(kind=Kind.COMMAND)),
        "log by name": partial(_log, journal, Selection(names={"shop.Event1"})),
    }


def _questions(journal: SqliteJournal) -> dict[str, Question]:
    """All that can be asked."""
    found = _general(journal)
    wanted: list[dict[str, Any]] = [
        {},
        {"name": "shop.Event1"},
        {"topic": "shop.topic1"},
        {"key": "k1"},
        {"session_id": "s"},
        {"kind": Kind.COMMAND},
        {"since": TIME + 10, "until": TIME + 40},
        {"newest_first": True},
    ]
    for terms in wanted:
        found[f"messages {terms}"] = partial(journal.find_messages, **terms, limit=1_000)
    for name in NAMES:
        found[f"cursors of {name}"] = partial(journal.cursors, name)
        found[f"count of {name}"] = partial(journal.count, name)
        found[f"next of {name}"] = partial(journal.next_due, name)
        found[f"keys of {name}"] = partial(_keys, journal, name)
        found[f"dead of {name}"] = partial(journal.find, name, [State.DEAD])
    for name, offset in (("orders", 20), ("ship", 22)):
        found[f"letter of {name}"] = partial(journal.letter, make_row(name, offset))
        found[f"row of {name}"] = partial(journal.row, name, offset)
    for key in (f"m{number:02}" for number in range(0, LOGGED, 7)):
        found[f"message {key}"] = partial(journal.message, key)
        found[f"deliveries {key}"] = partial(journal.deliveries, key)
        found[f"result {key}"] = partial(journal.result, key)
    for number in range(4):
        found[f"instance {number}"] = partial(journal.instance, "manager", f"k{number}")
    for seconds in (0, 15, 55, 500):
        found[f"offset at {seconds}"] = partial(journal.offset_at, TIME + seconds)
    return found


async def _log(journal: SqliteJournal, selection: Selection) -> list[Record | int]:
    found: list[Record | int] = []
    after, head = 0, await journal.head()
    while after < head:
        scan = await journal.read(after, 7, selection)
        found += scan.records
        after = scan.upto
    return found


async def _keys(journal: SqliteJournal, name: str) -> Any:
    partitions = range(4)
    keys = [await journal.blocked_keys(name, partition) for partition in partitions]
    return keys, [await journal.key_rows(name, partition, "k1") for partition in partitions]


async def answers(journal: SqliteJournal) -> Answers:
    """Everything that a journal answers; `None` for a question that ends in an error."""
    found: Answers = {}
    for what, ask in _questions(journal).items():
        try:
            found[what] = await ask()
        except MsgBusError:
            found[what] = None
    return found
