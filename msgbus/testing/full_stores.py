"""What a full store of dead letters must do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from msgbus.errors import DeadLetterStoreError
from msgbus.resilience.letters import DeadLetterEntry
from msgbus.resilience.stores import DeadLetterStore, Notice, Overflow, discarded
from msgbus.testing.letters import (
    ELSEWHERE,
    Check,
    Checked,
    MakeStore,
    add,
    claim,
    everything,
    letter,
    opened,
    raises,
)

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
    await store.change(entry.letter_id, lambda record: discarded(record, "no"))


async def _replaying(store: DeadLetterStore, entry: DeadLetterEntry) -> None:
    await store.change(entry.letter_id, claim(entry, ELSEWHERE))


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


FULL_CHECKS: Final[tuple[Check, ...]] = (
    a_full_store_drops_the_oldest_and_says_so,
    a_full_store_refuses_and_says_so,
    what_is_done_makes_room_first,
    what_does_not_fit_is_not_put_in_part,
    a_letter_that_is_there_is_updated_in_a_full_store,
)
