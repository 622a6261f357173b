"""A read model folded from history, key by key, on all cores (needs msgbus[spark])."""

import asyncio
import tempfile
from pathlib import Path

from pydantic import BaseModel

from msgbus import Event, MessageBus, pipeline
from msgbus.pipeline import Projection


class Moved(Event, name="bank.Moved", key="account"):
    """Money came or, below zero, went."""

    account: str
    cents: int


class Balance(BaseModel):
    """What is known of an account."""

    account: str
    cents: int = 0
    lowest: int = 0


class Balances(Projection[Balance, Moved]):
    """How much there is, and how little there ever was; that depends on the order."""

    def initial(self, key: str) -> Balance:
        """An account without money."""
        return Balance(account=key)

    def apply(self, state: Balance, event: Moved) -> Balance:
        """The account after one more move."""
        cents = state.cents + event.cents
        return Balance(account=state.account, cents=cents, lowest=min(state.lowest, cents))


async def work(url: str) -> None:
    async with MessageBus(journal=url) as bus:
        for account, cents in [("ann", 100), ("bo", -30), ("bo", 80), ("ann", -40)]:
            await bus.publish(Moved(account=account, cents=cents))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        url = f"sqlite:///{Path(name, 'bank.db')}"
        asyncio.run(work(url))
        pipe = pipeline.open(url)
        for row in pipe.replay(Balances).orderBy("account").collect():
            print(row["account"], row["cents"], row["lowest"])
        pipe.spark.stop()
# Output:
# > ann 60 0
# > bo 50 -30
