"""Threads of sync handlers that wait for the bus, and work meanwhile.

A sync handler that calls the bus through a portal keeps its thread, though it does nothing but
wait. If what it waits for is a sync handler too, and all threads are taken, perhaps by handlers
that wait as well, they would wait for ever. So the thread that waits does that work itself, as
if its handler had called the other one directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from queue import SimpleQueue
from typing import Final, TypeVar, final

T = TypeVar("T")


@final
class WaitingThread:
    """One thread for as long as it waits.

    Args:
        level: How many handlers wait in this thread already, each for the next.
    """

    MAX_LEVEL: Final = 20

    def __init__(self, level: int) -> None:
        self.level = level
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_waiting = True

    def give(self, function: Callable[[], T]) -> Future[T] | None:
        """Have it call `function`, in the context of the caller; `None` if it waits no more.

        Raises:
            RecursionError: It does so for too many already.
        """
        if self.level >= self.MAX_LEVEL:
            message = (
                f"{self.MAX_LEVEL} sync handlers wait in one thread, each for the next that it has "
                f"called through a portal, and all other threads are taken."
            )
            raise RecursionError(message)
        job: Future[T] = Future()
        context = copy_context()

        def work() -> None:
            if not job.set_running_or_notify_cancel():
                return  # nobody wants it any more
            try:
                job.set_result(context.run(function))
            except BaseException as error:
                job.set_exception(error)

        with self._lock:
            if not self._is_waiting:
                return None
            self._jobs.put(work)
            return job

    def wait_for(self, answer: Future[T]) -> T:
        """Work until there is an answer, and give that."""
        answer.add_done_callback(self._stop)
        while (job := self._jobs.get()) is not None:
            job()
        return answer.result()

    def _stop(self, _answer: Future[T]) -> None:
        with self._lock:
            self._is_waiting = False
            self._jobs.put(None)


_in_handler: Final[ContextVar[bool]] = ContextVar("msgbus_in_handler_thread", default=False)
waiting_thread: Final[ContextVar[WaitingThread | None]] = ContextVar(
    "msgbus_waiting_thread", default=None
)
"""The thread that waits for what is called here, if it is one of a sync handler."""


@contextmanager
def handler_thread() -> Generator[None]:
    """Around a sync handler in a thread of its own, which may be given work while it waits."""
    in_handler, waiting = _in_handler.set(True), waiting_thread.set(None)
    try:
        yield
    finally:
        _in_handler.reset(in_handler)
        waiting_thread.reset(waiting)


def wait_for(submit: Callable[[], Future[T]]) -> T:
    """What `submit` has begun on the event loop gives, once it is there."""
    if not _in_handler.get():
        return submit().result()
    below = waiting_thread.get()
    thread = WaitingThread(0 if below is None else below.level + 1)
    token = waiting_thread.set(thread)
    try:
        answer = submit()  # takes a copy of the context
    finally:
        waiting_thread.reset(token)
    return thread.wait_for(answer)
