"""A process that replays dead letters, and may be killed at any moment.

`python -m tests.integration.letter_worker FILE LOG` opens the file, says so, and replays. Its
handler notes each effect on disk before it returns. A file named `journal.db` is a journal.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from msgbus.journal import SqliteJournal
from msgbus.resilience import (
    DeadLetterEntry,
    DeadLetterQueue,
    JournalDeadLetterStore,
    SqliteDeadLetterStore,
)
from msgbus.testing.conformance.dead_letters import Checked


@asynccontextmanager
async def queue_of(path: Path) -> AsyncGenerator[DeadLetterQueue]:
    """The letters of a file, not opened yet: as they are, claims that are void included."""
    if path.name == "journal.db":
        async with SqliteJournal(path, reserve=0) as journal:
            yield DeadLetterQueue(JournalDeadLetterStore(journal))
    else:
        queue = DeadLetterQueue(SqliteDeadLetterStore(path))
        yield queue
        await queue.close()


async def main(path: str, log: str) -> None:
    effects = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def redeliver(letter: DeadLetterEntry) -> object:
        assert isinstance(letter.message, Checked)
        assert letter.handler == "h"
        os.write(effects, f"{letter.message.number}\n".encode())
        os.fsync(effects)
        await asyncio.sleep(0.002)
        return None

    async with queue_of(Path(path)) as queue, queue:
        queue.connect(redeliver)
        print("open", flush=True)
        report = await queue.replay_all()
        print(report.succeeded, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
