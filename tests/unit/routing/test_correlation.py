"""CorrelationManager: every request ends exactly once, and leaves nothing behind."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import anyio
import pytest

from msgbus.errors import DuplicateRequestError, RequestCancelledError, RequestTimeoutError
from msgbus.routing import CorrelationManager
from msgbus.runtime.clock import VirtualClock
from tests.counts import RACED_REQUESTS, REQUESTS
from tests.evidence import Evidence
from tests.fakes import let_others_run


class Ask:
    """Sends requests into a list, and notes how they end."""

    def __init__(self, **options: Any) -> None:
        self.manager = CorrelationManager(**options)
        self.sent: list[str] = []
        self.ended: list[object] = []

    async def __call__(self, **options: Any) -> None:
        try:
            self.ended.append(await self.manager.request(self.sent.append, **options))
        except Exception as error:
            self.ended.append(error)


async def test_a_reply_ends_a_request() -> None:
    ask = Ask()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await let_others_run()
        assert ask.manager.is_pending(ask.sent[0])
        assert ask.manager.reply(ask.sent[0], "answer")

    assert ask.ended == ["answer"]
    assert ask.manager.pending == 0
    assert ask.manager.stats().replied == 1


async def test_a_reply_that_comes_while_sending_is_not_lost() -> None:
    manager = CorrelationManager()

    async def send(request_id: str) -> None:
        manager.reply(request_id, 42)

    assert await manager.request(send) == 42
    assert await manager.request(lambda request_id: manager.reply(request_id, 43)) == 43


async def test_an_error_ends_a_request_as_it_is() -> None:
    manager = CorrelationManager()

    with pytest.raises(LookupError, match="no such order"):
        await manager.request(lambda one: manager.fail(one, LookupError("no such order")))

    assert manager.stats().failed == 1


async def test_a_request_that_cannot_be_sent_ends_with_that_error() -> None:
    def send(request_id: str) -> None:
        raise ConnectionError

    manager = CorrelationManager()

    with pytest.raises(ConnectionError):
        await manager.request(send)

    assert manager.pending == 0
    assert manager.stats().failed == 1


async def test_an_answer_counts_even_if_its_sending_fails_afterwards() -> None:
    manager = CorrelationManager()

    def send(request_id: str) -> None:
        manager.reply(request_id, "answer")
        raise ConnectionError

    assert await manager.request(send) == "answer"


async def test_a_request_without_an_answer_runs_out_of_time() -> None:
    clock = VirtualClock()
    ask = Ask(clock=clock)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await clock.advance(29.9)
        assert ask.ended == []
        await clock.advance(0.1)

    assert isinstance(ask.ended[0], RequestTimeoutError)
    assert isinstance(ask.ended[0], TimeoutError)
    assert str(ask.ended[0]) == "No reply to the request within 30 s."
    assert ask.manager.pending == 0


async def test_time_runs_out_while_sending_too() -> None:
    clock = VirtualClock()
    manager = CorrelationManager(clock=clock, timeout=1)
    ended: list[str] = []

    async def send(request_id: str) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("sending")

    async def ask() -> None:
        with pytest.raises(RequestTimeoutError):
            await manager.request(send)
        ended.append("request")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await clock.advance(1)

    assert ended == ["sending", "request"]


async def test_a_cancelled_caller_frees_its_request() -> None:
    ask = Ask()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await let_others_run()
        tasks.cancel_scope.cancel()

    assert ask.manager.pending == 0
    assert ask.manager.stats().cancelled == 1
    assert not ask.manager.reply(ask.sent[0], "late")
    assert ask.manager.stats().late == 1


async def test_somebody_else_can_call_a_request_off() -> None:
    ask = Ask()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await let_others_run()
        assert ask.manager.cancel(ask.sent[0])
        assert not ask.manager.cancel(ask.sent[0])

    assert isinstance(ask.ended[0], RequestCancelledError)


async def test_late_duplicate_and_unknown_replies_are_counted_apart() -> None:
    clock = VirtualClock()
    ask = Ask(clock=clock, timeout=1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await clock.advance(1)
    manager = ask.manager
    await manager.request(lambda one: manager.reply(one, 1), correlation_id="answered")

    assert not manager.reply(ask.sent[0], "late")
    assert not manager.fail("answered", ValueError())
    assert not manager.reply("answered", 2)
    assert not manager.reply("never asked", 3)

    stats = manager.stats()
    assert (stats.late, stats.duplicate, stats.unknown) == (1, 2, 1)


async def test_what_is_remembered_of_ended_requests_is_bounded() -> None:
    manager = CorrelationManager(remember=10)

    for number in range(100):
        await manager.request(lambda one: manager.reply(one, 1), correlation_id=str(number))

    assert len(vars(manager)["_ended"]) == 10
    assert not manager.reply("99", 1)
    assert not manager.reply("0", 1)
    assert (manager.stats().duplicate, manager.stats().unknown) == (1, 1)


async def test_two_open_requests_cannot_share_an_id() -> None:
    ask = Ask()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: ask(correlation_id="one"))
        await let_others_run()
        with pytest.raises(DuplicateRequestError, match="'one'"):
            await ask.manager.request(ask.sent.append, correlation_id="one")
        ask.manager.reply("one", "answer")

    assert ask.ended == ["answer"]
    assert ask.manager.stats().started == 1


async def test_a_reply_may_come_from_another_thread() -> None:
    manager = CorrelationManager()

    def send(request_id: str) -> None:
        threading.Thread(target=manager.reply, args=(request_id, "from afar")).start()

    assert [await manager.request(send) for _ in range(50)] == ["from afar"] * 50
    assert manager.pending == 0


class CoarseClock(VirtualClock):
    """Fires all timers that are due at once, where the real one gives tasks turns between."""

    async def advance(self, seconds: float) -> None:
        self._now += seconds
        due = [fire for when, _, fire in self._timers if when <= self._now]
        self._timers.clear()  # every test below advances beyond all of them
        for fire in due:
            fire()
        await let_others_run()


class Storm:
    """Requests that are answered, refused, forgotten and called off, by chance."""

    def __init__(self) -> None:
        self.clock = CoarseClock()
        self.manager = CorrelationManager(clock=self.clock, timeout=10)
        self.chance = random.Random(4)
        self.ends: Counter[str] = Counter()
        self.begun = 0
        self.waiting: list[str] = []
        self.scopes: list[anyio.CancelScope] = []

    def send(self, request_id: str) -> None:
        way = self.chance.random()
        if way < 0.3:
            self.manager.reply(request_id, "now")
        elif way < 0.4:
            self.manager.fail(request_id, LookupError())
        elif way < 0.5:
            raise ConnectionError
        elif way < 0.9:
            self.waiting.append(request_id)

    async def ask(self, number: int) -> None:
        for _ in range(number):
            self.begun += 1
            with anyio.CancelScope() as scope:
                self.scopes.append(scope)
                try:
                    self.ends[str(await self.manager.request(self.send))] += 1
                except Exception as error:
                    self.ends[type(error).__name__] += 1
            if scope.cancelled_caught:
                self.ends["cancelled"] += 1

    def answer(self) -> None:
        """One round of answers, some twice, and of requests called off."""
        for request_id in self.waiting:
            way = self.chance.random()
            if way < 0.5:
                self.manager.reply(request_id, "later")
            if way < 0.1:
                self.manager.reply(request_id, "twice")
            if way > 0.9:
                self.manager.cancel(request_id)
        self.waiting.clear()
        for scope in self.scopes:
            if self.chance.random() < 0.01:
                scope.cancel()
        self.scopes.clear()


@pytest.mark.stress("routing")
async def test_many_requests_with_all_sorts_of_ends_leave_none(evidence: Evidence) -> None:
    number, at_once = REQUESTS, 1_000
    storm = Storm()

    async with anyio.create_task_group() as tasks:
        for _ in range(at_once):
            tasks.start_soon(storm.ask, number // at_once)
        while storm.begun < number or storm.manager.pending:
            await let_others_run()
            storm.answer()
            await storm.clock.advance(10)

    stats, ends = storm.manager.stats(), storm.ends
    assert sum(ends.values()) == number == stats.started
    assert stats.pending == storm.manager.pending == 0
    assert stats.replied == ends["now"] + ends["later"]
    assert stats.failed == ends["LookupError"] + ends["ConnectionError"]
    assert stats.timed_out == ends["RequestTimeoutError"]
    assert stats.cancelled == ends["cancelled"] + ends["RequestCancelledError"]
    assert min(ends.values()) > 0
    assert stats.duplicate > 0
    assert stats.started == stats.replied + stats.failed + stats.timed_out + stats.cancelled
    evidence("requests that end in every way", requests=number, lost=0, doubled=0)


@pytest.mark.stress("routing")
async def test_threads_that_race_to_answer_end_each_request_once(evidence: Evidence) -> None:
    threads, number = 8, RACED_REQUESTS
    manager = CorrelationManager(timeout=60)
    wins = [0] * threads
    ids = [str(one) for one in range(number)]
    go = threading.Event()

    def answer(place: int) -> None:
        go.wait(30)
        for request_id in ids:
            wins[place] += manager.reply(request_id, place)

    workers = [threading.Thread(target=answer, args=(place,)) for place in range(threads)]
    for worker in workers:
        worker.start()
    answers: list[int] = []

    async def ask(request_id: str) -> None:
        answers.append(await manager.request(lambda one: None, correlation_id=request_id))

    async with anyio.create_task_group() as tasks:
        for request_id in ids:
            tasks.start_soon(ask, request_id)
        await let_others_run()
        assert manager.pending == number
        go.set()
    for worker in workers:
        worker.join()

    assert Counter(answers) == {place: won for place, won in enumerate(wins) if won}
    assert sum(wins) == number
    assert manager.stats().duplicate == number * (threads - 1)
    assert manager.pending == 0
    evidence("requests that 8 threads answer at once", requests=number, lost=0, doubled=0)
