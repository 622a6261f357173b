"""Processes for tests that kill and stop them, forked from one that has everything imported."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


class Fork:
    """One process, and the lines that it has written so far."""

    def __init__(self, forks: Forks, pid: int, output: Path) -> None:
        self._forks = forks
        self._output = output
        self.pid = pid
        self.has_ended = False

    def lines(self, first: str | None = None) -> list[list[str]]:
        """Return all whole lines, split into words; those that begin with one word only."""
        text = self._output.read_text().rpartition("\n")[0] if self._output.exists() else ""
        lines = [line.split() for line in text.splitlines()]
        return [line for line in lines if first in (None, line[0])]

    def until(self, is_so: Callable[[], bool], within: float = 60.0) -> None:
        """Wait for something that this process writes."""
        end = monotonic() + within
        while not is_so():
            assert monotonic() < end, f"not so within {within:g} s: {self.lines()[-5:]}"
            sleep(0.002)

    def until_written(self, first: str, count: int = 1) -> None:
        """Wait for so many lines that begin with a word."""
        self.until(lambda: len(self.lines(first)) >= count)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def stop(self, journal: Path) -> None:
        """Stop it at any moment, but not for long while it writes to this file.

        As long as a process is stopped inside a transaction, SQLite lets nobody else write: it
        goes on then, and is stopped again.
        """
        while True:
            self.signal(signal.SIGSTOP)
            self.until(self._is_stopped)
            if _can_write(journal):
                return
            self.signal(signal.SIGCONT)

    def _is_stopped(self) -> bool:
        """Tell whether all its threads stand still, which takes a moment on a busy machine."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return all(one.read_text().rpartition(")")[2].split()[0] == "T" for one in tasks)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def wait(self) -> int:
        """Wait for its end; return its exit code."""
        self.has_ended = True
        return self._forks.ask("wait", self.pid)


class Forks:
    """Starts processes, and ends those that are left."""

    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self._server = server
        self._folder = folder
        self.started: list[Fork] = []

    def ask(self, *words: object) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(words) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def start(self, job: str, **options: Any) -> Fork:
        output = self._folder / f"fork{len(self.started)}.txt"
        fork = Fork(self, self.ask(job, str(output), options), output)
        self.started.append(fork)
        return fork

    @property
    def running(self) -> list[Fork]:
        return [one for one in self.started if not one.has_ended]


def _can_write(path: Path) -> bool:
    """Tell whether no process has kept the file to itself for some time."""
    with closing(sqlite3.connect(path, timeout=0.1, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        connection.execute("ROLLBACK")
        return True


@contextmanager
def forks(module: str, folder: Path) -> Generator[Forks]:
    """Import a module whose `main` is `serve(jobs)`, and fork processes from it."""
    with subprocess.Popen(
        [sys.executable, "-m", module],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        made = Forks(server, folder)
        try:
            yield made
        finally:
            for fork in made.running:
                fork.kill()
            assert server.stdin is not None
            server.stdin.close()


# -- in the server -----------------------------------------------------------------------------


def write(*words: object) -> None:
    """Write one line at once: it survives the end of the process."""
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def serve(jobs: dict[str, Callable[..., object]]) -> None:
    """Fork a process for each job that is asked for."""
    for line in sys.stdin:
        job, *words = json.loads(line)
        if job == "wait":
            _, status = os.waitpid(int(words[0]), 0)
            write(os.waitstatus_to_exitcode(status))
        else:
            write(_fork(jobs[job], *words))


def _fork(job: Callable[..., object], output: str, options: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    code = 1
    try:
        job(**options)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
