"""Executing commands: one handler, one result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, cast

from typing_extensions import override

from msgbus.bus.monitoring.depth import called_too_deep
from msgbus.bus.plans import CommandPlan
from msgbus.bus.protocols import SendingMethods
from msgbus.messages.frame import current_frame, fix_in_frame
from msgbus.messages.message import Command, R, ids_of, require_command, set_meta
from msgbus.messages.metadata import ROOT, Root
from msgbus.messages.results import CommandResult, FailedResult, NestedResult, QueuedResult
from msgbus.messages.system_events import CommandResultEvent, CommandStartedEvent
from msgbus.middleware.chain import not_awaited, within
from msgbus.runtime.arguments import check_seconds
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.stats import Durations

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusState
    from msgbus.bus.session import SessionState

FOLD_AT: Final = Durations.FOLD_AT
NO_PLAN: Final = cast("CommandPlan", None)
NOT_PLAIN: Final = Root()
"""In place of a plan and metadata that are not known yet; `CommandRunner` handles these."""

get_frame: Final = current_frame.get
set_frame: Final = current_frame.set
reset_frame: Final = current_frame.reset


class CommandRunner:
    """Runs commands that are not plain: nested, timed, observed, of a session, or stored."""

    def __init__(self, state: BusState) -> None:
        self._state = state
        self._now: Callable[[], float] = state.clock.now

    async def run(  # noqa: C901 (as `execute`, in one piece)
        self,
        plan: CommandPlan,
        frame: CommandResult[R],
        seconds: float | None = None,
        fail: Callable[[CommandResult[R], Exception, float], FailedResult[R]] | None = None,
    ) -> CommandResult[R]:
        """Execute the command of `frame`.

        Args:
            plan: How to handle it.
            frame: The frame, which becomes the result.
            seconds: Time limit.
            fail: Makes the result of a failure; `failed` unless given.
        """
        state = self._state
        command = frame.message
        counts = plan.counts
        counts.sent += 1
        if state.watched:
            self._publish_started(plan, command)
        token = set_frame(frame)
        began = self._now()
        try:
            if seconds is None:
                value = await plan.invoke(command)
            else:
                value = await within(plan.invoke, command, seconds, plan.name, state.clock)
            if type(value) is CoroutineType:
                value.close()
                raise not_awaited(plan.name, command)
            if frame.context is not None and frame.context.emitted:
                await state.flush(frame)
            frame.elapsed = self._now() - began
            frame.reply = value
        except Exception as error:
            counts.failed += 1
            elapsed = self._now() - began
            frame = (fail or self.failed)(frame, error, elapsed)
        except BaseException as error:
            counts.cancelled += 1
            state.observers.failed(plan.registration, plan.scope, command, error)
            raise
        finally:
            reset_frame(token)
            counts.recent.append(self._now() - began)
            if len(counts.recent) >= FOLD_AT:
                counts.fold()
            if state.watched:
                state.notify_idle_waiters()
        if state.watched:
            self.publish_result(plan, command, frame)
        return frame

    async def perform(
        self,
        command: Command[R],
        *,
        attempt: int = 1,
        retried: bool = False,
        session: SessionState | None = None,
        is_replay: bool = False,
        delivery: object = None,
    ) -> CommandResult[R]:
        """Execute a stored command, which has no caller and so no deadline.

        The caller of this method handles a failure, except for a replay: its dead letter is
        written here if its handler was called.

        Args:
            command: The command.
            attempt: The number of this attempt.
            retried: Whether the caller retries, so that no policy has to.
            session: The session whose handler is called, if not the bus's.
            is_replay: Whether it comes from a dead letter.
            delivery: The delivery of a queue, which fences all that the handler writes.

        Raises:
            MissingHandlerError: It has no handler.
        """
        plan = self._state.command_plan(type(command), session)
        plan.counts.retried += attempt > 1

        def fail(frame: CommandResult[R], error: Exception, elapsed: float) -> FailedResult[R]:
            if is_replay and frame.attempt:
                return self.failed(frame, error, elapsed)
            return FailedResult(frame, error, redact_exception(error), elapsed, _unconcerned)

        frame: CommandResult[R] = QueuedResult(
            command, plan, attempt, retried=retried, delivery=delivery
        )
        return await self.run(plan, frame, fail=fail)

    def prepare(
        self,
        command: Command[R],
        timeout: float | None,
        headers: Mapping[str, str] | None,
    ) -> tuple[CommandPlan, CommandResult[R], float | None]:
        """Get the plan, the frame and the time limit of a command that is not plain."""
        require_command(command)
        outer = get_frame()
        self._state.require_open("execute a command on", outer)
        meta = fix_in_frame(command, outer, headers=headers)
        session = self._state.sessions.get(meta.session_id) if meta.session_id else None
        plan = self._state.command_plan(type(command), session)
        deadline: float | None = None if outer is None else outer.deadline
        if timeout is not None:
            check_seconds("timeout", timeout)
            now = self._now()
            deadline = now + timeout if deadline is None else min(deadline, now + timeout)
            timeout = deadline - now
        depth = 0 if outer is None else self._state.depth_watch.sent(command, outer)
        return plan, NestedResult(command, plan, deadline, outer, depth), timeout

    def failed(self, frame: CommandResult[R], error: Exception, elapsed: float) -> FailedResult[R]:
        """Make the result of a command that has finally failed."""
        if isinstance(error, RecursionError):
            error = called_too_deep(frame, error)
        observers = self._state.observers
        if observers.active:
            plan: CommandPlan = frame.owner
            observers.failed(plan.registration, plan.scope, frame.message, error)
        text = redact_exception(error)
        result = FailedResult(frame, error, text, elapsed, self._report_unobserved)
        self._state.assembly.command_failed(frame, result)
        return result

    def _report_unobserved(self, result: FailedResult[Any]) -> None:
        log.error(
            "command_failed_unobserved",
            bus=self._state.config.name,
            handler=result.metadata["handler"],
            **ids_of(result.message),
            attempt=result.attempts,
            error=result.peek_error(),
            traceback=result.peek_exception(),
        )
        self._state.assembly.command_unobserved(result)

    def _publish_started(self, plan: CommandPlan, command: Command[Any]) -> None:
        self._state.system_events.publish(
            CommandStartedEvent,
            command,
            lambda: CommandStartedEvent(
                command_type=type(command).__name__,
                command_id=command.message_id,
                handler=plan.name,
            ),
        )

    def publish_result(
        self, plan: CommandPlan, command: Command[Any], result: CommandResult[Any]
    ) -> None:
        """Publish a `CommandResultEvent`, if it has a subscriber."""
        failed = result if isinstance(result, FailedResult) else None
        self._state.system_events.publish(
            CommandResultEvent,
            command,
            lambda: CommandResultEvent(
                command_type=type(command).__name__,
                command_id=command.message_id,
                handler=plan.name,
                success=failed is None,
                error=None if failed is None else failed.peek_error(),
                duration=result.duration,
            ),
        )


class CommandMethods(SendingMethods):
    """`execute`, as part of `MessageBus`."""

    _state: BusState

    def _open_command_methods(self) -> None:
        # Shortcuts for the hot path.
        self._now: Callable[[], float] = self._state.clock.now
        self._commands: dict[type, CommandPlan] = self._state.commands
        self._runner = self._state.command_runner

    @override
    async def execute(  # noqa: C901 (the hot path, in one piece)
        self,
        command: Command[R],
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> CommandResult[R]:
        # A plain command from outside is handled here, all others by the runner, so that it
        # does not pay for what only they need.
        try:
            plan = self._commands[type(command)]
            meta = command.__meta__
        except (KeyError, AttributeError):
            # Not from in here: a handler's exception would have this one as its context.
            plan, meta = NO_PLAN, NOT_PLAIN
        outer = get_frame()
        state = self._state
        if outer is not None or timeout is not None or headers or state.watched:
            return await self._runner.run(*self._runner.prepare(command, timeout, headers))
        if meta is None:
            set_meta(command, ROOT)
        elif meta is not ROOT:
            return await self._runner.run(*self._runner.prepare(command, timeout, headers))
        frame: CommandResult[R] = CommandResult()
        frame.message = command
        frame.owner = plan
        frame.context = None
        counts = plan.counts
        counts.sent += 1
        now = self._now
        elapsed = 0.0
        token = set_frame(frame)
        began = now()
        try:
            frame.reply = value = await plan.invoke(command)
            if type(value) is CoroutineType:
                value.close()
                raise not_awaited(plan.name, command)
            if frame.context is not None and frame.context.emitted:
                await state.flush(frame)
            frame.elapsed = elapsed = now() - began
        except Exception as error:
            elapsed = now() - began
            counts.failed += 1
            frame = self._runner.failed(frame, error, elapsed)
        except BaseException as error:
            elapsed = now() - began
            counts.cancelled += 1
            state.observers.failed(plan.registration, plan.scope, command, error)
            raise
        finally:
            reset_frame(token)
            recent = counts.recent
            recent.append(elapsed)
            if len(recent) >= FOLD_AT:
                counts.fold()
            if state.watched:
                state.notify_idle_waiters()
        if state.watched:
            self._runner.publish_result(plan, command, frame)
        return frame


def _unconcerned(result: FailedResult[Any]) -> None:
    """Ignore a failed result: the journal has recorded it."""
