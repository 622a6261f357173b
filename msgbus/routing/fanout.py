"""Runs the dispatchers of one message: side by side, each within its time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast, final

from anyio.lowlevel import RunVar

from msgbus.messages.topics.pattern import is_topic
from msgbus.routing.dispatch.dispatchers import DispatcherEntry
from msgbus.routing.dispatch.logging import Dispatched, DispatchLog
from msgbus.routing.dispatch.results import DispatchOutcome, DispatchResult, DispatchStatus
from msgbus.routing.envelope import EventEnvelope
from msgbus.runtime.clock import Clock
from msgbus.runtime.event_loop import LATE, current_runtime, run_together
from msgbus.runtime.threads import ThreadPool
from msgbus.runtime.timeouts import in_time
from msgbus.telemetry.redaction import redact, redact_exception


@final
class Step:
    """One dispatcher of a message, and the route that leads to it."""

    __slots__ = ("entry", "route_id")

    def __init__(self, entry: DispatcherEntry, route_id: str) -> None:
        self.entry = entry
        self.route_id = route_id


class BadOutputError(TypeError):
    """A dispatcher gave something that is no output."""


@final
class FanOut:
    """Runs dispatchers. Usable from several event loops; each has its own threads."""

    def __init__(self, clock: Clock, max_threads: int, log: DispatchLog) -> None:
        self._log = log
        self._clock = clock
        self._now: Callable[[], float] = clock.now
        self._max_threads = max_threads
        self._threads: RunVar[ThreadPool] = RunVar("msgbus_dispatch_threads")

    async def run(
        self,
        steps: Sequence[Step],
        envelope: EventEnvelope[Any],
        outcomes: list[DispatchOutcome | None],
    ) -> None:
        """Run all steps and put their outcomes into `outcomes`, each at its own place.

        They begin in the order of `steps` and then run side by side.
        """

        async def run(place: int) -> None:
            outcomes[place] = await self.run_one(steps[place], envelope)

        await run_together(run, len(steps))

    async def run_one(self, step: Step, envelope: EventEnvelope[Any]) -> DispatchOutcome:
        """Run one step to its outcome; only cancellation gets out."""
        entry = step.entry
        outcome = DispatchOutcome(entry.dispatcher_id, step.route_id, DispatchStatus.SUCCESS)
        began = self._now()
        try:
            # Any: a dispatcher may give back whatever it likes, and `_take` will judge it.
            call: Any = (
                entry.function(envelope) if entry.is_async else self._in_thread(entry, envelope)
            )
            if entry.timeout is None:
                output = await call
            else:
                output = await in_time(call, entry.timeout, self._clock)
            if output is LATE:
                _be_late(outcome, entry)
            elif output is not None:
                _take(output, outcome)
        except Exception as error:
            _failed(outcome, error)
        except BaseException as error:
            # One that a dispatcher lets escape from something of its own ends nobody else.
            if current_runtime().is_ending(error):
                raise
            _failed(outcome, error)
        outcome.duration_ms = (self._now() - began) * 1000
        if outcome.error_code is not None and outcome.is_error():
            self._log.failed(Dispatched(envelope.topic, entry.category, envelope), outcome)
        return outcome

    async def _in_thread(self, entry: DispatcherEntry, envelope: EventEnvelope[Any]) -> Any:
        # A sync function may give something to await, as a lambda around a coroutine does.
        # In a list, as trio would take it for a mistake.
        [output] = await self._pool().run(lambda: [cast("Any", entry.function(envelope))])
        return await output if inspect.isawaitable(output) else output

    def _pool(self) -> ThreadPool:
        pool = self._threads.get(None)
        if pool is None:
            pool = ThreadPool(self._max_threads)
            self._threads.set(pool)
        return pool


def _be_late(outcome: DispatchOutcome, entry: DispatcherEntry) -> None:
    outcome.status = DispatchStatus.TIMEOUT
    outcome.error_message = f"{entry.dispatcher_id} did not finish within {entry.timeout:g} s."
    outcome.error_code = "TIMEOUT"


def _failed(outcome: DispatchOutcome, error: BaseException) -> None:
    outcome.status = DispatchStatus.HANDLER_ERROR
    outcome.outputs = []
    outcome.error_message = redact_exception(error)
    outcome.error_code = "INVALID_OUTPUT" if isinstance(error, BadOutputError) else "HANDLER_ERROR"
    outcome.exception = error


def _take(output: Any, outcome: DispatchOutcome) -> None:
    """Read what a dispatcher gave.

    Raises:
        BadOutputError: It is neither topics nor a result.
    """
    if isinstance(output, DispatchResult):
        outcome.status = output.status
        outcome.outputs = _topics(output.outputs)
        if output.error_message is not None:
            outcome.error_message = redact(output.error_message)
        outcome.error_code = output.error_code
        if output.is_error() and outcome.error_code is None:
            outcome.error_code = output.status.name
    elif isinstance(output, str):
        outcome.outputs = _topics([output])
    else:
        outcome.outputs = _topics(output)


def _topics(output: Any) -> list[str]:
    if isinstance(output, list | tuple):
        topics = cast("Sequence[object]", output)
        wrong = [one for one in topics if not (isinstance(one, str) and is_topic(one))]
        if not wrong:
            return list(cast("Sequence[str]", topics))
        what = "text" if isinstance(wrong[0], str) else type(wrong[0]).__name__
        message = f"The output has {what} that is not a topic."
    else:
        message = f"{type(output).__name__} is not an output."
    message += " A dispatcher gives a topic, a list of topics, a DispatchResult or None."
    raise BadOutputError(message)
