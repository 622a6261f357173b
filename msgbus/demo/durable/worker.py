"""The worker: `python -m msgbus.demo.durable.worker URL MAIL NUMBER`, started by the demo.

It writes its log to standard output, a line of JSON for each event, and works until it is
told to finish, or killed.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread

from msgbus.demo.durable.warehouse import open_warehouse

READY: Final = "worker_ready"
DONE: Final = "worker_done"
FINISH: Final = "finish"
"""What its parent writes to it when there will be no more sales."""


class LogLines(logging.Handler):
    """Log events of the bus as lines of JSON."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one."""
        data: dict[str, Any] = getattr(record, "msgbus", {})
        tell(**data, text=record.getMessage())


def tell(**data: object) -> None:
    """Write one line, in one piece."""
    sys.stdout.write(json.dumps(data, default=str) + "\n")
    sys.stdout.flush()


async def work(url: str, mail: Path, number: int) -> None:
    """Handle sales until told to finish, and then what is left of them."""
    bus = open_warehouse(url, number, mail)
    async with bus:
        tell(event=READY)
        # The end of the input means that the parent is gone: nobody waits for the rest.
        if (await anyio.to_thread.run_sync(sys.stdin.readline)).strip() == FINISH:
            await bus.settled()
    tell(event=DONE)


def main(arguments: Sequence[str]) -> None:
    """Run one worker."""
    url, mail, number = arguments
    log = logging.getLogger("msgbus")
    log.setLevel(logging.INFO)
    log.addHandler(LogLines())
    log.propagate = False
    anyio.run(work, url, Path(mail), int(number))


if __name__ == "__main__":
    main(sys.argv[1:])
