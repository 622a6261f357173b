"""One call that waits for the writer's thread, and how it gets its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

from msgbus.journal.records import Record
from msgbus.runtime import Runtime

if TYPE_CHECKING:
    from msgbus.journal.sqlite.store import Store


@final
class Request:
    """What one caller wants written, and what became of it.

    The writer's thread fills `value` or `error`; `done` is set on the caller's event loop
    only, so that looking at it and going to sleep need no lock.
    """

    __slots__ = (
        "alone",
        "done",
        "error",
        "is_abandoned",
        "records",
        "runtime",
        "value",
        "waker",
        "work",
    )

    def __init__(
        self,
        runtime: Runtime,
        work: Callable[[Store], Any] | None = None,
        records: Sequence[Record] | None = None,
        *,
        alone: bool = False,
    ) -> None:
        self.work = work
        """What to do in a savepoint of its own; `None` for a plain append."""
        self.records = records
        """What a plain append adds: many of them become one statement."""
        self.alone = alone
        """Whether `work` makes its own transactions, outside of any group."""
        self.runtime = runtime
        self.waker = runtime.waker()
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.is_abandoned = False
        """The caller has gone; if it is not written yet, it need not be."""

    @property
    def weight(self) -> int:
        """How much of a group it fills."""
        return 1 if self.records is None else len(self.records)


def answer(requests: Iterable[Request]) -> None:
    """Wake all callers, with one message to each event loop."""
    # By runtime, not by loop: callers on one loop share theirs, as the writer keeps it.
    loops: dict[Runtime, list[Request]] = {}
    for request in requests:
        loops.setdefault(request.runtime, []).append(request)
    for runtime, waiting in loops.items():
        runtime.call_soon(_Wake(waiting))


@final
class _Wake:
    """Runs on the callers' event loop."""

    __slots__ = ("_requests",)

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests

    def __call__(self) -> None:
        for request in self._requests:
            request.done = True
            request.waker.wake()
