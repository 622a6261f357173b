"""The worker as the demo sees it: a process that is started, heard, and killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, final

import anyio
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

from msgbus.demo.durable.folder import DemoError, Folder
from msgbus.demo.durable.worker import FINISH


@final
class Worker:
    """One life of the worker."""

    def __init__(self, process: Process, number: int, mail: Path) -> None:
        self._process = process
        self._news = anyio.Event()
        self._is_silent = False
        self.number = number
        self.mail = mail
        self.log: list[Mapping[str, Any]] = []
        """What it has logged so far."""

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def logged(self, event: str) -> list[Mapping[str, Any]]:
        """Its log events of this name."""
        return [line for line in self.log if line.get("event") == event]

    async def hear(self, event: str, times: int = 1) -> Mapping[str, Any]:
        """Wait until it has logged `event` so many times; the last of them.

        Raises:
            DemoError: It has ended, so it will not any more.
        """
        while len(found := self.logged(event)) < times:
            if self._is_silent:
                code = await self._process.wait()
                message = (
                    f"Worker {self.number} ended by itself with code {code}, before it logged "
                    f"{event}. What it wrote to standard error is above."
                )
                raise DemoError(message)
            await self._news.wait()
        return found[times - 1]

    async def kill(self) -> int:
        """End it as `kill -9` does; gives its exit code."""
        self._process.kill()
        return await self._process.wait()

    async def finish(self) -> None:
        """Tell it that there will be no more sales."""
        stdin = self._process.stdin
        assert stdin is not None  # noqa: S101 (it was started with a pipe)
        await stdin.send(f"{FINISH}\n".encode())

    async def listen(self) -> None:
        """Read its log until it ends."""
        stdout = self._process.stdout
        assert stdout is not None  # noqa: S101 (it was started with a pipe)
        rest = ""
        async for text in TextReceiveStream(stdout):
            *lines, rest = (rest + text).split("\n")
            self.log += [json.loads(line) for line in lines]
            self._tell()
        self._is_silent = True
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, anyio.Event()
        news.set()


@asynccontextmanager
async def start_worker(folder: Folder, number: int) -> AsyncGenerator[Worker]:
    """A worker process; ended with the block, if it still lives."""
    mail = folder.diary(number)
    mail.touch()
    process = await anyio.open_process(
        [sys.executable, "-m", "msgbus.demo.durable.worker", folder.url, str(mail), str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None,
        # A Ctrl-C is for the demo, which then ends the worker.
        start_new_session=True,
    )
    worker = Worker(process, number, mail)
    async with process, anyio.create_task_group() as listening:
        listening.start_soon(worker.listen)
        try:
            yield worker
        finally:
            if process.returncode is None:
                process.kill()
