"""One call that waits for the writer's thread, and how it gets its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, final

from msgbus.journal.records import Record
from msgbus.runtime.event_loop import Runtime

if TYPE_CHECKING:
    from msgbus.journal.sqlite.store import Store


@final
class Request:
    """What one caller wants written, and what became of it.

    The writer's thread fills `value` or `error`; the reply is given on the caller's event
    loop.
    """

    # No slots: what is seldom set stays on the class, which makes the common case cheap.
    value: Any = None
    error: BaseException | None = None
    is_abandoned = False
    """The caller has gone; if it is not written yet, it need not be."""
    alone = False
    """Whether `work` makes its own transactions, outside of any group."""

    def __init__(
        self,
        runtime: Runtime,
        work: Callable[[Store], Any] | None,
        records: Sequence[Record],
    ) -> None:
        self.runtime = runtime
        self.reply = runtime.reply()
        self.work = work
        """What to do in a savepoint of its own; `None` for a plain append."""
        self.records = records
        """What a plain append adds: many of them become one statement."""

    def result(self) -> Any:
        """What became of it, once the reply is there."""
        if self.error is not None:
            raise self.error
        return self.value


def answer(requests: Iterable[Request]) -> None:
    """Wake all callers, with one message to each event loop."""
    # By runtime, not by loop: callers on one loop share theirs, as the writer keeps it.
    for runtime, waiting in groupby(requests, key=_runtime):
        runtime.call_soon(_Wake(list(waiting)))


_runtime: Final = attrgetter("runtime")


@final
class _Wake:
    """Runs on the callers' event loop."""

    __slots__ = ("_requests",)

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests

    def __call__(self) -> None:
        for request in self._requests:
            if not request.reply.done():
                request.reply.set_result(None)
