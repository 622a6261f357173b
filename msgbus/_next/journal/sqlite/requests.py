"""Calls that wait for the writer's thread, and their answers."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, final

from msgbus._next.journal.operations import Append
from msgbus.errors import JournalError
from msgbus.journal.sqlite.faults import is_the_file, translate
from msgbus.runtime.event_loop import Runtime
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus._next.journal.sqlite.claims import JournalSteps


@final
class WriteRequest:
    """A write of one caller, and its outcome.

    The writer's thread fills `value` or `error`; the reply is given on the event loop of the
    caller.
    """

    # No slots: what is seldom set stays on the class, which makes the common case cheap.
    value: Any = None
    error: BaseException | None = None
    is_abandoned = False
    """The caller was cancelled; what is not written yet need not be."""
    is_read = False
    """Whether `work` only reads."""
    is_of_user = False
    """Whether `work` runs statements of the user, whose faults are the caller's."""
    on_commit: Callable[[Any], None] | None = None
    """Called with the value on the writer's thread, once it is committed."""

    def __init__(
        self,
        runtime: Runtime,
        work: Callable[[JournalSteps], Any] | None,
        appends: Sequence[Append] = (),
        weight: int = 1,
    ) -> None:
        self.runtime = runtime
        self.reply = runtime.reply()
        self.work = work
        """What to do in a savepoint of its own; `None` for plain appends."""
        self.appends = appends
        """Plain appends: those of many callers become one statement."""
        self.weight = weight
        """Number of its operations."""

    def result(self) -> Any:
        """Return the value or raise the error, once the reply is there."""
        if self.error is not None:
            raise self.error
        return self.value

    def fail(self, error: BaseException, path: str) -> None:
        """Set the error: of SQLite as ours, but a fault in a statement of the user as it is."""
        self.value, self.error = None, error
        if isinstance(error, sqlite3.Error) and (not self.is_of_user or is_the_file(error)):
            self.error = translate(error, path)
            self.error.__cause__ = error

    def fail_with_all(self, error: BaseException, path: str) -> None:
        """Set the error of a commit that failed as a whole."""
        if isinstance(error, sqlite3.Error):
            failure = translate(error, path)
        elif isinstance(error, JournalError):
            failure = JournalError(str(error), path=path)
        else:
            failure = JournalError(
                f"The journal {path} failed: {redact_exception(error)}", path=path
            )
        failure.__cause__ = error
        self.value, self.error = None, failure


def answer(
    requests: Iterable[WriteRequest], calls: Sequence[Callable[[], object]], runtime: Runtime | None
) -> None:
    """Run `calls` on the event loop `runtime`, then wake the callers: one call to each loop."""
    # By runtime, not by loop: callers on one loop share theirs, as the writer keeps it.
    for where, waiting in groupby(requests, key=_runtime):
        if runtime is not None and calls and where.token is runtime.token:
            where.call_soon(_Answer(list(waiting), calls))
            calls = ()
        else:
            where.call_soon(_Answer(list(waiting)))
    if calls and runtime is not None:
        runtime.call_soon(_Answer([], calls))


_runtime: Final = attrgetter("runtime")


@final
class _Answer:
    """Runs on the event loop of the callers."""

    __slots__ = ("_calls", "_requests")

    def __init__(
        self, requests: list[WriteRequest], calls: Sequence[Callable[[], object]] = ()
    ) -> None:
        self._requests = requests
        self._calls = calls

    def __call__(self) -> None:
        for call in self._calls:
            try:
                call()
            except Exception as error:
                # On trio it would end the program, and the callers would wait for ever.
                log.error("journal_callback_failed", error=redact_exception(error))
        for request in self._requests:
            if not request.reply.done():
                request.reply.set_result(None)
