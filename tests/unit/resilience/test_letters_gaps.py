"""Dead letters: small promises that a change of the code could break unseen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from msgbus.resilience import (
    DeadLetterQueue,
    LetterGroup,
    LetterPage,
    LetterStatus,
)
from msgbus.resilience.dead_letters.entry import from_data, letter_about
from msgbus.resilience.dead_letters.filters import LetterFilter
from msgbus.resilience.dead_letters.store import Notice, added, claimed, settled
from msgbus.runtime.clock import VirtualClock
from tests.unit.resilience.letter_fakes import ChargeCard, bury_orders

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
LETTER = letter_about(
    ChargeCard(),
    handler="charge",
    error=ConnectionError("down"),
    attempts=2,
    first_attempt=NOON,
    last_attempt=NOON,
    reason="retries exhausted",
)
GROUP = ("ConnectionError", "charge", "letters.ChargeCard", 1, NOON, NOON, "down")
VALUES: tuple[Any, ...] = (
    LetterFilter(),
    LetterPage((LETTER,), None),
    LetterGroup(
        error_type="KeyError", handler="h", message_type="m", count=1, first=NOON, last=NOON,
        sample="s",
    ),
    Notice("dropped", LETTER, "the store is full"),
)  # fmt: skip


# -- calls -------------------------------------------------------------------------------------


def test_options_are_given_by_name() -> None:
    build: Any = DeadLetterQueue
    queue: Any = DeadLetterQueue()

    with pytest.raises(TypeError, match="positional"):
        build(None, VirtualClock())
    for call, value in ((queue.find, 5), (queue.page, None), (queue.replay_all, 1.0)):
        with pytest.raises(TypeError, match="positional"):
            call(None, value)


async def test_a_page_has_a_hundred_letters_unless_told() -> None:
    queue = DeadLetterQueue()
    bury_orders(queue, 102)

    assert len((await queue.page()).letters) == 100


def test_a_letter_is_unanswered_unless_told() -> None:
    letter = DeadLetterQueue().add(
        ChargeCard(), handler="h", error=ValueError(), attempts=1, first_attempt=NOON, reason="r"
    )

    assert letter is not None
    assert not letter.answered


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", VALUES, ids=[type(value).__name__ for value in VALUES])
def test_what_stores_give_and_take_is_read_only_and_small(value: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, None)
    assert not hasattr(value, "__dict__")


@pytest.mark.parametrize(
    ("build", "values"),
    [(LetterFilter, (None,)), (LetterGroup, GROUP)],
    ids=["filter", "group"],
)
def test_values_of_many_fields_are_given_by_name(
    build: Callable[..., object], values: tuple[object, ...]
) -> None:
    with pytest.raises(TypeError, match="positional"):
        build(*values)


def test_until_leaves_out_what_died_later() -> None:
    before = LetterFilter(until=NOON - timedelta(seconds=1))

    assert not before.fits(LETTER)
    assert not LetterFilter(until=NOON).fits(LETTER)
    assert LetterFilter(until=NOON + timedelta(seconds=1)).fits(LETTER)


# -- rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("answered", [True, False])
def test_a_dead_letter_that_comes_again_has_the_answer_of_this_time(answered: bool) -> None:
    old = replace(LETTER, answered=not answered)

    assert added(old, replace(LETTER, answered=answered)).answered is answered


def test_only_who_claimed_a_letter_settles_it() -> None:
    first = claimed(LETTER)
    second = claimed(replace(first, status=LetterStatus.DEAD))
    same = from_data(second.data())  # equal and another, as if read from a file

    assert settled(second, first) is second
    assert settled(LETTER, first) is LETTER
    assert settled(second, same).status is LetterStatus.REPLAYED
