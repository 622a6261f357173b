"""A resilient bus with a journal: one place decides on other tries, and keeps what died."""

from __future__ import annotations

from pathlib import Path

import pytest

from msgbus import ConfigurationError, Context
from msgbus.resilience import CircuitBreakerConfig, ResilientMessageBus, RetryConfig
from msgbus.testing import VirtualClock
from tests.durable_shop import DownError, Place, Placed, Seen, outcomes, url_of
from tests.fakes import conserves

AT_ONCE = RetryConfig(max_retries=2, initial_delay=0)


async def test_the_policy_is_kept_by_the_subscription_and_tries_are_not_multiplied() -> None:
    bus = ResilientMessageBus(retry=AT_ONCE, breaker=None, journal="memory:")
    attempts: list[int] = []

    @bus.on(Placed)
    async def shaky(event: Placed, context: Context) -> None:
        attempts.append(context.attempt)
        raise DownError

    async with bus:
        event = Placed()
        await bus.publish(event)
        await bus.settled()

        assert attempts == [1, 2, 3]
        (letter,) = await bus.dead_letters.find()
        assert (letter.handler, letter.attempts) == ("shaky:durable.Placed", 3)
        assert await outcomes(bus, event.message_id) == [
            ("shaky", 1, "failed"),
            ("shaky", 2, "failed"),
            ("shaky", 3, "failed"),
            ("shaky", 3, "dead_lettered"),
        ]
        conserves(bus)


async def test_a_policy_that_no_journal_can_keep_is_followed_in_the_process() -> None:
    retry = RetryConfig(max_retries=2, initial_delay=0, on_retry=lambda _: None)
    bus = ResilientMessageBus(retry=retry, breaker=None, journal="memory:")
    seen = Seen(fail={0: 2})
    bus.subscribe(Placed, seen)

    async with bus:
        await bus.publish(Placed())
        await bus.settled()

        assert seen.numbers == [0]
        assert await bus.dead_letters.find() == []


async def test_a_policy_that_is_set_after_the_handler_counts() -> None:
    bus = ResilientMessageBus(retry=AT_ONCE, breaker=None, journal="memory:")
    seen = Seen(fail={0: 9})
    bus.subscribe(Placed, seen)
    bus.policy(Placed, retry=None)

    async with bus:
        await bus.publish(Placed())
        await bus.settled()

        (letter,) = await bus.dead_letters.find()
        assert letter.attempts == 1


async def test_replay_hands_a_dead_letter_to_the_durable_handler_alone() -> None:
    bus = ResilientMessageBus(retry=None, breaker=None, journal="memory:")
    failing, other = Seen(fail={1: 1}), Seen()
    bus.subscribe(Placed, failing, name="failing")
    bus.subscribe(Placed, other, name="other")

    async with bus:
        await bus.publish(Placed(number=1))
        await bus.settled()
        assert (failing.numbers, other.numbers) == ([], [1])

        report = await bus.dead_letters.replay_all()
        assert report.succeeded == 1

        assert (failing.numbers, other.numbers) == ([1], [1])
        assert await bus.dead_letters.find() == []
        conserves(bus)


async def test_commands_and_durable_handlers_share_the_file(tmp_path: Path) -> None:
    async def fail_event(event: Placed) -> None:
        raise DownError("event")

    async def fail_command(command: Place) -> str:
        raise DownError("command")

    bus = ResilientMessageBus(retry=None, breaker=None, journal=url_of(tmp_path))
    bus.subscribe(Placed, fail_event)
    bus.register_command_handler(Place, fail_command)
    async with bus:
        await bus.publish(Placed())
        (await bus.execute(Place())).error  # noqa: B018 (looked at)
        await bus.settled()

    again = ResilientMessageBus(journal=url_of(tmp_path))
    async with again:
        letters = await again.dead_letters.find()
        assert {one.handler for one in letters} == {"fail_event:durable.Placed", "fail_command"}
        assert {one.error_type for one in letters} == {"DownError"}


async def test_the_journal_says_which_commands_were_given_up() -> None:
    async def fail(command: Place) -> str:
        raise DownError

    bus = ResilientMessageBus(retry=AT_ONCE, breaker=None, journal="memory:")
    bus.register_command_handler(Place, fail)
    async with bus:
        command = Place()
        (await bus.execute(command)).error  # noqa: B018 (looked at)
        await bus.settled()

        ends = [one[2] for one in await outcomes(bus, command.message_id)]
        assert ends == ["failed", "failed", "failed", "dead_lettered"]


async def test_an_open_circuit_holds_a_durable_handler_and_burns_no_tries() -> None:
    clock = VirtualClock()
    bus = ResilientMessageBus(
        retry=RetryConfig(max_retries=1, initial_delay=0, jitter=False),
        breaker=CircuitBreakerConfig(failure_threshold=2, recovery_time=100, jitter=0),
        journal="memory:",
        clock=clock,
    )
    seen = Seen(fail={0: 2})
    bus.subscribe(Placed, seen)

    async with bus:
        for number in range(3):
            await bus.publish(Placed(number=number))
        for _ in range(40):
            await clock.advance(10)
        await bus.settled()

        assert seen.numbers == [1, 2]
        (letter,) = await bus.dead_letters.find()
        assert letter.attempts == 2


async def test_dead_letters_may_still_be_kept_elsewhere() -> None:
    bus = ResilientMessageBus(dead_letters=None, journal="memory:")
    with pytest.raises(ConfigurationError, match="keeps no dead letters"):
        _ = bus.dead_letters
