"""One command of a type and key at a time: `enqueue(unique=, on_duplicate=)`."""

from __future__ import annotations

from typing import Any

import pytest

from msgbus import ConfigurationError, TicketFailedError, Unhandleable
from msgbus.errors import DuplicateCommandError
from tests.unit.durable.conftest import Site
from tests.unit.durable.packing import Pack, PackGift, Slow, Worker, letters, packing


async def test_a_second_command_of_a_key_gets_the_ticket_of_the_first(site: Site) -> None:
    worker = Worker()
    async with site.bus() as shop:
        first = await shop.enqueue(Pack(number=1), unique="box")
        second = await shop.enqueue(Pack(number=2), unique="box")
        assert second.message_id == first.message_id

        async with packing(site, worker):
            assert await second.result(timeout=30) == 10
    assert worker.attempts == [(1, 1)]


async def test_it_may_be_refused_instead_and_nothing_is_stored(site: Site) -> None:
    worker = Worker()
    async with site.bus() as shop, site.bus() as other:
        first = await shop.enqueue(Pack(number=1), unique="box", on_duplicate="refuse")
        with pytest.raises(DuplicateCommandError, match="box") as refused:
            await other.enqueue(Pack(number=2), unique="box", on_duplicate="refuse")
        assert refused.value.message_id == first.message_id

        async with packing(site, worker) as bus:
            await bus.settled()
    assert worker.attempts == [(1, 1)]


async def test_a_command_that_runs_counts_too_and_one_that_has_ended_does_not(site: Site) -> None:
    slow = Slow()
    async with packing(site, slow) as bus:
        first = await bus.enqueue(Pack(number=1), unique="box")
        await slow.started.wait()
        joined = await bus.enqueue(Pack(number=2), unique="box")
        assert joined.message_id == first.message_id
        slow.release.set()
        assert await joined.result(timeout=30) == 1
        await bus.settled()

        third = await bus.enqueue(Pack(number=3), unique="box", on_duplicate="refuse")
        assert await third.result(timeout=30) == 3
    assert slow.ended == [1, 3]


async def test_a_dead_letter_leaves_the_key_free(site: Site) -> None:
    worker = Worker(fail=1, error=Unhandleable)
    async with packing(site, worker) as bus:
        first = await bus.enqueue(Pack(number=1), unique="box")
        with pytest.raises(TicketFailedError):
            await first.result(timeout=30)
        assert len(await letters(bus)) == 1

        again = await bus.enqueue(Pack(number=2), unique="box", on_duplicate="refuse")
        assert await again.result(timeout=30) == 20


async def test_a_command_that_is_cancelled_leaves_the_key_free(site: Site) -> None:
    async with site.bus() as shop:
        first = await shop.enqueue(Pack(number=1), unique="box", delay=60)
        assert await shop.unschedule(first.message_id)
        second = await shop.enqueue(Pack(number=2), unique="box", on_duplicate="refuse")
        assert second.message_id != first.message_id


async def test_keys_are_of_one_type_of_command(site: Site) -> None:
    async with site.bus() as shop:
        tickets = [
            await shop.enqueue(command, unique=key, on_duplicate="refuse")
            for command, key in [
                (Pack(number=1), "box"),
                (PackGift(number=2), "box"),
                (Pack(number=3), "bag"),
            ]
        ]
        assert len({ticket.message_id for ticket in tickets}) == 3


async def test_the_same_command_twice_is_no_duplicate_of_itself(site: Site) -> None:
    command = Pack(number=1)
    async with site.bus() as shop:
        first = await shop.enqueue(command, unique="box", on_duplicate="refuse")
        again = await shop.enqueue(command, unique="box", on_duplicate="refuse")
        assert again.message_id == first.message_id


async def test_bad_values_and_transactions_are_refused(site: Site) -> None:
    wrong: Any = "replace"
    async with site.bus() as shop:
        with pytest.raises(ValueError, match="'join' or 'refuse', not 'replace'"):
            await shop.enqueue(Pack(number=1), unique="box", on_duplicate=wrong)
        with pytest.raises(ConfigurationError, match=r"bus\.transaction\(\)"):
            async with shop.transaction():
                await shop.enqueue(Pack(number=1), unique="box")
        ticket = await shop.enqueue(Pack(number=2), unique="box", on_duplicate="refuse")
        assert ticket.message_id
