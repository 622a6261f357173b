"""Processes that tests of clusters start, wait for, kill, and always end."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import pyspark

from msgbus.pipeline.java import find_java

SPARK_HOME = Path(pyspark.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 600.0
"""Seconds after which something is broken, and not only slow."""

SHORT_LIVED = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""For JVMs that live for seconds: compiling well would cost them more than it gains."""

END = object()


class Running:
    """A program in a process group of its own, with what it has printed so far."""

    def __init__(self, command: Sequence[str], cwd: Path, **env: str) -> None:
        java = find_java()
        settings = {
            "JAVA_HOME": str(java.home),
            **SHORT_LIVED,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_NO_DAEMONIZE": "1",
            "PYTHONPATH": str(ROOT),
            **env,
        }
        cwd.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=cwd,
            env={**os.environ, **settings},
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        if error is not None:
            error.add_note("It had printed:\n" + self.text[-6000:])

    @property
    def text(self) -> str:
        """Everything that it has printed."""
        return "".join(self.lines)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The next line in which this is found."""
        while True:
            line = self._queue.get(timeout=PATIENCE)
            assert isinstance(line, str), f"It ended before it printed {pattern!r}:\n{self.text}"
            found = re.search(pattern, line)
            if found is not None:
                return found

    def end(self) -> int:
        """Its exit code, when it has ended by itself."""
        code = self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def kill(self) -> None:
        """End it and all that it has started, as a power cut would."""
        with suppress(ProcessLookupError):  # it is gone, and so are its children
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            self._queue.put(line)
        self._queue.put(END)


def python(program: Path, *arguments: object, cwd: Path, **env: str) -> Running:
    """A Python program."""
    return Running([sys.executable, str(program), *map(str, arguments)], cwd, **env)


def spark_class(*arguments: str, cwd: Path, **env: str) -> Running:
    """A program of Spark's own."""
    command = [str(SPARK_HOME / "bin" / "spark-class"), *arguments]
    return Running(command, cwd, SPARK_HOME=str(SPARK_HOME), **env)


class Cluster:
    """A standalone master and its workers."""

    def __init__(self, url: str, workers: Sequence[Running]) -> None:
        self.url = url
        self.workers = workers

    def submit(self, program: Path, *arguments: object, cwd: Path) -> Running:
        """A Python program, by `spark-submit`."""
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "4",
            "spark.sql.adaptive.coalescePartitions.enabled": "false",
            "spark.log.level": "WARN",
        }
        said = [part for item in settings.items() for part in ("--conf", "=".join(item))]
        command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", self.url, *said]
        command += [str(program), *map(str, arguments)]
        return Running(command, cwd, SPARK_HOME=str(SPARK_HOME))


@contextmanager
def cluster(folder: Path, workers: int = 2) -> Generator[Cluster, None, None]:
    """A master and workers of one core each on loopback, on ports that were free."""
    master = "org.apache.spark.deploy.master.Master"
    worker = "org.apache.spark.deploy.worker.Worker"
    local = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    small = {"SPARK_DAEMON_MEMORY": "256m"}
    with spark_class(master, *local, cwd=folder / "master", **small) as boss:
        url = boss.wait_for(r"Starting Spark master at (spark://\S+)")[1]
        size = ("--cores", "1", "--memory", "1g")
        started: list[Running] = []
        try:
            for number in range(workers):
                cwd = folder / f"worker{number}"
                where = ("--work-dir", str(cwd / "work"))
                started.append(spark_class(worker, *local, *size, *where, url, cwd=cwd, **small))
            for one in started:
                one.wait_for("Successfully registered with master")
            yield Cluster(url, started)
        finally:
            for one in started:
                one.kill()
