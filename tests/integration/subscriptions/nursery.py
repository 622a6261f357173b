"""Processes to be killed, forked from one that has everything imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

ROOT = Path(__file__).resolve().parents[3]


class Child:
    """One process, and what it has said so far."""

    def __init__(self, nursery: Nursery, pid: int, said: Path) -> None:
        self._nursery = nursery
        self._said = said
        self.pid = pid
        self.is_over = False

    def lines(self) -> list[list[str]]:
        # The last line may be cut off.
        whole = self._said.read_text().rpartition("\n")[0] if self._said.exists() else ""
        return [line.split() for line in whole.splitlines()]

    def until(self, is_so: Callable[[list[list[str]]], bool], within: float = 30.0) -> None:
        end = monotonic() + within
        while not is_so(self.lines()):
            assert monotonic() < end, f"not so within {within:g} s: {self.lines()[-5:]}"
            sleep(0.005)

    def says(self, *words: str) -> bool:
        return any(line[: len(words)] == list(words) for line in self.lines())

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as a power switch would."""
        self.signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def wait(self) -> int:
        self.is_over = True
        return self._nursery.ask("wait", self.pid)


class Nursery:
    """Makes children, and buries them."""

    def __init__(self, worker: subprocess.Popen[str]) -> None:
        self._worker = worker
        self.children: list[Child] = []

    def ask(self, *words: object) -> int:
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.stdin.write(f"{' '.join(map(str, words))}\n")
        self._worker.stdin.flush()
        return int(self._worker.stdout.readline())

    def start(self, what: str, path: Path, run: str) -> Child:
        said = path.with_name(f"{run}.txt")
        child = Child(self, self.ask(what, path, run, said), said)
        self.children.append(child)
        return child


@contextmanager
def nursery() -> Generator[Nursery]:
    command = [sys.executable, "-m", "tests.integration.subscriptions.worker"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        made = Nursery(worker)
        try:
            yield made
        finally:
            for child in made.children:
                if not child.is_over:
                    child.kill()
            assert worker.stdin is not None
            worker.stdin.close()
