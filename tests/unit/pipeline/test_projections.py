"""Projections: which events they take, which key and row they have, and the plain fold."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from msgbus import Command, ConfigurationError, Event
from msgbus.errors import JournalCorruptError, ProjectionError, StoredMessageError
from msgbus.journal import MemoryJournal, MessageCodec, Record, SqliteJournal, State, upcasts
from msgbus.journal.operations import Put
from msgbus.pipeline import Projection, fold
from msgbus.pipeline.projections import fold_records, plan
from msgbus.testing.conformance.journal.kit import LETTER, TIME, append, make_row


class Placed(Event, name="fold.Placed", version=2, key="order"):
    order: str
    customer: str
    amount: int = 0


class Rushed(Placed, name="fold.Rushed"):
    pass


class Cancelled(Event, name="fold.Cancelled"):
    order: str
    customer: str | None = None


class Other(Event, name="fold.Other"):
    order: str


@upcasts(Placed, from_version=1)
def _amount_in_cents(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "amount": fields["amount"] * 100}


class Order(BaseModel):
    order: str
    amount: int = 0
    steps: tuple[str, ...] = ()


class Orders(Projection[Order, Placed | Cancelled]):
    key: Any = "order"

    def initial(self, key: str) -> Order:
        return Order(order=key)

    def apply(self, state: Order, event: Placed | Cancelled) -> Order:
        amount = event.amount if isinstance(event, Placed) else 0
        steps = (*state.steps, type(event).__name__)
        return state.model_copy(update={"amount": amount, "steps": steps})


class Customer(BaseModel):
    customer: str
    orders: int


class Customers(Projection[set[str], Placed | Cancelled]):
    """With a state that is no row, a method for the key, and keys without a row."""

    row = Customer

    def key(self, event: Placed | Cancelled) -> str | None:
        return event.customer

    def initial(self, key: str) -> set[str]:
        return set()

    def apply(self, state: set[str], event: Placed | Cancelled) -> set[str]:
        if isinstance(event, Placed):
            state.add(event.order)
        else:
            state.discard(event.order)
        return state

    def result(self, key: str, state: set[str]) -> Customer | None:
        return Customer(customer=key, orders=len(state)) if state else None


def records(events: Sequence[Event]) -> list[Record]:
    codec = MessageCodec()
    return [
        codec.encode(event, time=TIME + place)._replace(offset=place)
        for place, event in enumerate(events, 1)
    ]


def history() -> list[Record]:
    return records(
        [
            Placed(order="a", customer="Ann", amount=5),
            Other(order="a"),
            Rushed(order="b", customer="Bo", amount=7),
            Cancelled(order="a", customer="Ann"),
            Placed(order="c", customer="Bo", amount=1),
            Placed(order="a", customer="Ann", amount=9),
            Cancelled(order="c"),
        ]
    )


async def journal_with(written: Sequence[Record]) -> MemoryJournal:
    journal = MemoryJournal()
    await append(journal, *written)
    return journal


# -- the fold --------------------------------------------------------------------------------


async def test_a_fold_applies_the_events_of_each_key_in_order() -> None:
    async with await journal_with(history()) as journal:
        rows = await fold(journal, Orders)

    assert rows == [
        Order(order="a", amount=9, steps=("Placed", "Cancelled", "Placed")),
        Order(order="b", amount=7, steps=("Rushed",)),
        Order(order="c", amount=0, steps=("Placed", "Cancelled")),
    ]


async def test_a_key_may_be_a_method_a_function_or_what_messages_are_kept_under() -> None:
    async with await journal_with(history()) as journal:
        by_method = await fold(journal, Customers)
        by_function = await fold(journal, Orders(), key=lambda event: f"#{event.order}")
        by_field = await fold(journal, Orders, key="customer")

    assert by_method == [Customer(customer="Ann", orders=1), Customer(customer="Bo", orders=2)]
    assert [row.order for row in by_function] == ["#a", "#b", "#c"]
    assert [row.order for row in by_field] == ["Ann", "Bo"]


async def test_events_without_a_key_are_left_out() -> None:
    class Kept(Orders):
        key: Any = None

    async with await journal_with(history()) as journal:
        rows = await fold(journal, Kept)

    # Cancelled has no key= of its own.
    assert [(row.order, row.steps) for row in rows] == [
        ("a", ("Placed", "Placed")),
        ("b", ("Rushed",)),
        ("c", ("Placed",)),
    ]


async def test_bounds_are_offsets_or_times() -> None:
    moment = datetime.fromtimestamp(TIME, UTC)
    async with await journal_with(history()) as journal:
        by_offset = await fold(journal, Orders, since=4, until=6)
        by_time = await fold(
            journal,
            Orders,
            since=(moment + timedelta(seconds=4)).replace(tzinfo=None),
            until=moment + timedelta(seconds=6),
        )

    assert [(row.order, row.steps) for row in by_offset] == [
        ("a", ("Cancelled",)),
        ("c", ("Placed",)),
    ]
    assert by_time == by_offset


async def test_a_message_that_was_appended_twice_is_folded_once() -> None:
    written = history()
    async with await journal_with([*written, *written[:4]]) as journal:
        assert await fold(journal, Orders) == fold_records(plan(Orders), take(written))


def take(written: Sequence[Record]) -> list[Record]:
    return [record for record in written if record.name != "fold.Other"]


async def test_commands_are_folded_in_order_with_events() -> None:
    class Cancel(Command[None], name="fold.Cancel"):
        order: str

    class Steps(Projection[Order, Placed | Cancel]):
        key: Any = "order"

        def initial(self, key: str) -> Order:
            return Order(order=key)

        def apply(self, state: Order, event: Placed | Cancel) -> Order:
            return Order(order=state.order, steps=(*state.steps, type(event).__name__))

    def placed() -> Placed:
        return Placed(order="a", customer="Ann")

    messages = [placed(), Cancel(order="a"), *(placed() for _ in range(2500)), Cancel(order="a")]
    codec = MessageCodec()
    journal = await journal_with([codec.encode(one, time=TIME) for one in messages])

    (row,) = await fold(journal, Steps)
    (part,) = await fold(journal, Steps, since=2, until=5)

    assert row.steps == tuple(type(one).__name__ for one in messages)
    assert part.steps == ("Cancel", "Placed", "Placed")


async def test_a_damaged_record_fails_the_fold_unless_it_may_be_skipped(tmp_path: Path) -> None:
    async with SqliteJournal(tmp_path / "shop.db", reserve=0) as journal:
        await append(journal, *history())
        with closing(sqlite3.connect(tmp_path / "shop.db")) as connection, connection:
            connection.execute("UPDATE msgbus_messages SET payload = x'00' WHERE offset = 1")

        with pytest.raises(JournalCorruptError, match="Message 1 of the journal is damaged"):
            await fold(journal, Orders)
        rows = await fold(journal, Orders, skip_corrupt=True)

    assert [row.steps for row in rows if row.order == "a"] == [("Cancelled", "Placed")]


async def test_a_message_that_only_a_dead_letter_keeps_is_not_folded(tmp_path: Path) -> None:
    async with SqliteJournal(tmp_path / "shop.db", reserve=0) as journal:
        await append(journal, *history())
        await journal.commit([Put(make_row("orders", 1, State.DEAD), LETTER)])
        await journal.trim(before=3)

        rows = await fold(journal, Orders)

    assert [row.steps for row in rows if row.order == "a"] == [("Cancelled", "Placed")]


async def test_old_versions_are_upcast() -> None:
    (old,) = records([Placed(order="a", customer="Ann", amount=5)])
    async with await journal_with([old._replace(version=1)]) as journal:
        assert await fold(journal, Orders) == [Order(order="a", amount=500, steps=("Placed",))]


def test_upcasters_travel_with_the_plan() -> None:
    travelled = plan(Orders).upcasters

    assert [list(functions) for functions in travelled.values()] == [[1]]


async def test_a_damaged_event_fails_the_fold_unless_it_may_be_skipped() -> None:
    written = history()
    written[0] = written[0]._replace(payload=b'{"order":')
    async with await journal_with(written) as journal:
        with pytest.raises(StoredMessageError) as raised:
            await fold(journal, Orders)
        rows = await fold(journal, Orders, skip_corrupt=True)

    assert "At offset 1" in raised.value.__notes__[-1]
    assert "skip_corrupt" in raised.value.__notes__[-1]
    assert rows[0].steps == ("Cancelled", "Placed")


# -- what is wrong ---------------------------------------------------------------------------


class Bare(Projection[Any, Any]):
    def initial(self, key: str) -> Any:
        return 0

    def apply(self, state: Any, event: Any) -> Any:
        return state


class Rowless(Projection[int, Placed]):
    def initial(self, key: str) -> int:
        return 0

    def apply(self, state: int, event: Placed) -> int:
        return state + 1


class Forgetful(Orders):
    def apply(self, state: Order, event: Placed | Cancelled) -> Any:
        super().apply(state, event)


class Wrong(Orders):
    def result(self, key: str, state: Order) -> BaseModel:
        return Customer(customer=key, orders=1)


class Failing(Orders):
    def apply(self, state: Order, event: Placed | Cancelled) -> Order:
        raise KeyError(event.order)


def test_a_projection_without_events_is_refused() -> None:
    with pytest.raises(ProjectionError, match="The events of Bare are not known"):
        plan(Bare)


def test_a_projection_without_a_row_is_refused() -> None:
    with pytest.raises(ProjectionError, match="The rows of Rowless have no model"):
        plan(Rowless)


def test_a_key_that_not_all_events_have_is_refused() -> None:
    with pytest.raises(ProjectionError, match="'amount', which Cancelled does not have"):
        plan(Orders, key="amount")


def test_two_events_of_one_name_are_refused_before_anything_runs() -> None:
    class Twin(Event, name="fold.Other"):
        pass

    class Both(Orders):
        events = (Other, Twin)
        key: Any = str

    with pytest.raises(ConfigurationError, match=r"Two message classes are called 'fold\.Other'"):
        plan(Both)


def test_events_may_be_named_beside_the_brackets() -> None:
    class Named(Orders):
        events = (Other,)

    assert plan(Named).names == ["fold.Other"]
    assert plan(Orders).names == ["fold.Cancelled", "fold.Placed", "fold.Rushed"]


def test_a_state_that_is_not_returned_is_an_error_that_says_where() -> None:
    with pytest.raises(ProjectionError, match=r"Forgetful.apply returned None.*At offset 1"):
        fold_records(plan(Forgetful), take(history()))


def test_a_row_of_another_model_is_an_error() -> None:
    with pytest.raises(ProjectionError, match="returned Customer, not Order"):
        fold_records(plan(Wrong), take(history()))


def test_an_error_of_the_projection_says_at_which_event() -> None:
    with pytest.raises(KeyError) as raised:
        fold_records(plan(Failing), take(history()))

    assert raised.value.__notes__[0].startswith("At offset 1: fold.Placed ")
