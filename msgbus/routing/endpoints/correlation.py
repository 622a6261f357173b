"""Requests and their answers: every request ends, once, and its place is freed.

A request ends in exactly one of four ways: a reply, an error, no answer in time, or being
called off. Whichever comes first takes the request out of the table; whoever comes later
finds nothing there and is counted. So nothing can end twice, and nothing is left behind.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias, final

from msgbus.errors import DuplicateRequestError, RequestCancelledError, RequestTimeoutError
from msgbus.messages.message import Command
from msgbus.routing.envelope import Id, new_id
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.event_loop import Runtime, Waker, current_runtime
from msgbus.runtime.timeouts import in_time

Send: TypeAlias = Callable[[str], Any]
"""Sends a request of this correlation id on its way; sync or async."""


class RequestEnd(Enum):
    """The ways in which a request ends."""

    REPLY = "reply"
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCEL = "cancel"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CorrelationStats:
    """What a manager has counted, at one moment: `started` is the sum of the next five."""

    started: int
    pending: int
    replied: int
    failed: int
    timed_out: int
    cancelled: int
    late: int
    """Replies that came after their request had run out of time or was called off."""

    duplicate: int
    """Replies to a request that had been answered."""

    unknown: int
    """Replies to a request that nobody remembers."""


@final
class _Slot:
    """One open request and the task that waits for its answer."""

    __slots__ = ("_waiter", "end", "value")

    def __init__(self) -> None:
        self._waiter: tuple[Runtime, Waker] | None = None
        self.end: RequestEnd | None = None
        self.value: Any = None

    def finish(self, end: RequestEnd, value: Any) -> None:
        """End it and wake the one who waits; from any thread."""
        self.value = value
        self.end = end  # after the value, and before looking who waits
        if self._waiter is None:
            return
        runtime, waker = self._waiter
        if threading.get_ident() == runtime.thread_id:
            waker.wake()
        else:
            runtime.call_soon(waker.wake)

    async def wait(self) -> None:
        """Return once it has ended."""
        if self.end is not None:
            return
        runtime = current_runtime()
        waker = runtime.waker()
        # Said before looking again: who ends it now either is seen here or sees this.
        self._waiter = (runtime, waker)
        while self.end is None:
            await waker.wait()

    def unpack(self) -> Any:
        """The reply, or raise what came instead of it."""
        if self.end is RequestEnd.REPLY:
            return self.value
        raise self.value


@final
class CorrelationManager:
    """Open requests by correlation id.

    ```python
    answer = await correlations.request(lambda request_id: socket.send(question, request_id))
    ...
    correlations.reply(request_id, answer)  # from any task or thread
    ```

    `request` may be called on any event loop, and the answers may come from any thread.

    Args:
        timeout: Seconds to wait for an answer, unless a request says otherwise.
        remember: So many ended requests are remembered, to tell late replies from wrong ones.
        clock: Where time comes from.
    """

    def __init__(
        self, *, timeout: float = 30.0, remember: int = 10_000, clock: Clock | None = None
    ) -> None:
        self.timeout = timeout
        self._clock: Clock = SystemClock() if clock is None else clock
        self._remember = remember
        self._lock = threading.Lock()
        self._open: dict[str, _Slot] = {}
        self._ended: dict[str, RequestEnd] = {}
        self._counts = dict.fromkeys(RequestEnd, 0)
        self._started = 0
        self._late = 0
        self._duplicate = 0
        self._unknown = 0

    # -- asking ----------------------------------------------------------------------------

    async def request(
        self,
        send: Send,
        *,
        correlation_id: Id | None = None,
        timeout: float | None = None,
        what: str = "the request",
    ) -> Any:
        """Send a request and wait for its answer.

        The time limit holds for the sending too. If this call is cancelled, or runs out of
        time while it sends, the sending is cancelled with it.

        Args:
            send: Called with the correlation id, once the request is open.
            correlation_id: Its id; a fresh one if not given.
            timeout: Seconds to wait for the answer; the manager's if not given.
            what: What was asked, for errors.

        Raises:
            RequestTimeoutError: No answer came in time.
            RequestCancelledError: Somebody called it off with `cancel`.
            DuplicateRequestError: A request of this id is open.
            Exception: What `fail` was given, or what `send` raised.
        """
        request_id = new_id() if correlation_id is None else str(correlation_id)
        seconds = self.timeout if timeout is None else timeout
        slot = self._begin(request_id)
        try:
            await in_time(_exchange(send, request_id, slot), seconds, self._clock)
        except Exception as error:
            if self._claim(request_id, RequestEnd.ERROR) is not None:
                raise
            del error  # the answer came first, and it counts
        except BaseException:
            self._claim(request_id, RequestEnd.CANCEL)
            raise
        if slot.end is None and self._claim(request_id, RequestEnd.TIMEOUT) is not None:
            raise RequestTimeoutError(what, seconds=seconds)
        # Another thread may have taken the slot a moment ago and be about to fill it.
        await slot.wait()
        return slot.unpack()

    def _begin(self, request_id: str) -> _Slot:
        slot = _Slot()
        with self._lock:
            if request_id in self._open:
                message = (
                    f"A request with the correlation id {request_id!r} is still open. "
                    f"Give each request an id of its own, or none."
                )
                raise DuplicateRequestError(message)
            self._open[request_id] = slot
            self._started += 1
        return slot

    def _claim(self, request_id: str, end: RequestEnd) -> _Slot | None:
        """Take a request out of the table. One caller gets it, all others `None`."""
        with self._lock:
            slot = self._open.pop(request_id, None)
            if slot is not None:
                self._counts[end] += 1
                self._ended[request_id] = end
                if len(self._ended) > self._remember:
                    del self._ended[next(iter(self._ended))]
            return slot

    # -- answering -------------------------------------------------------------------------

    def reply(self, correlation_id: Id, value: Any) -> bool:
        """Answer a request; false if it is no longer open, which is counted."""
        return self._finish(str(correlation_id), RequestEnd.REPLY, value)

    def fail(self, correlation_id: Id, error: BaseException) -> bool:
        """Answer a request with an error; false if it is no longer open."""
        return self._finish(str(correlation_id), RequestEnd.ERROR, error)

    def cancel(self, correlation_id: Id, reason: str = "it was called off") -> bool:
        """Call a request off; false if it is no longer open."""
        request_id = str(correlation_id)
        slot = self._claim(request_id, RequestEnd.CANCEL)
        if slot is None:
            return False
        error = RequestCancelledError(f"The request {request_id} got no answer: {reason}.")
        slot.finish(RequestEnd.CANCEL, error)
        return True

    def _finish(self, request_id: str, end: RequestEnd, value: Any) -> bool:
        slot = self._claim(request_id, end)
        if slot is None:
            self._count_stray(request_id)
            return False
        slot.finish(end, value)
        return True

    def _count_stray(self, request_id: str) -> None:
        with self._lock:
            ended = self._ended.get(request_id)
            if ended is None:
                self._unknown += 1
            elif ended in (RequestEnd.REPLY, RequestEnd.ERROR):
                self._duplicate += 1
            else:
                self._late += 1

    # -- looking ---------------------------------------------------------------------------

    def is_pending(self, correlation_id: Id) -> bool:
        """Whether a request of this id is open."""
        return str(correlation_id) in self._open

    @property
    def pending(self) -> int:
        """How many requests are open."""
        return len(self._open)

    def stats(self) -> CorrelationStats:
        """All counters at one moment."""
        with self._lock:
            return CorrelationStats(
                started=self._started,
                pending=len(self._open),
                replied=self._counts[RequestEnd.REPLY],
                failed=self._counts[RequestEnd.ERROR],
                timed_out=self._counts[RequestEnd.TIMEOUT],
                cancelled=self._counts[RequestEnd.CANCEL],
                late=self._late,
                duplicate=self._duplicate,
                unknown=self._unknown,
            )


async def _exchange(send: Send, request_id: str, slot: _Slot) -> None:
    sending = send(request_id)
    if inspect.isawaitable(sending):
        await sending
    await slot.wait()


class RequestTransport(Protocol):
    """How the requests of a bus travel to whoever answers them."""

    async def send(
        self,
        command: Command[Any],
        correlation_id: str,
        correlations: CorrelationManager,
        *,
        timeout: float,
        headers: Mapping[str, str] | None,
    ) -> None:
        """Send `command` on its way.

        The answer goes to `correlations.reply` or `.fail`, now or later, under this id.
        Raise `NoReplierError` if nobody is there to answer. The call is cancelled when the
        request has run out of time; `timeout` is for the other side.
        """
        ...
