"""`LetterBuffer`: letters on their way to a journal, so that nobody who adds one waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias, final

import anyio

from msgbus.errors import DeadLetterStoreError, JournalError, JournalLockedError
from msgbus.resilience.dead_letters.store import Notice, Overflow
from msgbus.runtime.event_loop import Runtime, current_runtime, run_apart
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.resilience.dead_letters.entry import DeadLetterEntry
    from msgbus.runtime.event_loop import LoopReply

BATCH: Final = 1_000
"""Letters in one commit, at most."""

_PAUSE: Final = 0.05
"""Seconds between two attempts on a file that others keep locked."""

_OF_ALL: Final = (JournalError, DeadLetterStoreError)
"""Errors of the store as a whole, not of one letter."""

Write: TypeAlias = "Callable[[Sequence[DeadLetterEntry]], Awaitable[Sequence[Notice]]]"
"""Keeps letters, all or none; returns what was dropped or refused for it."""


@final
class LetterBuffer:
    """A bounded line of letters, and a thread that writes them while there are any.

    The thread is no daemon: a process that ends without closing the store first writes what
    was added. What is added by functions that run at the very end is written before `add`
    returns. What has gathered while a commit was under way is the next one. `write` is called on
    an event loop of the thread; `tell` with letters that are lost.
    """

    def __init__(
        self,
        write: Write,
        tell: Callable[[Sequence[Notice]], None],
        *,
        buffer: int,
        overflow: Overflow,
    ) -> None:
        self._write = write
        self._tell = tell
        self._buffer = buffer
        self._overflow = overflow
        self._lock = threading.Lock()
        self._line: deque[DeadLetterEntry] = deque()
        self._in_flight = 0
        self._added = 0
        self._settled = 0
        """Letters that are written, or told as lost."""
        self._one_by_one = 0
        """Letters that are written each on its own, as together they cannot be."""
        self._is_running = False
        self._waiting: list[tuple[int, Runtime, LoopReply]] = []
        self.is_closing = False

    def __len__(self) -> int:
        return len(self._line) + self._in_flight

    def add(self, letter: DeadLetterEntry) -> str | None:
        """Put a letter in line; return why it is refused."""
        dropped: DeadLetterEntry | None = None
        with self._lock:
            if len(self) >= self._buffer:
                if self._overflow is Overflow.REJECT or not self._line:
                    return f"the store does not keep up ({self._buffer} letters wait for it)"
                dropped = self._line.popleft()
                self._settled += 1
            self._line.append(letter)
            self._added += 1
        if dropped is not None:
            self._tell([Notice("dropped", dropped, "the store does not keep up")])
        return None

    def start(self) -> None:
        """Begin to write, unless that is under way."""
        with self._lock:
            if self._is_running or not self._line:
                return
            self._is_running = True
        thread = threading.Thread(target=self._run, name="msgbus dead letters", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is about to end, and starts no thread any more
            self._run()
        else:
            if not threading.main_thread().is_alive():
                thread.join()  # nobody else waits for it any more

    async def flush(self) -> None:
        """Return once everything that was added so far is written, or told as lost.

        Raises:
            DeadLetterStoreError: It cannot be written now, and waits.
        """
        runtime = current_runtime()
        reply = runtime.reply()
        with self._lock:
            if not len(self):
                return
            self._waiting.append((self._added, runtime, reply))
        self.start()
        error: Exception | None = await reply
        if error is not None:
            raise DeadLetterStoreError(str(error)) from error

    def forked(self) -> None:
        """Begin anew in the child of a process that was forked: what waits is the parent's."""
        self._lock = threading.Lock()
        self._line.clear()
        self._waiting.clear()
        self._settled, self._in_flight, self._is_running = self._added, 0, False

    def refuse_all(self, reason: str) -> None:
        """Refuse what is in line, and say so."""
        with self._lock:
            letters = list(self._line)
            self._line.clear()
            self._settled += len(letters)
        self._wake()
        self._tell([Notice("refused", letter, reason) for letter in letters])

    # -- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            run_apart(self._work)
        except RuntimeError as error:  # where none can be run
            self._is_running = False
            self.refuse_all(redact_exception(error))

    async def _work(self) -> None:
        while batch := self._take():
            await self._write_batch(batch)

    def _take(self) -> list[DeadLetterEntry]:
        with self._lock:
            most = 1 if self._one_by_one else BATCH
            self._one_by_one = max(self._one_by_one - 1, 0)
            batch = [self._line.popleft() for _ in range(min(most, len(self._line)))]
            self._in_flight = len(batch)
            # In the same step: one that comes a moment later begins anew.
            self._is_running = bool(batch)
            return batch

    async def _write_batch(self, batch: list[DeadLetterEntry]) -> None:
        try:
            notices = await self._write(batch)
        except JournalLockedError as error:
            if self._may_wait():
                self._put_back(batch)
                self._wake(error)
                await anyio.sleep(_PAUSE)
                return
            notices = _refused(batch, error)
        except Exception as error:  # the border to the disk: nothing may end this thread
            if len(batch) > 1 and not isinstance(error, _OF_ALL):
                self._put_back(batch)
                self._one_by_one = len(batch)  # one of them must not hold up the others
                return
            notices = _refused(batch, error)
        self._tell(notices)
        self._settle(len(batch))

    def _may_wait(self) -> bool:
        return not self.is_closing and threading.main_thread().is_alive()

    def _put_back(self, batch: list[DeadLetterEntry]) -> None:
        with self._lock:
            self._line.extendleft(reversed(batch))
            self._in_flight = 0

    def _settle(self, number: int) -> None:
        with self._lock:
            self._settled += number
            self._in_flight -= number
        self._wake()

    def _wake(self, error: Exception | None = None) -> None:
        """Let those go on whose letters are settled; all of them if there was an error."""
        with self._lock:
            ready = [one for one in self._waiting if error or one[0] <= self._settled]
            self._waiting = [one for one in self._waiting if one not in ready]
        for _, runtime, reply in ready:
            runtime.call_soon(partial(_give, reply, error))


def _give(reply: LoopReply, error: Exception | None) -> None:
    if not reply.done():
        reply.set_result(error)


def _refused(batch: Sequence[DeadLetterEntry], error: Exception) -> list[Notice]:
    text = redact_exception(error)
    if not isinstance(error, _OF_ALL):
        text = f"it cannot be written: {type(error).__name__}"
    return [Notice("refused", letter, text) for letter in batch]
