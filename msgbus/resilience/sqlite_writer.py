"""The one thread that writes dead letters to a file.

Everything that is written goes through one line, in order: letters, which nobody waits for, and
calls, whose result somebody awaits. What has gathered while a commit was under way is the next
commit. The line is bounded for letters, so that a file that does not keep up, or cannot be
written at all, costs no more memory than that, and never the caller's time.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, final

from msgbus.errors import DeadLetterStoreError
from msgbus.resilience import sqlite_schema as schema
from msgbus.resilience.letters import DeadLetterEntry
from msgbus.resilience.stores import Notice, Overflow

T = TypeVar("T")

BATCH: Final = 1_000
"""Most jobs in one commit."""

_PAUSE: Final = 0.05
"""Seconds between two tries on a file that others keep locked."""


@final
class _Call:
    """Work on the connection whose result somebody awaits."""

    __slots__ = ("future", "outcome", "work")

    def __init__(self, work: Callable[[sqlite3.Connection], Any]) -> None:
        self.work = work
        self.future: Future[Any] = Future()
        self.outcome: tuple[Any, BaseException | None] = (None, None)


Keep: TypeAlias = Callable[[sqlite3.Connection, DeadLetterEntry], Sequence[Notice]]
"""Writes one letter, and says what had to go for it."""


@final
class Writer:
    """A thread with a connection of its own, and the line of what is to be written."""

    def __init__(
        self,
        path: Path,
        *,
        keep: Keep,
        timeout: float,
        buffer: int,
        overflow: Overflow,
        tell: Callable[[Notice], None],
    ) -> None:
        self._path = path
        self._keep = keep
        self._timeout = timeout
        self._buffer = buffer
        self._overflow = overflow
        self._tell = tell
        self._wake = threading.Condition()
        self._line: deque[DeadLetterEntry | _Call] = deque()
        self._letters = 0
        """Letters that were handed over and are not yet written, or told as lost."""

        self._stopping = False
        self._connection: sqlite3.Connection | None = None
        self._thread = threading.Thread(target=self._run, name="msgbus-dead-letters", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether every letter that was handed over is written, or told as lost."""
        return self._letters == 0

    def offer(self, letter: DeadLetterEntry) -> str | None:
        """Hand a letter over; why not, if it is refused."""
        dropped: DeadLetterEntry | None = None
        with self._wake:
            if self._stopping:
                return "the store is closed"
            if self._letters >= self._buffer:
                reason = f"the file does not keep up ({self._buffer} letters wait to be written)"
                dropped = self._drop_one()
                if dropped is None:
                    return reason
                self._letters -= 1
            self._line.append(letter)
            self._letters += 1
            self._wake.notify()
        if dropped is not None:
            self._tell(Notice("dropped", dropped, "the file does not keep up"))
        return None

    def submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Run `work` in a transaction, after everything handed over so far.

        The future has its result once that is committed.
        """
        call = _Call(work)
        with self._wake:
            if self._stopping:
                call.future.set_exception(
                    DeadLetterStoreError(f"The store {self._path} is closed.")
                )
                return call.future
            self._line.append(call)
            self._wake.notify()
        return call.future

    def stop(self) -> None:
        """Write what is there, and end."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end."""
        self._thread.join(timeout)

    def _drop_one(self) -> DeadLetterEntry | None:
        """Take the oldest letter out of the line; those being written just now are not in it."""
        if self._overflow is Overflow.DROP_OLDEST:
            for place, job in enumerate(self._line):
                if not isinstance(job, _Call):
                    del self._line[place]
                    return job
        return None

    # -- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._line and not self._stopping:
                    self._wake.wait()
                if not self._line:
                    break
                batch = [self._line.popleft() for _ in range(min(BATCH, len(self._line)))]
            self._write(batch)
        self._disconnect()

    def _write(self, batch: Sequence[DeadLetterEntry | _Call]) -> None:
        """One transaction, and what follows from how it ended."""
        notices: list[Notice] = []
        try:
            connection = self._connected()
            connection.execute("BEGIN IMMEDIATE")
            for job in batch:
                if isinstance(job, _Call):
                    self._call(connection, job)
                else:
                    notices += self._keep(connection, job)
            connection.execute("COMMIT")
        except Exception as error:  # the border to the disk: nothing may end this thread
            self._failed(batch, error)
            return
        self._done(batch, notices)

    def _call(self, connection: sqlite3.Connection, call: _Call) -> None:
        connection.execute("SAVEPOINT call")
        try:
            call.outcome = (call.work(connection), None)
        except sqlite3.Error:
            raise
        except BaseException as error:
            # The caller's own: it undoes this call, and not its neighbours.
            call.outcome = (None, error)
            connection.execute("ROLLBACK TO call")
        connection.execute("RELEASE call")

    def _done(self, batch: Sequence[DeadLetterEntry | _Call], notices: Sequence[Notice]) -> None:
        self._settle_letters(batch, notices)
        for job in batch:
            if isinstance(job, _Call):
                value, error = job.outcome
                if error is None:
                    job.future.set_result(value)
                else:
                    job.future.set_exception(error)

    def _failed(self, batch: Sequence[DeadLetterEntry | _Call], error: Exception) -> None:
        self._disconnect()
        told: Exception = error
        if isinstance(error, sqlite3.Error):
            told = schema.explained(error, self._path)
        letters = [job for job in batch if not isinstance(job, _Call)]
        if schema.is_busy(error) and letters and self._wait_for_another_try(letters):
            letters = []
        self._settle_letters(letters, [Notice("refused", one, str(told)) for one in letters])
        for job in batch:
            if isinstance(job, _Call):
                job.future.set_exception(told)

    def _wait_for_another_try(self, letters: Sequence[DeadLetterEntry]) -> bool:
        """Put letters back in front, unless this is the end."""
        with self._wake:
            if self._stopping:
                return False
            self._line.extendleft(reversed(letters))
            self._wake.wait(_PAUSE)
        return True

    def _settle_letters(
        self, jobs: Sequence[DeadLetterEntry | _Call], notices: Sequence[Notice]
    ) -> None:
        for notice in notices:
            with suppress(Exception):  # a listener's trouble is its own
                self._tell(notice)
        with self._wake:
            self._letters -= sum(1 for job in jobs if not isinstance(job, _Call))

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = schema.open_writer(self._path, timeout=self._timeout)
        return self._connection

    def _disconnect(self) -> None:
        """Close the connection, which undoes what was not committed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()
