"""Dead letters on their way into a journal: nobody who adds one waits for the disk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias, final

import anyio

from msgbus.errors import JournalLockedError
from msgbus.resilience.stores import Notice, Overflow
from msgbus.runtime.event_loop import Runtime, current_runtime
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.resilience.letters import DeadLetterEntry
    from msgbus.runtime.event_loop import Reply

BATCH: Final = 1_000
"""Most letters in one transaction."""

_PAUSE: Final = 0.05
"""Seconds between two tries on a file that others keep locked."""

Write: TypeAlias = "Callable[[Sequence[DeadLetterEntry]], Awaitable[Sequence[Notice]]]"
"""Keeps letters, in one transaction; who was lost for it."""


@final
class Mailbag:
    """A bounded line of letters, and the detached task that empties it while there are any.

    What has gathered while a transaction was under way is the next one.
    """

    def __init__(
        self,
        write: Write,
        tell: Callable[[Notice], None],
        is_ready: Callable[[], bool],
        *,
        buffer: int,
        overflow: Overflow,
    ) -> None:
        self._write = write
        self._is_ready = is_ready
        """Whether there is a journal already; until then letters wait in line."""
        self._tell = tell
        self._buffer = buffer
        self._overflow = overflow
        self._lock = threading.Lock()
        self._line: deque[DeadLetterEntry] = deque()
        self._in_hand = 0
        """Letters that are being written."""
        self._is_working = False
        self._waiting: list[tuple[Runtime, Reply]] = []
        self.runtime: Runtime | None = None
        """Where letters are written that come from other threads; `None` for not yet."""
        self.is_closing = False

    @property
    def is_empty(self) -> bool:
        """Whether every letter is written, or told as lost."""
        return not self._line and not self._in_hand

    def add(self, letter: DeadLetterEntry) -> str | None:
        """Put a letter in line; why not, if it is refused."""
        dropped: DeadLetterEntry | None = None
        with self._lock:
            if len(self._line) + self._in_hand >= self._buffer:
                if self._overflow is Overflow.REJECT or not self._line:
                    return f"the journal does not keep up ({self._buffer} letters wait for it)"
                dropped = self._line.popleft()
            self._line.append(letter)
        if dropped is not None:
            self._tell(Notice("dropped", dropped, "the journal does not keep up"))
        self._wake()
        return None

    def _wake(self) -> None:
        if not self._is_ready():
            return
        if self.runtime is None:
            with suppress(RuntimeError):  # no event loop here: the next one that asks will do
                self.runtime = current_runtime()
        runtime = self.runtime
        if runtime is not None and runtime.is_running_here():
            self._begin(runtime)
        elif runtime is not None:
            runtime.call_soon(lambda: self._begin(runtime))

    def _begin(self, runtime: Runtime) -> None:
        """Start to write, unless that is under way; on the loop of `runtime`."""
        with self._lock:
            if self._is_working or not self._line:
                return
            self._is_working = True
        runtime.spawn(self._work, name="msgbus dead letters")

    async def empty(self) -> None:
        """Return once everything that is in line now is written, or told as lost."""
        runtime = self.runtime = current_runtime(self.runtime)
        while True:
            reply = runtime.reply()
            with self._lock:
                if not self._line and not self._is_working:
                    return
                self._waiting.append((runtime, reply))
            self._begin(runtime)
            await reply

    def refuse_all(self, reason: str) -> None:
        """Give up on what is in line, and say so."""
        with self._lock:
            letters = list(self._line)
            self._line.clear()
        for letter in letters:
            self._tell(Notice("refused", letter, reason))

    async def _work(self) -> None:
        try:
            while batch := self._take():
                await self._deliver(batch)
        finally:
            self._rest()

    def _take(self) -> list[DeadLetterEntry]:
        with self._lock:
            batch = [self._line.popleft() for _ in range(min(BATCH, len(self._line)))]
            self._in_hand = len(batch)
            # In the same step: one that comes a moment later begins anew.
            self._is_working = bool(batch)
            return batch

    def _rest(self) -> None:
        with self._lock:
            self._is_working = False
            waiting, self._waiting = self._waiting, []
        for runtime, reply in waiting:
            runtime.call_soon(partial(_give, reply))

    async def _deliver(self, batch: list[DeadLetterEntry]) -> None:
        try:
            notices = await self._write(batch)
        except JournalLockedError as error:
            if not self.is_closing:
                self._put_back(batch)
                await anyio.sleep(_PAUSE)
                return
            notices = _refused(batch, error)
        except Exception as error:  # the border to the disk: nothing may end this task
            notices = _refused(batch, error)
        except BaseException:
            # The event loop ends. Whether they were written cannot be known: better twice.
            self._put_back(batch)
            raise
        for notice in notices:
            with suppress(Exception):  # a listener's trouble is its own
                self._tell(notice)
        self._in_hand = 0

    def _put_back(self, batch: list[DeadLetterEntry]) -> None:
        with self._lock:
            self._line.extendleft(reversed(batch))
            self._in_hand = 0


def _give(reply: Reply) -> None:
    if not reply.done():
        reply.set_result(None)


def _refused(batch: Sequence[DeadLetterEntry], error: Exception) -> list[Notice]:
    return [Notice("refused", letter, redact_exception(error)) for letter in batch]
