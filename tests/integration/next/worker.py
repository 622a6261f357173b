"""One process of a kill test: handles messages of a journal until it is ended.

Each message has an effect, which is written in the commit that acknowledges the message.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import anyio
from uuid_utils import uuid7

from msgbus._next.journal.operations import Append, Operation, Reply
from msgbus._next.journal.records import Kind, Order, Selection
from msgbus._next.journal.sqlite.journal import SqliteJournal
from msgbus._next.subscriptions.in_flight import InFlight
from msgbus._next.subscriptions.loop import (
    DeliveryRules,
    PartitionedLoop,
    SharedLoop,
    SubscriptionLoop,
)
from msgbus._next.subscriptions.members import Membership
from msgbus._next.subscriptions.partitioned import PartitionedState
from msgbus._next.subscriptions.shared import SharedState
from msgbus.runtime.clock import SystemClock

TTL = 1.0
QUEUE = "commands:Message"
ORDERS = {"exclusive": Order.LOG, "key_shared": Order.KEY}


class Retries:
    """Retry three times, with short pauses and one that is kept in the journal."""

    in_process = 0.05

    def pause(self, attempt: int, error: BaseException | None) -> float | None:
        return {0: 0.0, 1: 0.01, 2: 0.2, 3: 0.02}.get(attempt)


class Worker:
    """Serves one subscription of a journal."""

    def __init__(self, path: str, mode: str, *, fenced: bool) -> None:
        self.journal = SqliteJournal(path)
        self._mode = mode
        self._fenced = fenced
        clock = SystemClock()
        self.membership = Membership(self.journal, clock, ttl=TTL)
        order = ORDERS.get(mode, Order.NONE)
        selection = Selection(
            kind=Kind.COMMAND if mode == "queue" else Kind.EVENT,
            names={"Message"},
            order=order,
            partitions=8 if order is Order.KEY else 1,
        )
        rules, gate = DeliveryRules(retry=Retries()), self.membership.gate
        self.loop: SubscriptionLoop[Any]
        if order is Order.NONE:
            name = QUEUE if mode == "queue" else "work"
            shared = SharedState(name, selection, clock, max_in_flight=4, is_queue=mode == "queue")
            self.loop = SharedLoop(self.journal, shared, self.handle, rules, gate)
        else:
            limit = 4 if order is Order.KEY else 1
            owned = PartitionedState("work", selection, clock, max_in_flight=limit)
            self.loop = PartitionedLoop(self.journal, owned, self.handle, rules, gate)
        self.membership.add(self.loop)

    async def handle(self, one: InFlight) -> Reply | None:
        await anyio.sleep(random.choice([0.0, 0.001, 0.01]))
        if random.random() < 0.02 and one.attempt == 1:
            raise ValueError("fails once")
        record = one.record
        effect = record._replace(message_id=str(uuid7()), name="Effect", kind=Kind.CONTROL)
        operations: list[Operation] = [Append(effect)]
        if not self._fenced:
            await self.journal.commit(operations)
            return None
        operations += one.acknowledgement(SystemClock.time())
        if self._mode == "queue":
            operations.append(Reply(record.message_id, SystemClock.time(), b"null"))
        await self.journal.commit(operations, one.member)
        self.loop.state.acknowledged_in_commit(one)
        return None


async def main() -> None:
    path, mode, fenced = sys.argv[1:]
    worker = Worker(path, mode, fenced=fenced == "fenced")
    await worker.membership.start()
    sys.stdout.write("started\n")
    sys.stdout.flush()
    await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
