"""Threads of sync handlers that run other sync handlers while they wait for the bus.

A sync handler that calls the bus through a portal keeps its thread while it waits. If it waits
for another sync handler, and all threads are taken by handlers that wait too, they would
deadlock. So the waiting thread runs that handler itself.
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
    """A thread while it waits.

    Args:
        level: Handlers that already wait in this thread, each for the next.
    """

    MAX_LEVEL: Final = 20

    def __init__(self, level: int) -> None:
        self.level = level
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_waiting = True

    def give(self, function: Callable[[], T]) -> Future[T] | None:
        """Run `function` in it, in the caller's context; `None` if it no longer waits.

        Raises:
            RecursionError: Too many handlers wait in it already.
        """
        if self.level >= self.MAX_LEVEL:
            message = (
                f"{self.MAX_LEVEL} sync handlers wait in one thread, each for the next that it "
                f"called through a portal, and all other threads are taken."
            )
            raise RecursionError(message)
        job: Future[T] = Future()
        context = copy_context()

        def work() -> None:
            if not job.set_running_or_notify_cancel():
                return  # cancelled
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
        """Run jobs until there is an answer, and return it."""
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
"""The thread of a sync handler that waits for the current call, if any."""


@contextmanager
def handler_thread() -> Generator[None]:
    """Mark the current thread as running a sync handler, so that it works while it waits."""
    in_handler, waiting = _in_handler.set(True), waiting_thread.set(None)
    try:
        yield
    finally:
        _in_handler.reset(in_handler)
        waiting_thread.reset(waiting)


def wait_for(submit: Callable[[], Future[T]]) -> T:
    """Wait for the result of what `submit` begins on the event loop."""
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
