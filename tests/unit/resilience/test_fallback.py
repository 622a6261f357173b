"""What is answered when all else failed."""

from __future__ import annotations

import pytest

from msgbus import Refusal
from msgbus.resilience import CircuitBreakerConfig
from tests.fakes import logged
from tests.unit.resilience.flaky import Charge, Down, Flaky, Shop, fails_with, quick


class OutOfStock(Refusal):
    pass


def sync_answer(message: Charge, error: Exception) -> str:
    return f"{type(message).__name__} later: {error}"


async def async_answer(message: Charge, error: Exception) -> str:
    return sync_answer(message, error)


@pytest.mark.parametrize(
    ("fallback", "answer"),
    [
        ("later", "later"),
        (0, 0),
        (sync_answer, "Charge later: no 1"),
        (async_answer, "Charge later: no 1"),
    ],
)
async def test_a_fallback_answers_when_all_else_failed(
    fallback: object, answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(Flaky(9), retry=quick(1), fallback=fallback)

    result = await shop.charge(1)

    assert result.success
    assert result.value == answer
    assert result.attempts == 2
    assert shop.bus.stats().commands["charge"].failed == 0
    (entry,) = logged(caplog, "fallback_used")
    assert (entry["handler"], entry["message_type"]) == ("charge", "Charge")


async def test_a_fallback_does_not_answer_for_a_refusal() -> None:
    shop = Shop(Flaky(0, OutOfStock("none left")), fallback="later")

    fails_with(await shop.charge(), OutOfStock)


async def test_a_fallback_answers_for_an_open_circuit() -> None:
    shop = Shop(breaker=CircuitBreakerConfig(), fallback="later")
    shop.bus.circuit("charge").force_open()

    result = await shop.charge()

    assert result.value == "later"
    assert result.attempts == 0


async def test_a_fallback_that_fails_fails_the_command() -> None:
    def broken(message: Charge, error: Exception) -> str:
        raise LookupError("nothing cached") from error

    shop = Shop(Flaky(9), retry=None, fallback=broken)

    result = await shop.charge()

    fails_with(result, LookupError)
    assert isinstance(result.exception, LookupError)
    assert isinstance(result.exception.__cause__, Down)
