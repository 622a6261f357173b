"""CorrelationManager: match replies to pending requests by correlation id.

A request ends exactly once: with a reply, an error, a timeout or a cancellation. The first of
them removes the request from the table; later ones find nothing there and are counted.
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
from msgbus.runtime.event_loop import Runtime, Waker, current_runtime, in_time

Send: TypeAlias = Callable[[str], Any]
"""Sends a request with this correlation id; sync or async."""


class RequestEnd(Enum):
    """How a request ends."""

    REPLY = "reply"
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCEL = "cancel"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CorrelationStats:
    """Counters of a manager at one moment: `started` is the sum of the next five."""

    started: int
    pending: int
    replied: int
    failed: int
    timed_out: int
    cancelled: int
    late: int
    """Replies to a request that had timed out or was cancelled."""

    duplicate: int
    """Further replies to a request that had one."""

    unknown: int
    """Replies to an unknown correlation id."""


@final
class _PendingRequest:
    """One pending request and the task that waits for its reply."""

    __slots__ = ("_waiter", "end", "value")

    def __init__(self) -> None:
        self._waiter: tuple[Runtime, Waker] | None = None
        self.end: RequestEnd | None = None
        self.value: Any = None

    def finish(self, end: RequestEnd, value: Any) -> None:
        """End it and wake the waiting task; from any thread."""
        self.value = value
        self.end = end  # after the value, and before reading the waiter
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
        # Set before `end` is read again: a concurrent `finish` either is seen here or sees this.
        self._waiter = (runtime, waker)
        while self.end is None:
            await waker.wait()

    def unpack(self) -> Any:
        """Return the reply, or raise the error."""
        if self.end is RequestEnd.REPLY:
            return self.value
        raise self.value


@final
class CorrelationManager:
    """Pending requests by correlation id.

    ```python
    reply = await correlations.request(lambda request_id: socket.send(question, request_id))
    ...
    correlations.reply(request_id, value)  # from any task or thread
    ```

    `request` may be called on any event loop, and replies may come from any thread.

    Args:
        timeout: Seconds to wait for a reply, unless a request has its own.
        remember: How many ended requests are remembered, to tell late replies from unknown ones.
        clock: The source of time.
    """

    def __init__(
        self, *, timeout: float = 30.0, remember: int = 10_000, clock: Clock | None = None
    ) -> None:
        self.timeout = timeout
        self._clock: Clock = SystemClock() if clock is None else clock
        self._remember = remember
        self._lock = threading.Lock()
        self._pending: dict[str, _PendingRequest] = {}
        self._ended: dict[str, RequestEnd] = {}
        self._counts = dict.fromkeys(RequestEnd, 0)
        self._started = 0
        self._late = 0
        self._duplicate = 0
        self._unknown = 0

    # -- requests --------------------------------------------------------------------------

    async def request(
        self,
        send: Send,
        *,
        correlation_id: Id | None = None,
        timeout: float | None = None,
        what: str = "the request",
    ) -> Any:
        """Send a request and wait for its reply.

        The time limit includes the sending, which is cancelled with this call or on a timeout.

        Args:
            send: Called with the correlation id, once the request is pending.
            correlation_id: Its id; a new one by default.
            timeout: Seconds to wait for the reply; by default the manager's.
            what: The name of the request in errors.

        Raises:
            RequestTimeoutError: No reply came in time.
            RequestCancelledError: It was cancelled with `cancel`.
            DuplicateRequestError: A request with this id is pending.
            Exception: The error passed to `fail`, or raised by `send`.
        """
        request_id = new_id() if correlation_id is None else str(correlation_id)
        seconds = self.timeout if timeout is None else timeout
        pending = self._begin(request_id)
        try:
            await in_time(_exchange(send, request_id, pending), seconds, self._clock)
        except Exception as error:
            if self._claim(request_id, RequestEnd.ERROR) is not None:
                raise
            del error  # the reply came first
        except BaseException:
            self._claim(request_id, RequestEnd.CANCEL)
            raise
        if pending.end is None and self._claim(request_id, RequestEnd.TIMEOUT) is not None:
            raise RequestTimeoutError(what, seconds=seconds)
        # Another thread may have claimed the request and be about to finish it.
        await pending.wait()
        return pending.unpack()

    def _begin(self, request_id: str) -> _PendingRequest:
        pending = _PendingRequest()
        with self._lock:
            if request_id in self._pending:
                message = (
                    f"A request with the correlation id {request_id!r} is still pending. "
                    f"Give each request its own id, or none."
                )
                raise DuplicateRequestError(message)
            self._pending[request_id] = pending
            self._started += 1
        return pending

    def _claim(self, request_id: str, end: RequestEnd) -> _PendingRequest | None:
        """Remove a request from the table. One caller gets it, all others `None`."""
        with self._lock:
            pending = self._pending.pop(request_id, None)
            if pending is not None:
                self._counts[end] += 1
                self._ended[request_id] = end
                if len(self._ended) > self._remember:
                    del self._ended[next(iter(self._ended))]
            return pending

    # -- replies ---------------------------------------------------------------------------

    def reply(self, correlation_id: Id, value: Any) -> bool:
        """Reply to a request; false if it is no longer pending, which is counted."""
        return self._finish(str(correlation_id), RequestEnd.REPLY, value)

    def fail(self, correlation_id: Id, error: BaseException) -> bool:
        """End a request with an error; false if it is no longer pending."""
        return self._finish(str(correlation_id), RequestEnd.ERROR, error)

    def cancel(self, correlation_id: Id, reason: str = "it was cancelled") -> bool:
        """Cancel a request; false if it is no longer pending."""
        request_id = str(correlation_id)
        pending = self._claim(request_id, RequestEnd.CANCEL)
        if pending is None:
            return False
        error = RequestCancelledError(f"The request {request_id} got no reply: {reason}.")
        pending.finish(RequestEnd.CANCEL, error)
        return True

    def _finish(self, request_id: str, end: RequestEnd, value: Any) -> bool:
        pending = self._claim(request_id, end)
        if pending is None:
            self._count_unexpected(request_id)
            return False
        pending.finish(end, value)
        return True

    def _count_unexpected(self, request_id: str) -> None:
        with self._lock:
            ended = self._ended.get(request_id)
            if ended is None:
                self._unknown += 1
            elif ended in (RequestEnd.REPLY, RequestEnd.ERROR):
                self._duplicate += 1
            else:
                self._late += 1

    # -- stats -----------------------------------------------------------------------------

    def is_pending(self, correlation_id: Id) -> bool:
        """Return whether a request with this id is pending."""
        return str(correlation_id) in self._pending

    @property
    def pending(self) -> int:
        """The number of pending requests."""
        return len(self._pending)

    def stats(self) -> CorrelationStats:
        """Return a snapshot of all counters."""
        with self._lock:
            return CorrelationStats(
                started=self._started,
                pending=len(self._pending),
                replied=self._counts[RequestEnd.REPLY],
                failed=self._counts[RequestEnd.ERROR],
                timed_out=self._counts[RequestEnd.TIMEOUT],
                cancelled=self._counts[RequestEnd.CANCEL],
                late=self._late,
                duplicate=self._duplicate,
                unknown=self._unknown,
            )


async def _exchange(send: Send, request_id: str, pending: _PendingRequest) -> None:
    sending = send(request_id)
    if inspect.isawaitable(sending):
        await sending
    await pending.wait()


class RequestTransport(Protocol):
    """Send the requests of a bus to their handlers."""

    async def send(
        self,
        command: Command[Any],
        correlation_id: str,
        correlations: CorrelationManager,
        *,
        timeout: float,
        headers: Mapping[str, str] | None,
    ) -> None:
        """Send `command`.

        The reply goes to `correlations.reply` or `.fail` with this id, now or later. Raise
        `NoReplierError` if nothing handles the command. The call is cancelled when the request
        times out; `timeout` is for the other side.
        """
        ...
