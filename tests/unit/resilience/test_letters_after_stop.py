"""Letters are there to be read after the bus has stopped, and results say what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msgbus import Command, Event, MessageBus
from msgbus.errors import DeadLetterError
from msgbus.resilience import ResilientMessageBus, RetryConfig, SqliteDeadLetterStore
from tests.unit.resilience.flaky import Charge, Flaky, Shop, quick
from tests.unit.resilience.letter_fakes import STORES

NO_RETRY = RetryConfig(max_retries=0)


class Placed(Event, name="after_stop.Placed"):
    number: int = 0


def bus_on(kind: str, folder: Path) -> ResilientMessageBus:
    given: dict[str, Any] = {"retry": NO_RETRY, "breaker": None}
    if kind == "sqlite":
        given["dead_letters"] = SqliteDeadLetterStore(folder / "letters.db")
    elif kind == "journal":
        given["journal"] = f"sqlite:///{folder / 'journal.db'}?reserve=0"
    bus = ResilientMessageBus(**given)

    @bus.on(Placed, durable=False)
    async def note(event: Placed) -> None:
        raise ConnectionError("down")

    return bus


@STORES
async def test_letters_can_be_read_after_the_bus_has_stopped(kind: str, tmp_path: Path) -> None:
    """Point 6: what died is looked at when the work is done."""
    bus = bus_on(kind, tmp_path)
    async with bus:
        for number in range(3):
            await bus.publish(Placed(number=number))

    letters = await bus.dead_letters.find()
    again = await bus.dead_letters.get(letters[0])
    groups = await bus.dead_letters.groups()
    number = await bus.dead_letters.export(tmp_path / "letters.jsonl")

    assert [one.message for one in letters] == [Placed(number=number) for number in range(3)]
    assert again == letters[0]
    assert [(one.handler, one.count) for one in groups] == [("note", 3)]
    assert number == bus.stats().dead_letters == 3


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
async def test_a_stopped_bus_changes_no_letter_in_its_file(kind: str, tmp_path: Path) -> None:
    """Point 6: to read is all that can be done without the bus."""
    bus = bus_on(kind, tmp_path)
    async with bus:
        await bus.publish(Placed())
    (letter,) = await bus.dead_letters.find()

    with pytest.raises(DeadLetterError, match="closed"):
        await bus.dead_letters.discard(letter, "no")
    with pytest.raises(DeadLetterError, match="closed"):
        await bus.dead_letters.replay(letter)


async def test_a_file_that_is_gone_is_not_made_anew_by_reading(tmp_path: Path) -> None:
    """Point 6: reading leaves nothing behind."""
    store = SqliteDeadLetterStore(tmp_path / "letters.db")
    await store.close()

    with pytest.raises(DeadLetterError, match="closed"):
        await store.get("x")
    assert not store.path.exists()


# -- results -------------------------------------------------------------------------------------


async def test_an_answer_of_the_fallback_is_marked() -> None:
    """Point 6: nobody takes the second-best answer for the handler's own."""
    down = ConnectionError("down, password=hunter2")
    shop = Shop(Flaky(0, down), retry=None, breaker=None, fallback="later")

    async with shop.bus as bus:
        second_best = await bus.execute(Charge())
        real = await bus.execute(Charge())

    assert (second_best.success, second_best.value) == (True, "later")
    assert second_best.is_fallback
    assert second_best.metadata["fallback"] == "ConnectionError: down, password=[redacted]"
    assert second_best.metadata["handler"] == "charge"
    assert not real.is_fallback
    assert "fallback" not in real.metadata


async def test_an_answer_after_a_retry_is_no_fallback() -> None:
    """Point 6: the handler answered in the end."""
    shop = Shop(Flaky(1), retry=quick(2), fallback="later")

    result = await shop.charge(5)

    assert (result.value, result.attempts) == ("done", 2)
    assert not result.is_fallback


class Ask(Command[int]):
    fails: bool = False


async def test_a_result_is_true_if_it_is_a_success() -> None:
    """Point 6: also if the value is false."""
    bus = MessageBus()

    @bus.handles(Ask)
    async def answer(command: Ask) -> int:
        if command.fails:
            raise ValueError("no")
        return 0

    async with bus:
        good, bad = await bus.execute(Ask()), await bus.execute(Ask(fails=True))

    assert good
    assert not bad
    assert not bad.is_fallback


async def test_asking_whether_it_is_true_is_a_look_at_the_result(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Point 6: `if result:` has seen the failure."""
    bus = MessageBus()

    @bus.handles(Ask)
    async def answer(command: Ask) -> int:
        raise ValueError("no")

    async with bus:
        if await bus.execute(Ask()):
            raise AssertionError

    assert "command_failed_unobserved" not in caplog.text
