"""The dead-letter queue: adding, looking, discarding, editing, files."""

from __future__ import annotations

import io
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from msgbus import (
    Command,
    DeadLetterDroppedEvent,
    DeadLetteredEvent,
    DeadLetterRefusedEvent,
    Query,
    SystemEvent,
)
from msgbus.errors import (
    DeadLetterError,
    LetterEditError,
    LetterNotFoundError,
    LetterStateError,
    StoredMessageError,
)
from msgbus.messages.message import fix
from msgbus.resilience import (
    DeadLetterEntry,
    DeadLetterQueue,
    LetterStatus,
    MemoryDeadLetterStore,
    Overflow,
)
from msgbus.resilience.dead_letters.entry import moment, wire_names
from tests.fakes import logged
from tests.unit.resilience.letter_fakes import (
    STORES,
    CardCharged,
    ChargeCard,
    GoldCardCharged,
    bury,
    bury_orders,
    opened_queue,
)


def numbers(letters: list[DeadLetterEntry]) -> list[int]:
    return [json.loads(letter.payload)["order"] for letter in letters]


# -- adding ------------------------------------------------------------------------------------


@STORES
async def test_an_added_letter_is_found(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, clock):
        letter = bury(queue, ChargeCard(order=4), answered=True)

        assert await queue.find() == [letter]
        assert (letter.attempts, letter.answered) == (3, True)
        assert letter.last_attempt == moment(clock.time())
        assert queue.added == 1


def test_adding_needs_no_event_loop() -> None:
    queue = DeadLetterQueue()

    assert bury(queue, ChargeCard()).handler == "charge"


def test_queries_are_not_kept() -> None:
    class Ask(Query[int], name="letters.Ask"):
        pass

    queue = DeadLetterQueue()

    kept = queue.add(
        Ask(), handler="h", error=ValueError(), attempts=1, first_attempt=0.0, reason="r"
    )

    assert kept is None
    assert (queue.added, queue.refused) == (0, 0)


def test_callbacks_hear_of_letters_with_the_message_as_cause() -> None:
    queue = DeadLetterQueue()
    heard: list[SystemEvent] = []
    queue.on_event(heard.append)
    command = ChargeCard()
    fix(command, None, session_id="s", headers={"tenant": "acme"})

    letter = bury(queue, command)

    (event,) = heard
    assert event == DeadLetteredEvent(
        letter_id=letter.letter_id, message_type="letters.ChargeCard", handler="charge",
        error_type="ConnectionError", error="ConnectionError: down", attempts=3,
        reason="retries exhausted", answered=False,
    )  # fmt: skip
    assert (event.causation_id, event.session_id) == (command.message_id, "s")


def test_a_dropped_letter_is_counted_logged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    queue = DeadLetterQueue(MemoryDeadLetterStore(max_size=1))
    heard: list[SystemEvent] = []
    first = bury(queue, ChargeCard(order=1))
    queue.on_event(heard.append)

    bury(queue, ChargeCard(order=2))

    dropped = heard[0]
    assert isinstance(dropped, DeadLetterDroppedEvent)
    assert (dropped.letter_id, dropped.reason) == (
        first.letter_id, "the store is full (1 letters)",
    )  # fmt: skip
    assert (queue.added, queue.dropped, queue.refused) == (2, 1, 0)
    assert logged(caplog, "dead_letter_dropped")[0]["letter_id"] == first.letter_id


def test_a_refused_letter_is_counted_logged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    queue = DeadLetterQueue(MemoryDeadLetterStore(max_size=1, overflow=Overflow.REJECT))
    heard: list[SystemEvent] = []
    bury(queue, ChargeCard(order=1))
    queue.on_event(heard.append)

    refused = queue.add(
        ChargeCard(order=2), handler="h", error=ValueError(), attempts=1, first_attempt=0, reason=""
    )

    assert refused is None
    (event,) = heard
    assert isinstance(event, DeadLetterRefusedEvent)
    assert event.reason == "the store is full (1 letters)"
    assert (queue.added, queue.dropped, queue.refused) == (1, 0, 1)
    assert len(logged(caplog, "dead_letter_refused")) == 1


def test_a_callback_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    queue = DeadLetterQueue()
    heard: list[SystemEvent] = []

    def fail(event: SystemEvent) -> None:
        raise RuntimeError("password=hunter2")

    queue.on_event(fail)
    queue.on_event(heard.append)

    bury(queue, ChargeCard())

    assert len(heard) == 1
    (entry,) = logged(caplog, "dead_letter_callback_failed")
    assert entry["error"] == "RuntimeError: password=[redacted]"


def test_a_store_that_raises_is_a_refusal_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenError(Exception):
        pass

    store = MemoryDeadLetterStore()
    queue = DeadLetterQueue(store)

    def fail(letter: DeadLetterEntry) -> str | None:
        raise BrokenError

    store.add = fail  # type: ignore[method-assign]

    kept = queue.add(
        ChargeCard(), handler="h", error=ValueError(), attempts=1, first_attempt=0, reason="r"
    )

    assert kept is None
    assert queue.refused == 1
    assert logged(caplog, "dead_letter_refused")[0]["reason"] == "BrokenError"


# -- looking -----------------------------------------------------------------------------------


@STORES
async def test_find_can_be_awaited_and_iterated(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        bury_orders(queue, 250)

        listed = await queue.find()
        walked = [letter async for letter in queue.find()]
        some = await queue.find(limit=120)

        assert numbers(listed) == numbers(walked) == list(range(250))
        assert numbers(some) == list(range(120))


@STORES
async def test_letters_may_be_discarded_while_they_are_iterated(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        bury_orders(queue, 205)

        async for letter in queue.find():
            await queue.discard(letter, reason="withdrawn")

        assert await queue.count() == 0
        assert await queue.count(status=LetterStatus.DISCARDED) == 205


@STORES
async def test_pages_go_on_where_the_last_one_ended(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        bury_orders(queue, 5)

        first = await queue.page(limit=3)
        second = await queue.page(limit=3, after=first.cursor)

        assert numbers(list(first.letters)) == [0, 1, 2]
        assert numbers(list(second.letters)) == [3, 4]
        assert second.cursor is None


@STORES
async def test_a_class_means_those_below_it_too(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        bury(queue, ChargeCard(order=1))
        bury(queue, CardCharged(order=2))
        bury(queue, GoldCardCharged(order=3))

        assert numbers(await queue.find(CardCharged)) == [2, 3]
        assert numbers(await queue.find(GoldCardCharged)) == [3]
        assert numbers(await queue.find("letters.CardCharged")) == [2]
        assert numbers(await queue.find([ChargeCard, "letters.GoldCardCharged"])) == [1, 3]
        assert numbers(await queue.find(Command)) == [1]
        assert await queue.count(CardCharged) == 2
        assert [group.count for group in await queue.groups(GoldCardCharged)] == [1]


def test_the_names_of_a_generic_class_are_those_of_its_uses() -> None:
    assert "letters.ChargeCard" in wire_names(Command)
    assert "letters.CardCharged" not in wire_names(Command)


@STORES
async def test_filters_are_told_apart(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, clock):
        bury(queue, CardCharged(order=1), handler="a")
        await clock.advance(60)
        late = bury(queue, CardCharged(order=2), error=KeyError("k"))

        assert numbers(await queue.find(handler="a")) == [1]
        assert numbers(await queue.find(error_type="KeyError")) == [2]
        assert numbers(await queue.find(since=late.last_attempt)) == [2]
        assert numbers(await queue.find(until=late.last_attempt)) == [1]
        edge = late.last_attempt - timedelta(microseconds=1)
        assert numbers(await queue.find(since=edge.replace(tzinfo=None))) == [2]
        assert await queue.find(session_id="none") == []


@pytest.mark.parametrize("limit", [0, -1])
async def test_a_limit_that_makes_no_sense_is_refused(limit: int) -> None:
    queue = DeadLetterQueue()

    with pytest.raises(DeadLetterError, match="above 0"):
        queue.find(limit=limit)
    with pytest.raises(DeadLetterError, match="above 0"):
        await queue.page(limit=limit)


@STORES
async def test_a_cursor_that_is_none_is_refused(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        with pytest.raises(DeadLetterError, match="'nonsense' is no cursor"):
            await queue.page(after="nonsense")


@STORES
async def test_an_unknown_letter_is_named(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        for call in (
            queue.get("no-such-id"),
            queue.discard("no-such-id", "why"),
            queue.edit("no-such-id", order=1),
            queue.replay("no-such-id"),
            queue.mark_unanswered("no-such-id"),
        ):
            with pytest.raises(LetterNotFoundError, match="no-such-id") as caught:
                await call
            assert caught.value.letter_id == "no-such-id"


# -- discarding --------------------------------------------------------------------------------


@STORES
async def test_a_discarded_letter_stays_as_a_record(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        letter = bury(queue, CardCharged())

        await queue.discard(letter.letter_id, reason="test data")
        again = await queue.discard(letter, reason="another")

        assert (again.status, again.note) == (LetterStatus.DISCARDED, "test data")
        assert await queue.find() == []
        with pytest.raises(LetterStateError, match="cannot be edited: it is discarded"):
            await queue.edit(letter, order=2)


@STORES
async def test_a_letter_can_be_marked_as_unanswered(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        letter = bury(queue, ChargeCard(), answered=True)

        assert not (await queue.mark_unanswered(letter)).answered
        assert len(await queue.find(answered=False)) == 1


# -- editing -----------------------------------------------------------------------------------


@STORES
async def test_an_edit_makes_a_new_message_caused_by_the_old(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, service, _):
        root = ChargeCard()
        event = CardCharged(order=1, note="typo")
        fix(root, None, session_id="s", headers={"a": "b"})
        fix(event, root, topic="t")
        old = bury(queue, event)

        new = await queue.edit(old, note="fixed")

        assert new.message == CardCharged(order=1, note="fixed")
        assert new.message_id not in (old.message_id, root.message_id)
        assert (new.causation_id, new.correlation_id) == (old.message_id, root.message_id)
        assert (new.session_id, dict(new.headers), new.topic) == ("s", {"a": "b"}, "t")
        assert (new.handler, new.attempts, new.status) == ("charge", 0, LetterStatus.DEAD)
        assert await queue.find() == [new]
        before = await queue.get(old)
        assert (before.status, before.note) == (LetterStatus.EDITED, f"see {new.letter_id}")
        assert (await queue.replay(new)).succeeded
        (delivered, handler), *rest = service.seen
        assert (delivered, delivered.message_id) == (new.message, new.message_id)
        assert (handler, rest) == ("charge", [])


@STORES
@pytest.mark.parametrize(
    ("changes", "fields", "text"),
    [
        ({"order": "seven"}, ("order",), "order: Input should be a valid integer"),
        ({"colour": 1}, ("colour",), "has no colour. Its fields are: order, note"),
        ({}, (), "nothing to change. Its fields are: order, note"),
        ({"note": object()}, ("note",), "Unable to serialize"),
    ],
    ids=["wrong", "unknown", "nothing", "no JSON"],
)
async def test_an_edit_that_is_not_valid_names_the_fields_and_changes_nothing(
    kind: str, tmp_path: Path, changes: dict[str, Any], fields: tuple[str, ...], text: str
) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        letter = bury(queue, CardCharged())

        with pytest.raises(LetterEditError, match=text) as caught:
            await queue.edit(letter, **changes)

        assert caught.value.fields == fields
        assert await queue.find(status=None) == [letter]


@STORES
async def test_a_message_that_its_schema_refuses_can_be_edited(kind: str, tmp_path: Path) -> None:
    async with opened_queue(kind, tmp_path) as (queue, _, _):
        letter = bury(queue, CardCharged(order=1))
        data = {**letter.data(), "payload": '{"order": "old form"}', "version": 1}
        await queue.discard(letter, "replaced below")
        other = DeadLetterQueue()
        await other.import_(io.StringIO(json.dumps(data)))
        with pytest.raises(StoredMessageError):
            _ = (await other.get(letter)).message

        new = await other.edit(letter, order=12)

        assert (new.message, new.version) == (CardCharged(order=12), 2)
