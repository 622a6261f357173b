"""A handler that may be a renamed one does not repeat the history of the old one."""

from __future__ import annotations

from typing import Any

import pytest

from msgbus import ConfigurationError, MessageBus
from msgbus.handlers.delivery import Mode, StartAt
from msgbus.journal.operations import Remove
from tests.durable_shop import Placed, Seen, Shipped
from tests.unit.durable.conftest import Site

OLD = f"old:{Placed.__wire__.name}"


async def handled_by_old(site: Site, *numbers: int, target: Any = Placed) -> None:
    """Let a bus with the handler `old` handle events, and stop."""
    bus = site.bus()
    bus.subscribe(target, Seen(), name="old")
    async with bus:
        for number in numbers:
            await bus.publish(Placed(number=number))
        await bus.settled()


def with_new(site: Site, target: Any = Placed, **options: Any) -> tuple[MessageBus, Seen]:
    bus, seen = site.bus(), Seen()
    bus.subscribe(target, seen, name="new", **options)
    return bus, seen


async def test_a_renamed_handler_is_refused_with_the_choices(site: Site) -> None:
    await handled_by_old(site, 1, 2)
    bus, seen = with_new(site)

    with pytest.raises(ConfigurationError) as refused:
        await bus.start()

    (fault,) = refused.value.faults
    assert fault.subject == OLD.replace("old", "new")
    assert f"nobody attends {OLD!r}" in fault.problem
    assert f"durable={OLD!r}" in fault.fix
    assert "start=StartAt.LATEST" in fault.fix
    assert f"Remove({OLD!r})" in fault.fix
    assert not bus.is_running
    assert seen.numbers == []


CHOICES: list[tuple[dict[str, Any], list[int]]] = [
    ({"durable": OLD}, [3]),
    ({"start": StartAt.LATEST}, [3]),
    ({"start": StartAt.EARLIEST}, [1, 2, 3]),
    ({"durable": "another"}, [1, 2, 3]),
]


@pytest.mark.parametrize(("options", "expected"), CHOICES)
async def test_each_choice_starts(site: Site, options: dict[str, Any], expected: list[int]) -> None:
    await handled_by_old(site, 1, 2)
    bus, seen = with_new(site, **options)
    async with bus:
        await bus.publish(Placed(number=3))
        await bus.settled()

    assert seen.numbers == expected


async def test_it_starts_when_the_old_one_was_removed(site: Site) -> None:
    await handled_by_old(site, 1)
    bus, seen = with_new(site)
    assert bus.journal is not None
    await bus.journal.commit([Remove(OLD)])
    async with bus:
        await bus.settled()

    assert seen.numbers == [1]


async def test_another_mode_is_the_same_handler_and_is_refused_too(site: Site) -> None:
    await handled_by_old(site, 1)
    bus, _ = with_new(site, mode=Mode.SHARED)

    with pytest.raises(ConfigurationError, match="nobody attends"):
        await bus.start()


async def test_a_topic_is_compared_too(site: Site) -> None:
    await handled_by_old(site, 1, target="shop.**")
    refused, _ = with_new(site, "shop.**")
    other, _ = with_new(site, "shop.*")

    with pytest.raises(ConfigurationError, match="nobody attends 'old:shop"):
        await refused.start()
    async with other:
        pass


async def test_a_second_handler_beside_the_first_starts(site: Site) -> None:
    await handled_by_old(site, 1)
    bus, seen = with_new(site)
    bus.subscribe(Placed, Seen(), name="old")
    async with bus:
        await bus.settled()

    assert seen.numbers == [1]


async def test_a_handler_beside_one_of_another_process_starts(site: Site) -> None:
    attending = site.bus()
    attending.subscribe(Placed, Seen(), name="old")
    bus, seen = with_new(site)
    async with attending:
        await attending.publish(Placed(number=1))
        async with bus:
            await bus.settled()

    assert seen.numbers == [1]


async def test_a_handler_of_other_messages_starts(site: Site) -> None:
    await handled_by_old(site, 1)
    bus = site.bus()

    @bus.on(Shipped)
    async def new(event: Shipped) -> None: ...

    async with bus:
        await bus.settled()


async def test_a_handler_that_the_journal_knows_starts_again(site: Site) -> None:
    both, _ = with_new(site)
    both.subscribe(Placed, Seen(), name="old")
    async with both:
        pass
    again, seen = with_new(site)
    async with again:
        await again.publish(Placed(number=1))
        await again.settled()

    assert seen.numbers == [1]
