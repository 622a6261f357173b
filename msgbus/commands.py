"""The command side of a bus: one handler, one result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from msgbus.context import Frame, current_frame, fix_in_frame
from msgbus.depth import called_too_deep
from msgbus.lifecycle import CommandResultEvent, CommandStartedEvent
from msgbus.messages import Command, R, require_command, set_meta
from msgbus.metadata import ROOT
from msgbus.middleware.chain import not_awaited
from msgbus.plans import CommandPlan
from msgbus.results import CommandResult, FailedResult, NestedResult, QueuedResult
from msgbus.sending import SendingMethods
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.stats import Durations
from msgbus.timeouts import within

if TYPE_CHECKING:
    from msgbus.core import BusCore
    from msgbus.session import BusSession

FOLD_MASK: Final = Durations.FOLD_AT - 1
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
    async def execute(  # noqa: C901, PLR0912, PLR0915 (the hot path, in one piece)
        self,
        command: Command[R],
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> CommandResult[R]:
        core = self._core
        plan = self._commands.get(type(command))
        outer = get_frame()
        try:
            fresh = command.__meta__ is None
        except AttributeError:
            fresh = False
        seconds: float | None = None
        if fresh and outer is None and plan is not None and timeout is None and not headers:
            set_meta(command, ROOT)
            frame: CommandResult[R] = CommandResult()
            frame.message = command
            frame.owner = plan
            frame.context = None
        else:
            plan, frame, seconds = self._prepare(command, outer, timeout, headers)
        counts = plan.counts
        counts.sent = sent = counts.sent + 1
        if core.watched:
            self._tell_started(plan, command)
        token = set_frame(frame)
        now = self._now
        began = now()
        elapsed = 0.0
        try:
            if seconds is None:
                value = await plan.invoke(command)
            else:
                value = await within(plan.invoke, command, seconds, plan.name, core.clock)
            if type(value) is CoroutineType:
                value.close()
                raise not_awaited(plan.name, command)
            if frame.context is not None:
                await core.flush(frame)
            frame.elapsed = elapsed = now() - began
            frame.reply = value
        except Exception as error:
            elapsed = now() - began
            counts.failed += 1
            if isinstance(error, RecursionError):
                frame = self._failed(frame, called_too_deep(frame, error), elapsed)
            else:
                frame = self._failed(frame, error, elapsed)
        except BaseException:
            elapsed = now() - began
            counts.cancelled += 1
            raise
        finally:
            reset_frame(token)
            counts.recent.append(elapsed)
            if not sent & FOLD_MASK:
                counts.fold()
            if core.watched:
                core.work_ended()
        if core.watched:
            self._tell_result(plan, command, frame)
        return frame

    async def perform(  # noqa: C901 (as `execute`, in one piece)
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
        core = self._core
        plan = core.command_plan(type(command), session)
        frame: CommandResult[R] = QueuedResult(command, plan, attempt, retried=retried)
        counts = plan.counts
        counts.sent = sent = counts.sent + 1
        counts.retried += attempt > 1
        if core.watched:
            self._tell_started(plan, command)
        token = set_frame(frame)
        began = self._now()
        try:
            value = await plan.invoke(command)
            if type(value) is CoroutineType:
                value.close()
                raise not_awaited(plan.name, command)
            if frame.context is not None:
                await core.flush(frame)
            frame.elapsed = self._now() - began
            frame.reply = value
        except Exception as error:
            counts.failed += 1
            elapsed = self._now() - began
            if is_replay and frame.attempt:
                frame = self._failed(frame, error, elapsed)
            else:
                text = redact_exception(error)
                frame = FailedResult(frame, error, text, elapsed, _unconcerned)
        except BaseException:
            counts.cancelled += 1
            raise
        finally:
            reset_frame(token)
            counts.recent.append(self._now() - began)
            if not sent & FOLD_MASK:
                counts.fold()
            if core.watched:
                core.work_ended()
        if core.watched:
            self._tell_result(plan, command, frame)
        return frame

    def _prepare(
        self,
        command: Command[Any],
        outer: Frame | None,
        timeout: float | None,
        headers: Mapping[str, str] | None,
    ) -> tuple[CommandPlan, CommandResult[Any], float | None]:
        """Everything that a plain command from outside does not need."""
        require_command(command)
        self._core.require_open("execute a command on", outer)
        meta = fix_in_frame(command, outer, headers=headers)
        session = self._core.sessions.get(meta.session_id) if meta.session_id else None
        plan = self._core.command_plan(type(command), session)
        deadline: float | None = None if outer is None else outer.deadline
        if timeout is not None:
            now = self._now()
            deadline = now + timeout if deadline is None else min(deadline, now + timeout)
            timeout = deadline - now
        depth = 0 if outer is None else self._core.depth_watch.sent(command, outer)
        return plan, NestedResult(command, plan, deadline, outer, depth), timeout

    def _failed(self, frame: CommandResult[R], error: Exception, elapsed: float) -> FailedResult[R]:
        """The result of a command that failed for good."""
        return FailedResult(frame, error, redact_exception(error), elapsed, self._report_unobserved)

    def _report_unobserved(self, result: FailedResult[Any]) -> None:
        log.error(
            "command_failed_unobserved",
            bus=self._core.config.name,
            handler=result.metadata["handler"],
            command_id=result.command_id,
            error=result.error,
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
