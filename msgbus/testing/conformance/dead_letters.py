"""Conformance checks of dead-letter stores, for msgbus's own and for yours.

Each check is an async function that takes a function which makes a new, empty store:

    from msgbus.testing.conformance.dead_letters import CHECKS

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_my_store(check, tmp_path):
        await check(lambda **options: MyStore(tmp_path, **options))

The function is given `max_size` and `overflow` for checks of a full store, else nothing.
They raise `AssertionError`, and run on asyncio and on trio.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from msgbus.errors import DeadLetterStoreError, LetterStateError, UndeliverableLetterError
from msgbus.messages.message import Event, set_meta
from msgbus.messages.metadata import Metadata
from msgbus.resilience.dead_letters.entry import DeadLetterEntry, LetterStatus, letter_about
from msgbus.resilience.dead_letters.filters import ANY, LetterFilter
from msgbus.resilience.dead_letters.store import (
    DeadLetterStore,
    Notice,
    Overflow,
    claimed,
    discarded,
    edited,
    settled,
)

E = TypeVar("E", bound=BaseException)


class MakeStore(Protocol):
    """Makes a new, empty store."""

    def __call__(self, **options: Any) -> DeadLetterStore:
        """With `max_size` and `overflow`, if given."""
        ...


Check: TypeAlias = Callable[[MakeStore], Awaitable[None]]

MONDAY: Final = datetime(2026, 3, 2, 9, tzinfo=UTC)


class Checked(Event, name="msgbus.testing.Checked", version=3):
    """The message of the letters of the checks."""

    number: int = 0


class AlsoChecked(Event, name="msgbus.testing.AlsoChecked"):
    """A message of another type."""


def letter(
    number: int = 0,
    *,
    message: Event | None = None,
    handler: str = "handler",
    error: Exception | None = None,
    attempts: int = 3,
    minute: int = 0,
    answered: bool = False,
    session_id: str | None = None,
    scope: str | None = None,
    target: str = "msgbus.testing.Checked",
) -> DeadLetterEntry:
    """Make a letter about a new message, unless one is given."""
    if message is None:
        message = Checked(number=number)
    meta = Metadata(session_id=session_id, headers={"tenant": "acme"}, topic="a.topic")
    if message.headers != {"tenant": "acme"}:
        set_meta(message, meta)
    last = MONDAY + timedelta(minutes=minute, microseconds=123_457)
    return letter_about(
        message,
        handler=handler,
        error=ConnectionError("down") if error is None else error,
        attempts=attempts,
        first_attempt=last - timedelta(seconds=30),
        last_attempt=last,
        reason="retries exhausted",
        answered=answered,
        scope=scope,
        target=target,
    )


@asynccontextmanager
async def opened(make: MakeStore, **options: Any) -> AsyncGenerator[DeadLetterStore]:
    """A new store, closed at the end."""
    store = make(**options)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def add(store: DeadLetterStore, *letters: DeadLetterEntry) -> None:
    """Add letters, and wait until they are stored."""
    for one in letters:
        assert store.add(one) is None
    await store.flush()


async def everything(
    store: DeadLetterStore, which: LetterFilter = ANY, limit: int = 2
) -> list[DeadLetterEntry]:
    """Fetch all letters that match, by pages of `limit`."""
    found: list[DeadLetterEntry] = []
    cursor: str | None = None
    while True:
        page = await store.page(which, after=cursor, limit=limit)
        assert len(page.letters) <= limit
        found += page.letters
        cursor = page.cursor
        if cursor is None:
            return found


async def claim(store: DeadLetterStore, entry: DeadLetterEntry) -> DeadLetterEntry:
    """Claim a letter for this process, and return it as it is then."""
    found = await store.change(entry.letter_id, claimed)
    assert found is not None
    return found


async def raises(kind: type[E], work: Awaitable[object]) -> E:
    """Assert that `work` raises an error of this type, and return it."""
    try:
        await work
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


async def a_letter_comes_back_as_it_was(make: MakeStore) -> None:
    """Every field, the message included."""
    async with opened(make) as store:
        given = letter(7, session_id="s", scope="s", target="topic:shop.**")
        await add(store, given)

        found = await store.get(given.letter_id)

        assert found is not None
        assert found == given
        assert found.message == Checked(number=7)
        assert found.message.message_id == given.message_id
        assert (found.message.session_id, found.message.headers) == ("s", {"tenant": "acme"})
        assert await store.get("no such letter") is None


async def a_letter_that_comes_again_updates_the_first(make: MakeStore) -> None:
    """Attempts add up, the last error and time count, and it is dead."""
    async with opened(make) as store:
        message = Checked()
        first = letter(message=message, minute=1)
        again = letter(message=message, minute=9, error=ValueError("other"), attempts=2)
        await add(store, first)
        await store.change(first.letter_id, lambda old: discarded(old, "no"))

        await add(store, again)

        expected = replace(again, attempts=5, first_attempt=first.first_attempt)
        assert await everything(store) == [expected]


async def two_handlers_of_one_message_have_two_letters(make: MakeStore) -> None:
    """A letter is about a message and a handler: its scope, its name and its target."""
    async with opened(make) as store:
        message = Checked()
        given = [
            letter(message=message, scope=scope, handler=handler, target=target)
            for scope, handler, target in product((None, "s"), "ab", "xy")
        ]
        await add(store, *given)

        assert await everything(store) == given


async def pages_have_every_letter_once_in_order(make: MakeStore) -> None:
    """Whatever the size of a page."""
    async with opened(make) as store:
        given = [letter(number) for number in range(7)]
        await add(store, *given)

        for limit in (1, 2, 3, 7, 8):
            assert await everything(store, limit=limit) == given


async def letters_that_change_on_the_way_are_met_once(make: MakeStore) -> None:
    """The order does not change."""
    async with opened(make) as store:
        given = [letter(number) for number in range(6)]
        await add(store, *given)
        met: list[str] = []
        cursor: str | None = None
        while True:
            page = await store.page(LetterFilter(), after=cursor, limit=2)
            for one in page.letters:
                met.append(one.letter_id)
                await store.change(one.letter_id, lambda old: discarded(old, "done"))
                await add(store, letter(message=one.message, minute=60))  # type: ignore[arg-type]
            cursor = page.cursor
            if cursor is None:
                break

        assert met == [one.letter_id for one in given]


async def every_filter_finds_what_fits_and_counts_it(make: MakeStore) -> None:
    """All combinations of two filters, held against plain Python."""
    async with opened(make) as store:
        given = [
            letter(handler=handler, error=error, minute=minute, session_id=session, answered=odd)
            for handler, error, (minute, session, odd) in product(
                ("a", "b"),
                (ValueError("x"), KeyError("y")),
                ((0, None, False), (5, "s", True), (9, "t", False)),
            )
        ]
        given.append(letter(message=AlsoChecked(), minute=3))
        await add(store, *given)
        await store.change(given[0].letter_id, lambda old: discarded(old, "no"))
        now = [await store.get(one.letter_id) for one in given]
        filters: list[dict[str, Any]] = [
            {"message_types": frozenset({"msgbus.testing.AlsoChecked"})},
            {"message_types": frozenset({"msgbus.testing.Checked", "unknown"})},
            {"handler": "b"},
            {"error_type": "KeyError"},
            {"session_id": "t"},
            {"since": MONDAY + timedelta(minutes=5, microseconds=123_457)},
            {"until": MONDAY + timedelta(minutes=5, microseconds=123_457)},
            {"answered": True},
            {"answered": False},
            {"status": None},
            {"status": LetterStatus.DISCARDED},
        ]
        for first, second in product(filters, filters):
            which = LetterFilter(**{**first, **second})

            expected = [one for one in now if one is not None and which.fits(one)]

            assert await everything(store, which, limit=3) == expected, which
            assert await store.count(which) == len(expected), which


async def groups_count_letters_by_error_handler_and_message(make: MakeStore) -> None:
    """The largest first, with times and the newest error."""
    async with opened(make) as store:
        given = [letter(error=ValueError(f"no {n}"), minute=n, handler="a") for n in range(3)]
        await add(store, letter(handler="b", minute=9), *given, letter(handler="c"))
        await store.change(given[0].letter_id, lambda old: discarded(old, "no"))

        most, *others = await store.groups(LetterFilter())

        assert (most.error_type, most.handler, most.count) == ("ValueError", "a", 2)
        assert most.message_type == "msgbus.testing.Checked"
        assert (most.first, most.last) == (given[1].first_attempt, given[2].last_attempt)
        assert most.sample == "ValueError: no 2"
        assert [(one.handler, one.count) for one in others] == [("b", 1), ("c", 1)]
        assert [one.handler for one in await store.groups(LetterFilter(handler="c"))] == ["c"]


async def upto_leaves_out_letters_that_came_later(make: MakeStore) -> None:
    """So that a long replay has an end."""
    async with opened(make) as store:
        early, late = letter(1), letter(2)
        await add(store, early)
        which = replace(ANY, upto=await store.head())
        await add(store, late)

        assert await everything(store, which) == [early]
        assert await store.count(which) == 1


async def a_step_that_raises_changes_nothing(make: MakeStore) -> None:
    """And one about an unknown letter gives nothing."""
    async with opened(make) as store:
        given = letter()
        await add(store, given)
        taken = await claim(store, given)

        step = store.change(given.letter_id, lambda old: discarded(old, "no"))
        error = await raises(LetterStateError, step)

        assert error.status == "replaying"

        assert await everything(store) == [taken]
        assert await store.change("unknown", lambda old: old) is None


async def a_letter_is_claimed_once(make: MakeStore) -> None:
    """Until its replay has ended."""
    async with opened(make) as store:
        given = letter()
        await add(store, given)

        first = await claim(store, given)
        second = await claim(store, given)
        await store.change(given.letter_id, lambda old: settled(old, first, SystemExit()))
        third = await claim(store, given)

        assert (first.status, first.replays) == (LetterStatus.REPLAYING, 1)
        assert second == first
        assert third == replace(first, replays=2)


async def claims_of_a_process_that_lives_are_not_released(make: MakeStore) -> None:
    """Only those of one that has ended are."""
    async with opened(make) as store:
        claimed_here, dead = letter(1), letter(2)
        await add(store, claimed_here, dead)
        await claim(store, claimed_here)

        assert await store.release() == 0

        assert [one.status.value for one in await everything(store)] == ["replaying", "dead"]


async def a_failed_replay_counts_once_whoever_tells_first(make: MakeStore) -> None:
    """The bus adds the letter again, before or after the replay has stored its failure."""
    async with opened(make) as store:
        for adds_first in (True, False):
            message = Checked()
            given = letter(message=message, attempts=3, answered=True)
            again = letter(message=message, attempts=4, minute=5, error=KeyError("k"))
            await add(store, given)
            own = await claim(store, given)

            def settle(old: DeadLetterEntry, own: DeadLetterEntry = own) -> DeadLetterEntry:
                return settled(old, own, ValueError("x"), MONDAY)

            if adds_first:
                await add(store, again)
                await store.change(given.letter_id, settle)
            else:
                alone = await store.change(given.letter_id, settle)
                assert alone is not None
                assert (alone.attempts, alone.error) == (4, "ValueError: x")
                assert alone.last_attempt == MONDAY
                await add(store, again)

            found = await store.get(given.letter_id)
            assert found is not None
            assert (found.attempts, found.replays, found.status) == (7, 1, LetterStatus.DEAD)
            assert (found.error_type, found.answered) == ("KeyError", True)


async def a_handled_replay_stays_handled(make: MakeStore) -> None:
    """Only the claim it was made under can settle it."""
    async with opened(make) as store:
        given = letter()
        await add(store, given)
        own = await claim(store, given)
        other = replace(own, replays=9)

        stranger = await store.change(given.letter_id, lambda old: settled(old, other))
        owner = await store.change(given.letter_id, lambda old: settled(old, own))
        late = await claim(store, given)

        assert stranger is not None
        assert stranger.status is LetterStatus.REPLAYING
        assert owner is not None
        assert late == owner
        assert owner.status is LetterStatus.REPLAYED


async def a_replay_that_reached_no_handler_changes_nothing(make: MakeStore) -> None:
    """Error, attempts and replays are what they were."""
    async with opened(make) as store:
        given = letter()
        await add(store, given)
        own = await claim(store, given)

        await store.change(
            given.letter_id, lambda old: settled(old, own, UndeliverableLetterError("x"))
        )

        assert await everything(store) == [given]


async def an_edit_is_whole(make: MakeStore) -> None:
    """The old letter is marked and the new one is there, or neither."""
    async with opened(make) as store:
        first, new, never = letter(1), letter(2), letter(3)
        await add(store, first)

        await store.change(first.letter_id, lambda old: edited(old, new), successor=new)
        again = store.change(first.letter_id, lambda old: edited(old, never), successor=never)
        await raises(LetterStateError, again)

        found = {one.letter_id: one.status for one in await everything(store)}
        assert found == {first.letter_id: LetterStatus.EDITED, new.letter_id: LetterStatus.DEAD}


async def put_adds_what_is_new(make: MakeStore) -> None:
    """And leaves the rest as it is."""
    async with opened(make) as store:
        known, new = letter(1), letter(2)
        await add(store, known)
        changed = await store.change(known.letter_id, lambda old: discarded(old, "no"))

        assert await store.put([known, new, new]) == 1
        assert await store.put([known, new]) == 0

        assert await everything(store) == [changed, new]


async def letters_outlive_a_close(make: MakeStore) -> None:
    """A store may be opened again."""
    store = make()
    await store.open()
    given = [letter(number) for number in range(3)]
    for one in given:
        assert store.add(one) is None
    await store.close()

    await store.open()
    try:
        assert await everything(store) == given
    finally:
        await store.close()


Prepare: TypeAlias = Callable[[DeadLetterStore, DeadLetterEntry], Awaitable[None]]


async def _overfill(
    make: MakeStore, overflow: Overflow, prepare: Prepare
) -> tuple[list[DeadLetterEntry], list[DeadLetterEntry], list[str]]:
    """Three letters, one of them prepared, then two more: given, kept, and the lost."""
    async with opened(make, max_size=3, overflow=overflow) as store:
        lost: list[str] = []

        def hear(notice: Notice) -> None:
            lost.append(f"{notice.kind} {notice.letter.message.number}")  # type: ignore[attr-defined]

        store.listen(hear)
        given = [letter(number) for number in range(5)]
        await add(store, *given[:3])
        await prepare(store, given[1])
        refused = [one for one in given[3:] if store.add(one) is not None]
        lost += [f"refused {one.message.number}" for one in refused]  # type: ignore[attr-defined]
        await store.flush()
        return given, await everything(store), lost


async def _leave(store: DeadLetterStore, entry: DeadLetterEntry) -> None:
    del store, entry


async def _discard(store: DeadLetterStore, entry: DeadLetterEntry) -> None:
    await store.change(entry.letter_id, lambda old: discarded(old, "no"))


async def _replaying(store: DeadLetterStore, entry: DeadLetterEntry) -> None:
    await claim(store, entry)


async def a_full_store_drops_the_oldest_and_says_so(make: MakeStore) -> None:
    """Those that are being replayed stay."""
    given, kept, lost = await _overfill(make, Overflow.DROP_OLDEST, _leave)
    assert (kept, lost) == (given[2:], ["dropped 0", "dropped 1"])

    given, kept, lost = await _overfill(make, Overflow.DROP_OLDEST, _replaying)
    assert [one.letter_id for one in kept] == [given[n].letter_id for n in (1, 3, 4)]
    assert lost == ["dropped 0", "dropped 2"]


async def a_full_store_refuses_and_says_so(make: MakeStore) -> None:
    """With the other policy."""
    given, kept, lost = await _overfill(make, Overflow.REJECT, _leave)
    assert (kept, lost) == (given[:3], ["refused 3", "refused 4"])


async def what_is_done_makes_room_first(make: MakeStore) -> None:
    """With either policy, and nothing is lost by it."""
    given, kept, lost = await _overfill(make, Overflow.REJECT, _discard)
    assert (kept, lost) == ([given[0], *given[2:4]], ["refused 4"])

    given, kept, lost = await _overfill(make, Overflow.DROP_OLDEST, _discard)
    assert (kept, lost) == (given[2:], ["dropped 0"])


async def what_does_not_fit_is_not_put_in_part(make: MakeStore) -> None:
    """All letters of a file, or none."""
    async with opened(make, max_size=2, overflow=Overflow.REJECT) as store:
        given = letter(1)
        await add(store, given)
        error = await raises(DeadLetterStoreError, store.put([letter(2), letter(3)]))

        assert "max_size" in str(error)
        assert await everything(store) == [given]


async def a_letter_that_is_there_is_updated_in_a_full_store(make: MakeStore) -> None:
    """It needs no room."""
    async with opened(make, max_size=1, overflow=Overflow.REJECT) as store:
        message = Checked()
        await add(store, letter(message=message, attempts=1))
        await add(store, letter(message=message, attempts=2))

        assert [one.attempts for one in await everything(store)] == [3]


CHECKS: Final[tuple[Check, ...]] = (
    a_letter_comes_back_as_it_was,
    a_letter_that_comes_again_updates_the_first,
    two_handlers_of_one_message_have_two_letters,
    pages_have_every_letter_once_in_order,
    letters_that_change_on_the_way_are_met_once,
    every_filter_finds_what_fits_and_counts_it,
    groups_count_letters_by_error_handler_and_message,
    upto_leaves_out_letters_that_came_later,
    a_step_that_raises_changes_nothing,
    a_letter_is_claimed_once,
    claims_of_a_process_that_lives_are_not_released,
    a_failed_replay_counts_once_whoever_tells_first,
    a_handled_replay_stays_handled,
    a_replay_that_reached_no_handler_changes_nothing,
    an_edit_is_whole,
    put_adds_what_is_new,
    letters_outlive_a_close,
    a_full_store_drops_the_oldest_and_says_so,
    a_full_store_refuses_and_says_so,
    what_is_done_makes_room_first,
    what_does_not_fit_is_not_put_in_part,
    a_letter_that_is_there_is_updated_in_a_full_store,
)
