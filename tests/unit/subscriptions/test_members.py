"""Processes that die, freeze, join and leave; poison; versions of an application."""

from __future__ import annotations

import os

import anyio
import pytest

from msgbus.errors import StaleError
from msgbus.journal.operations import Append, Seek
from msgbus.journal.records import Kind, Selection, State
from msgbus.subscriptions.in_flight import InFlight
from msgbus.subscriptions.members import is_gone, this_process
from msgbus.subscriptions.partitioned import PartitionedState
from tests.unit.subscriptions.cluster import (
    TTL,
    Process,
    Retries,
    cluster,
    make_record,
    number_of,
)

MODES = ["exclusive", "key_shared", "shared", "queue"]


async def hang(process: Process, one: InFlight) -> None:
    await anyio.sleep_forever()


async def handle(process: Process, one: InFlight) -> None:
    pass


@pytest.mark.parametrize("mode", MODES)
async def test_the_work_of_a_killed_process_goes_to_others(mode: str) -> None:
    async with cluster(mode, 2) as them:
        victim = them.processes[0]

        async def hang_in_victim(process: Process, one: InFlight) -> None:
            await (hang if process is victim else handle)(process, one)

        them.handler = hang_in_victim
        await them.publish(*((number, f"k{number % 3}") for number in range(20)))
        await them.settled()
        await them.kill(victim)
        await them.until_handled(*range(20), within=TTL + 2.5)
        await them.settled()

        assert them.handled == list(range(20))
        assert await them.rows() == []
        assert max(max(attempts) for attempts in them.attempts.values()) == 1


@pytest.mark.parametrize("mode", MODES)
async def test_a_member_that_was_ended_is_cut_off_and_starts_anew(mode: str) -> None:
    cut: list[int] = []

    async def hang_at_first(process: Process, one: InFlight) -> None:
        if process is them.processes[0] and not cut:
            try:
                await anyio.sleep_forever()
            finally:
                cut.append(number_of(one))

    async with cluster(mode, max_in_flight=1) as them:
        them.handler = hang_at_first
        first = them.processes[0]
        await them.publish(1)
        await them.turns()
        (member,) = await them.journal.members()
        assert await them.journal.end(member)
        await them.publish(2)  # the commit in which it is noticed
        await them.turns(5)
        assert cut == [1]
        await them.until_handled(1, 2)
        await them.settled()

        assert first.membership.losses == 1
        assert them.handled == [1, 2]
        assert await them.rows() == []


@pytest.mark.parametrize("mode", MODES)
async def test_what_a_former_owner_writes_is_refused(mode: str) -> None:
    refused: list[int] = []

    async def write_late(process: Process, one: InFlight) -> None:
        with anyio.CancelScope(shield=True):
            for member in await them.journal.members():
                if member.id == one.member.id and not refused:
                    await them.journal.end(member)
            try:
                effect = Append(make_record(99, name="Effect", kind=Kind.CONTROL))
                operations = [effect, *one.acknowledgement(them.clock.time())]
                await process.journal.commit(operations, one.member)
                process.loop.state.acknowledged_in_commit(one)
            except StaleError:
                refused.append(number_of(one))
                raise

    async with cluster(mode, 2) as them:
        them.handler = write_late
        await them.until(lambda: all(one.membership.member for one in them.processes))
        await them.publish(1, by=0)
        await them.until_handled(1)

        effects = await them.journal.read(0, 100, Selection(kind=Kind.CONTROL))
        assert refused == [1]
        assert len(effects.records) == 1


async def test_a_standby_takes_over_after_the_ttl() -> None:
    async with cluster("exclusive", 2) as them:
        owner = next(one for one in them.processes if one.loop.state.owned)
        await them.kill(owner)
        killed = them.clock.now()
        await them.publish(1, by=None)
        await them.until_handled(1)

        assert TTL - 0.5 <= them.clock.now() - killed <= TTL + 1.0


async def test_partitions_move_when_a_process_joins_and_when_it_leaves() -> None:
    async with cluster("key_shared", 1, partitions=8) as them:
        first = them.processes[0].loop.state.owned
        assert len(first) == 8
        (second,) = await them.start(1)
        await them.until(lambda: len(second.loop.state.owned) == 4)
        await them.publish(*((number, f"k{number}") for number in range(40)))
        await them.until_handled(*range(40))
        await second.membership.stop(1.0)
        await them.until(lambda: len(them.processes[0].loop.state.owned) == 8)

        assert them.overlaps == []
        assert them.handled == list(range(40))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", MODES)
async def test_only_the_poison_is_charged_for_the_death_of_processes(mode: str, seed: int) -> None:
    poison = 3 + seed * 5

    async def die(process: Process, one: InFlight) -> None:
        if number_of(one) == poison:
            await them.kill(process)
            await anyio.sleep_forever()

    async with cluster(mode, retry=Retries(attempts=3), max_in_flight=4) as them:
        them.handler = die
        await them.publish(*((number, f"k{number % 4}") for number in range(40)), by=None)
        for _ in range(40):
            if len(set(them.handled)) == 39 and await them.rows(State.DEAD):
                break
            if them.processes[-1].is_dead:
                await them.start(1)
            await them.clock.advance(1.0)
            await them.turns()
        await them.settled()

        (dead,) = await them.rows()
        record = await them.journal.record(dead)
        assert record is not None
        assert (dead.state, int(record.payload)) == (State.DEAD, poison)
        assert set(them.handled) == set(range(40)) - {poison}


async def test_a_process_with_another_selection_stands_by_until_the_last_old_one_has_gone() -> None:
    async with cluster("exclusive", text="one") as them:
        them.text = "two"
        (new,) = await them.start(1)
        await them.publish(1)
        await them.until_handled(1)
        assert (new.loop.is_standby, new.numbers) == (True, [])

        await them.processes[0].membership.stop(1.0)
        await them.publish(2, by=None)
        await them.until(lambda: new.numbers == [2])

        assert not new.loop.is_standby


async def test_a_seek_of_another_process_is_noticed_by_the_owner() -> None:
    async with cluster("exclusive") as them:
        await them.publish(1, 2, 3)
        await them.until_handled(1, 2, 3)
        await them.settled()
        await them.journal.commit([Seek("s", 1)])
        await them.publish(4)
        await them.until(lambda: 4 in them.handled and them.handled.count(3) == 2)

        assert them.processes[0].numbers == [1, 2, 3, 2, 3, 4]


def test_a_process_is_gone_only_if_that_is_certain() -> None:
    here = this_process()
    host, pid, start = here.rsplit(":", 2)

    assert not is_gone(here, here)
    assert is_gone(f"{host}:{pid}:1{start}", here)  # its number was given to another process
    assert is_gone(f"{host}:{2**22 + os.getpid()}:{start}", here)
    assert not is_gone(f"other:{2**22 + os.getpid()}:{start}", here)
    assert not is_gone(f"{host}:{pid}:", here)


async def test_a_handler_that_ends_slowly_takes_no_worker_of_the_next_membership() -> None:
    running, most = 0, 0

    async def end_slowly(process: Process, one: InFlight) -> None:
        nonlocal running, most
        if number_of(one) == 0 and not them.attempts[0][1:]:
            with anyio.CancelScope(shield=True):
                await them.clock.sleep(2.0)
            return
        running += 1
        most = max(most, running)
        await them.clock.sleep(0.05)
        running -= 1

    async with cluster("shared", max_in_flight=2) as them:
        them.handler = end_slowly
        await them.publish(0)
        await them.turns()
        (member,) = await them.journal.members()
        await them.journal.end(member)
        await them.publish(*range(1, 40))
        await them.until_handled(*range(40))

        assert most == 2


async def test_retries_leave_no_tasks_behind() -> None:
    async def fail_once(process: Process, one: InFlight) -> None:
        if one.attempt == 1:
            raise ValueError("not yet")

    async with cluster("shared", retry=Retries(pauses=0.01)) as them:
        them.handler = fail_once
        await them.publish(*range(50))
        await them.until_handled(*range(50))
        await them.settled()

        assert them.processes[0].loop.task_count <= 1 + them.max_in_flight


async def test_a_page_that_was_read_before_a_loss_is_handed_out_to_nobody() -> None:
    async with cluster("exclusive") as them:
        (process,) = them.processes
        state = process.loop.state
        process.loop.pause()
        await them.publish(1, by=None)
        await them.settled()
        assert isinstance(state, PartitionedState)
        page = state.next_page()
        assert page is not None
        state.take_page(page[1], await process.journal.read(page[0], 10, state.selection))
        state.lose_member()

        assert state.operations([], 1) == []
        assert state.committed(kept=True) is None
        assert not state.ready
