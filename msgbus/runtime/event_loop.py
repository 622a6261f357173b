"""Detached tasks, wake-ups and timeouts on asyncio and trio.

A bus is used by many tasks and owned by none, so its workers cannot run in a caller's task
group. They run detached, in a fresh context, so that no caller's context variables (request,
trace, session) leak into another caller's events.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast, final

import anyio.lowlevel
from typing_extensions import TypeVarTuple

from msgbus.errors import BusStateError, ForeignLoopError
from msgbus.runtime.clock import SystemClock
from msgbus.runtime.waiting_threads import wait_for

if TYPE_CHECKING:
    import asyncio

    from msgbus.runtime.clock import Clock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Waker(Protocol):
    """Wakes one waiting worker; cheaper than an event."""

    async def wait(self) -> None:
        """Wait for `wake`; an earlier `wake` is not remembered."""
        ...

    def wake(self) -> None:
        """End the wait.

        Raises:
            ForeignLoopError: Called on another thread than the worker's.
        """
        ...


class LoopReply(Protocol):
    """A result that one task waits for, once; it may be set before the wait begins."""

    def __await__(self) -> Generator[Any, Any, Any]:
        """Wait for the result."""
        ...

    def done(self) -> bool:
        """Whether it was set or the wait was cancelled."""
        ...

    def set_result(self, result: Any, /) -> None:
        """Set it, on the event loop."""
        ...


class Task(Protocol):
    """A detached task."""

    def cancel(self) -> None:
        """Cancel it at its next await."""
        ...


class Runtime(Protocol):
    """The event loop that a started bus runs on."""

    thread_id: int

    @property
    def token(self) -> object:
        """The event loop itself: the same for all runtimes made on one loop."""
        ...

    def is_running_here(self) -> bool:
        """Whether its event loop is running on this thread."""
        ...

    def has_ended(self) -> bool:
        """Whether its event loop has ended."""
        ...

    def spawn(
        self, function: Callable[[*Ts], Coroutine[Any, Any, None]], *args: *Ts, name: str
    ) -> Task:
        """Run `function` detached. It must not raise."""
        ...

    def waker(self) -> Waker:
        """Make a waker for one worker."""
        ...

    def reply(self) -> LoopReply:
        """Make a reply for one task to wait for."""
        ...

    async def checkpoint(self) -> None:
        """Let every other task run."""
        ...

    def is_ending(self, error: BaseException) -> bool:
        """Whether `error` ends the current task, rather than just its work."""
        ...

    def run_from_thread(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run `function` on the loop from another thread and wait for its result."""
        ...

    def call_soon(self, callback: Callable[[], object]) -> bool:
        """Run `callback` on the loop soon, from any thread; false if the loop has ended."""
        ...

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Task:
        """Run `callback` on the loop after `seconds` of real time, unless it is cancelled."""
        ...


def current_runtime(known: Runtime | None = None) -> Runtime:
    """The runtime of the running event loop, asyncio or trio; `known` if it is that one."""
    if known is not None and known.is_running_here():
        return known
    if "trio" in sys.modules:
        import trio

        if trio.lowlevel.in_trio_run():
            return _TrioRuntime()
    return _AsyncioRuntime()


# Any other exception, whatever its base class, is a failure of the handler.
_PROGRAM_ENDS: Final = (KeyboardInterrupt, SystemExit, GeneratorExit)


def _contains(error: BaseException, *kinds: type[BaseException]) -> bool:
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return group.subgroup(kinds) is not None
    return isinstance(error, kinds)


def run_apart(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `function` on an event loop of its own, also beside one of asyncio on this thread.

    That one waits meanwhile, so this is for the end of a process, which starts no thread any more.

    Raises:
        RuntimeError: It cannot be: trio runs on this thread, for example.
    """
    import asyncio

    import anyio

    running = asyncio._get_running_loop()  # noqa: SLF001 (documented, for event loops)
    asyncio._set_running_loop(None)  # noqa: SLF001
    try:
        anyio.run(function)
    finally:
        asyncio._set_running_loop(running)  # noqa: SLF001


def is_on_trio() -> bool:
    """Whether the caller runs on trio."""
    if "trio" not in sys.modules:
        return False
    import trio

    return trio.lowlevel.in_trio_run()


class Late:
    """Type of `LATE`: a result that did not come in time."""


LATE: Final = Late()


async def in_time(awaitable: Awaitable[T], seconds: float, clock: Clock) -> T | Late:
    """The value of `awaitable`, or `LATE` if it took longer and was cancelled."""
    if isinstance(clock, SystemClock) and not is_on_trio():
        return await _finish_within(awaitable.__await__(), seconds)
    with clock.cancel_after(seconds):
        return await awaitable
    return LATE


@types.coroutine
def _finish_within(  # noqa: C901 (one state machine)
    coroutine: Generator[Any, Any, T], seconds: float
) -> Generator[Any, Any, T | Late]:
    """The value of `coroutine`, or `LATE` once `seconds` have passed. On asyncio only.

    A fifth of the cost of a cancel scope: there is no timer unless the coroutine has to wait.
    That is possible as asyncio's timeouts need not be nested, as trio's scopes must.
    """
    try:
        waiting = coroutine.send(None)
    except StopIteration as end:
        return cast("T", end.value)
    import asyncio

    task = asyncio.current_task()
    if task is None:  # pragma: no cover (something that waits on asyncio has a task)
        raise BusStateError
    before, is_late = task.cancelling(), False

    def be_late() -> None:
        nonlocal is_late
        is_late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, be_late)
    try:
        while True:
            try:
                value = yield waiting
            except BaseException as error:
                waiting = coroutine.throw(error)
            else:
                waiting = coroutine.send(value)
    except StopIteration as end:
        _uncancel(task, is_late)
        return cast("T", end.value)
    except asyncio.CancelledError:
        # Cancelled from elsewhere too: then it is not a timeout.
        if not is_late or task.uncancel() > before:
            raise
        return LATE
    except BaseException:
        _uncancel(task, is_late)
        raise
    finally:
        timer.cancel()


def _uncancel(task: asyncio.Task[Any], is_late: bool) -> None:
    if is_late:
        task.uncancel()


async def run_together(function: Callable[[int], Coroutine[Any, Any, None]], number: int) -> None:
    """Run `function(0)` to `function(number - 1)` concurrently, begun in this order.

    If cancelled, all have ended before it raises.
    """
    if is_on_trio():
        import trio

        async def run_from(index: int) -> None:
            # Each starts the next before it begins: trio starts tasks in any order.
            if index + 1 < number:
                nursery.start_soon(run_from, index + 1)
            await function(index)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_from, 0)
        return

    import asyncio

    # Not anyio's: it does the same and costs five times as much.
    async with asyncio.TaskGroup() as tasks:
        for index in range(number):
            tasks.create_task(function(index))


def refuse_own_thread(runtime: Runtime) -> None:
    """Raise on the loop's own thread, where blocking would deadlock."""
    if threading.get_ident() == runtime.thread_id:
        message = (
            "A bus portal is for other threads; on the event loop's own thread it would "
            "wait for itself. Use `await bus.execute(...)` or `await bus.publish(...)` here."
        )
        raise BusStateError(message)


def foreign_loop(what: str) -> ForeignLoopError:
    """Make the error for a call on another event loop than that of the bus."""
    message = (
        f"Cannot {what} this bus here: it runs on another event loop. Make a portal there with "
        f"`portal = bus.portal()`, and call that from other threads."
    )
    return ForeignLoopError(message)


@final
class _AsyncioWaker:
    __slots__ = ("_future", "_loop", "_thread_id")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._future: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        self._future = self._loop.create_future()
        try:
            await self._future
        finally:
            self._future = None

    def wake(self) -> None:
        if threading.get_ident() != self._thread_id:
            raise foreign_loop("wake a handler of")
        future = self._future
        if future is not None and not future.done():
            future.set_result(None)


@final
class _AsyncioRuntime:
    def __init__(self) -> None:
        self.thread_id = threading.get_ident()
        # Not at the top: half of the import time of the library.
        import asyncio

        self._asyncio = asyncio
        self._loop = asyncio.get_running_loop()
        # The loop itself holds tasks only weakly.
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def token(self) -> object:
        return self._loop

    def is_running_here(self) -> bool:
        try:
            return self._asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def has_ended(self) -> bool:
        return self._loop.is_closed()

    def spawn(
        self, function: Callable[[*Ts], Coroutine[Any, Any, None]], *args: *Ts, name: str
    ) -> Task:
        task = self._loop.create_task(function(*args), name=name, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task  # type: ignore[return-value]  # Task.cancel returns bool, which is fine

    def waker(self) -> Waker:
        return _AsyncioWaker(self._loop)

    def reply(self) -> LoopReply:
        return self._loop.create_future()

    async def checkpoint(self) -> None:
        await self._asyncio.sleep(0)

    def is_ending(self, error: BaseException) -> bool:
        if not _contains(error, self._asyncio.CancelledError):
            return _contains(error, *_PROGRAM_ENDS)
        # A handler that raises its own cancellation raises the same exception as one that is
        # cancelled from outside; only the task knows the difference.
        task = self._asyncio.current_task()
        return task is None or task.cancelling() > 0

    def run_from_thread(self, function: Callable[[], Awaitable[T]]) -> T:
        refuse_own_thread(self)

        async def run() -> T:
            return await function()

        def submit() -> Future[T]:
            answer: Future[T] = self._asyncio.run_coroutine_threadsafe(run(), self._loop)
            return answer

        return wait_for(submit)

    def call_soon(self, callback: Callable[[], object]) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return False
        return True

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Task:
        return self._loop.call_later(seconds, callback, context=contextvars.Context())


@final
class _TrioWaker:
    __slots__ = ("_event", "_thread_id")

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self._event: Any = None

    async def wait(self) -> None:
        import trio

        self._event = trio.Event()
        try:
            await self._event.wait()
        finally:
            self._event = None

    def wake(self) -> None:
        if threading.get_ident() != self._thread_id:
            raise foreign_loop("wake a handler of")
        if self._event is not None:
            self._event.set()


@final
class _TrioReply:
    __slots__ = ("_event", "_result")

    def __init__(self) -> None:
        import trio

        self._event = trio.Event()
        self._result: Any = None

    def __await__(self) -> Generator[Any, Any, Any]:
        yield from self._event.wait().__await__()
        return self._result

    def done(self) -> bool:
        return self._event.is_set()

    def set_result(self, result: Any, /) -> None:
        self._result = result
        self._event.set()


@final
class _TrioRuntime:
    def __init__(self) -> None:
        import trio

        self.thread_id = threading.get_ident()
        self._token = trio.lowlevel.current_trio_token()

    @property
    def token(self) -> object:
        return self._token

    def is_running_here(self) -> bool:
        import trio

        return trio.lowlevel.in_trio_run() and (trio.lowlevel.current_trio_token() is self._token)

    def has_ended(self) -> bool:
        import trio

        try:
            self._token.run_sync_soon(int)
        except trio.RunFinishedError:
            return True
        return False

    def spawn(
        self, function: Callable[[*Ts], Coroutine[Any, Any, None]], *args: *Ts, name: str
    ) -> Task:
        import trio

        scope = trio.CancelScope()

        async def run() -> None:
            with scope:
                try:
                    await function(*args)
                except BaseExceptionGroup as group:
                    # A handler's tasks were cancelled and failed to clean up. Raising anything
                    # but the cancellation would end the program.
                    cancelled = group.subgroup(trio.Cancelled)
                    if cancelled is None or _contains(group, *_PROGRAM_ENDS):
                        raise
                    raise cancelled from None

        trio.lowlevel.spawn_system_task(run, name=name, context=contextvars.Context())
        return scope

    def waker(self) -> Waker:
        return _TrioWaker()

    def reply(self) -> LoopReply:
        return _TrioReply()

    async def checkpoint(self) -> None:
        await anyio.lowlevel.checkpoint()

    def is_ending(self, error: BaseException) -> bool:
        import trio

        if not _contains(error, trio.Cancelled):
            return _contains(error, *_PROGRAM_ENDS)
        # A handler may keep a Cancelled of its own scope and raise it later. The task ends
        # only if a scope around it is cancelled.
        return trio.current_effective_deadline() == float("-inf")

    def run_from_thread(self, function: Callable[[], Awaitable[T]]) -> T:
        refuse_own_thread(self)
        return wait_for(lambda: self._submit(function))

    def _submit(self, function: Callable[[], Awaitable[T]]) -> Future[T]:
        """As `trio.from_thread.run`, for a thread that works while it waits."""
        import trio

        answer: Future[T] = Future()
        context = contextvars.copy_context()

        async def run() -> None:
            try:
                value = await function()
            except BaseException as error:
                if _contains(error, trio.Cancelled, *_PROGRAM_ENDS):
                    answer.set_exception(trio.RunFinishedError("the event loop has ended"))
                    raise
                answer.set_exception(error)
            else:
                answer.set_result(value)

        def begin() -> None:
            try:
                trio.lowlevel.spawn_system_task(run, name="msgbus portal", context=context)
            except RuntimeError:  # the loop is ending
                answer.set_exception(trio.RunFinishedError("the event loop has ended"))

        self._token.run_sync_soon(begin)
        return answer

    def call_soon(self, callback: Callable[[], object]) -> bool:
        import trio

        try:
            self._token.run_sync_soon(callback)
        except trio.RunFinishedError:
            return False
        return True

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Task:
        import trio

        async def wait() -> None:
            await trio.sleep(seconds)
            callback()

        return self.spawn(wait, name="msgbus timer")
