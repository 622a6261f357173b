"""The command side of a bus: one handler, one result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, cast

from typing_extensions import override

from msgbus.bus.context import current_frame, fix_in_frame
from msgbus.bus.monitoring.depth import called_too_deep
from msgbus.bus.plans import CommandPlan
from msgbus.bus.protocols import SendingMethods
from msgbus.messages.message import Command, R, require_command, set_meta
from msgbus.messages.metadata import ROOT, Root
from msgbus.messages.results import CommandResult, FailedResult, NestedResult, QueuedResult
from msgbus.messages.system_events import CommandResultEvent, CommandStartedEvent
from msgbus.middleware.chain import not_awaited
from msgbus.runtime.arguments import check_seconds
from msgbus.runtime.timeouts import within
from msgbus.telemetry.logging import ids_of, log
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.stats import Durations

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusCore
    from msgbus.bus.session import BusSession

FOLD_AT: Final = Durations.FOLD_AT
NO_PLAN: Final = cast("CommandPlan", None)
NOT_PLAIN: Final = Root()
"""In place of a plan and metadata that are not known yet: such a command is handled in `_run`."""

get_frame: Final = current_frame.get
set_frame: Final = current_frame.set
reset_frame: Final = current_frame.reset


class CommandSide(SendingMethods):
    """`execute`, as part of `MessageBus`."""

    _core: BusCore

    def _open_command_side(self) -> None:
        # Shortcuts for the hot path.
        self._now: Callable[[], float] = self._core.clock.now
        self._commands: dict[type, CommandPlan] = self._core.commands

    @override
    async def execute(  # noqa: C901 (the hot path, in one piece)
        self,
        command: Command[R],
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> CommandResult[R]:
        # A plain command from outside is handled here, all others in `_run`: what only they
        # need costs this one nothing.
        try:
            plan = self._commands[type(command)]
            meta = command.__meta__
        except (KeyError, AttributeError):
            # Not from in here: a handler's exception would have this one as its context.
            plan, meta = NO_PLAN, NOT_PLAIN
        outer = get_frame()
        core = self._core
        if outer is not None or timeout is not None or headers or core.watched:
            return await self._run(*self._prepare(command, timeout, headers))
        if meta is None:
            set_meta(command, ROOT)
        elif meta is not ROOT:
            return await self._run(*self._prepare(command, timeout, headers))
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
                await core.flush(frame)
            frame.elapsed = elapsed = now() - began
        except Exception as error:
            elapsed = now() - began
            counts.failed += 1
            frame = self._failed(frame, error, elapsed)
        except BaseException as error:
            elapsed = now() - began
            counts.cancelled += 1
            core.observers.failed(plan.registration, plan.scope, command, error)
            raise
        finally:
            reset_frame(token)
            recent = counts.recent
            recent.append(elapsed)
            if len(recent) >= FOLD_AT:
                counts.fold()
            if core.watched:
                core.work_ended()
        if core.watched:
            self._tell_result(plan, command, frame)
        return frame

    async def _run(  # noqa: C901 (as `execute`, in one piece)
        self,
        plan: CommandPlan,
        frame: CommandResult[R],
        seconds: float | None = None,
        fail: Callable[[CommandResult[R], Exception, float], FailedResult[R]] | None = None,
    ) -> CommandResult[R]:
        """Handle the command of `frame`, whatever is special about it, as `execute` does.

        Args:
            plan: How to handle it.
            frame: The frame, which becomes the result.
            seconds: How long it may take.
            fail: Makes the result of a failure; `_failed` unless given.
        """
        core = self._core
        command = frame.message
        counts = plan.counts
        counts.sent += 1
        if core.watched:
            self._tell_started(plan, command)
        token = set_frame(frame)
        began = self._now()
        try:
            if seconds is None:
                value = await plan.invoke(command)
            else:
                value = await within(plan.invoke, command, seconds, plan.name, core.clock)
            if type(value) is CoroutineType:
                value.close()
                raise not_awaited(plan.name, command)
            if frame.context is not None and frame.context.emitted:
                await core.flush(frame)
            frame.elapsed = self._now() - began
            frame.reply = value
        except Exception as error:
            counts.failed += 1
            elapsed = self._now() - began
            frame = (fail or self._failed)(frame, error, elapsed)
        except BaseException as error:
            counts.cancelled += 1
            core.observers.failed(plan.registration, plan.scope, command, error)
            raise
        finally:
            reset_frame(token)
            counts.recent.append(self._now() - began)
            if len(counts.recent) >= FOLD_AT:
                counts.fold()
            if core.watched:
                core.work_ended()
        if core.watched:
            self._tell_result(plan, command, frame)
        return frame

    async def perform(
        self,
        command: Command[R],
        *,
        attempt: int = 1,
        retried: bool = False,
        session: BusSession | None = None,
        is_replay: bool = False,
    ) -> CommandResult[R]:
        """As `execute`, for a command that was kept somewhere; for the bus's parts.

        It is nobody's call, so it has no deadline, and the bus's own handler handles it, or
        that of `session`. What becomes of a failure is for the caller to say, but for that of
        a replay, whose dead letter is written here if its handler was called.

        Args:
            command: What to do.
            attempt: The number of this try.
            retried: Whether the caller tries again, so that no policy need do so.
            session: Whose handler is to handle it, if not the bus's.
            is_replay: Whether it comes from a dead letter.

        Raises:
            MissingHandlerError: Nobody handles such commands.
        """
        plan = self._core.command_plan(type(command), session)
        plan.counts.retried += attempt > 1

        def fail(frame: CommandResult[R], error: Exception, elapsed: float) -> FailedResult[R]:
            if is_replay and frame.attempt:
                return self._failed(frame, error, elapsed)
            return FailedResult(frame, error, redact_exception(error), elapsed, _unconcerned)

        frame: CommandResult[R] = QueuedResult(command, plan, attempt, retried=retried)
        return await self._run(plan, frame, fail=fail)

    def _prepare(
        self,
        command: Command[R],
        timeout: float | None,
        headers: Mapping[str, str] | None,
    ) -> tuple[CommandPlan, CommandResult[R], float | None]:
        """The plan, the frame and the time limit of a command that is not a plain one."""
        require_command(command)
        outer = get_frame()
        self._core.require_open("execute a command on", outer)
        meta = fix_in_frame(command, outer, headers=headers)
        session = self._core.sessions.get(meta.session_id) if meta.session_id else None
        plan = self._core.command_plan(type(command), session)
        deadline: float | None = None if outer is None else outer.deadline
        if timeout is not None:
            check_seconds("timeout", timeout)
            now = self._now()
            deadline = now + timeout if deadline is None else min(deadline, now + timeout)
            timeout = deadline - now
        depth = 0 if outer is None else self._core.depth_watch.sent(command, outer)
        return plan, NestedResult(command, plan, deadline, outer, depth), timeout

    def _failed(self, frame: CommandResult[R], error: Exception, elapsed: float) -> FailedResult[R]:
        """The result of a command that failed for good."""
        if isinstance(error, RecursionError):
            error = called_too_deep(frame, error)
        observers = self._core.observers
        if observers.told:
            plan: CommandPlan = frame.owner
            observers.failed(plan.registration, plan.scope, frame.message, error)
        return FailedResult(frame, error, redact_exception(error), elapsed, self._report_unobserved)

    def _report_unobserved(self, result: FailedResult[Any]) -> None:
        log.error(
            "command_failed_unobserved",
            bus=self._core.config.name,
            handler=result.metadata["handler"],
            **ids_of(result.message),
            attempt=result.attempts,
            error=result.peek_error(),
            traceback=result.peek_exception(),
        )

    def _tell_started(self, plan: CommandPlan, command: Command[Any]) -> None:
        self._core.lifecycle.tell(
            CommandStartedEvent,
            command,
            lambda: CommandStartedEvent(
                command_type=type(command).__name__,
                command_id=command.message_id,
                handler=plan.name,
            ),
        )

    def _tell_result(
        self, plan: CommandPlan, command: Command[Any], result: CommandResult[Any]
    ) -> None:
        failed = result if isinstance(result, FailedResult) else None
        self._core.lifecycle.tell(
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


def _unconcerned(result: FailedResult[Any]) -> None:
    """The journal knows of it."""
