"""A payment service that fails now and then, and once for good: retry, circuit, dead letter."""

import asyncio
import logging

from msgbus import Command
from msgbus.resilience import CircuitBreakerConfig, ResilientMessageBus, RetryConfig


class ChargeCard(Command[str]):
    """The reply says what was charged."""

    order: int


class Payments:
    """Somebody else's service, scripted."""

    def __init__(self) -> None:
        self.script = ["down", "up", "up"] + ["down"] * 6

    async def charge(self, order: int) -> str:
        """Take the money, or fail."""
        if self.script and self.script.pop(0) == "down":
            raise ConnectionError("no answer")
        return f"charged order {order}"


payments = Payments()
bus = ResilientMessageBus(
    retry=RetryConfig(max_retries=2, initial_delay=0.01),
    breaker=CircuitBreakerConfig(failure_threshold=4, recovery_time=1.0),
)


@bus.handles(ChargeCard)
async def charge_card(command: ChargeCard) -> str:
    return await payments.charge(command.order)


async def main() -> None:
    logging.disable()
    async with bus:
        for order in range(1, 6):
            result = await bus.execute(ChargeCard(order=order))
            print(order, result.value or type(result.exception).__name__)
        payments.script.clear()
        await asyncio.sleep(1.0)
        report = await bus.dead_letters.replay_all(answered=True)
        print("replayed:", report.succeeded, "circuit:", bus.circuits["charge_card"].state.value)


asyncio.run(main())
# Output:
# > 1 charged order 1
# > 2 charged order 2
# > 3 ConnectionError
# > 4 ConnectionError
# > 5 CircuitOpenError
# > replayed: 3 circuit: closed
