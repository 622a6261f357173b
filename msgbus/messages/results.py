"""Results of commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Generic, final

from msgbus.messages.frame import Frame
from msgbus.messages.message import Command, R

_NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


class CommandResult(Frame, Generic[R]):
    """The outcome of one command: a value or an error. Read-only."""

    # For speed one object is the frame of a command while it runs and its result afterwards,
    # without a constructor: `execute` fills the slots. A second object and a call of __init__
    # would cost as much as two awaits.
    __slots__ = ("elapsed", "reply")

    message: Command[R]
    reply: R
    elapsed: float

    @property
    def success(self) -> bool:
        """Whether the handler, and all middleware around it, succeeded."""
        return True

    @property
    def value(self) -> R | None:
        """The reply of the handler; `None` if the command failed."""
        return self.reply

    @property
    def error(self) -> str | None:
        """The error as text, redacted; `None` on success."""
        return None

    @property
    def exception(self) -> BaseException | None:
        """The exception that the handler raised; `None` on success."""
        return None

    @property
    def command_id(self) -> str:
        """The message id of the command."""
        return self.message.message_id

    @property
    def duration(self) -> float:
        """Seconds from `execute` to the result, middleware and retries included."""
        return self.elapsed

    @property
    def attempts(self) -> int:
        """The number of attempts."""
        return self.attempt

    @property
    def is_fallback(self) -> bool:
        """Whether the value comes from a fallback, as the handler failed."""
        return self._fallback_error is not None

    @property
    def metadata(self) -> Mapping[str, object]:
        """More about the outcome: after a fallback, `handler` and, as `fallback`, its error."""
        error = self._fallback_error
        if error is None:
            return _NOTHING
        return MappingProxyType({"handler": self.owner.name, "fallback": error})

    @property
    def _fallback_error(self) -> str | None:
        failures = None if self.context is None else self.context.failures
        return None if failures is None else failures.fallback

    def unwrap(self) -> R:
        """Return the value, or raise the exception of the handler."""
        return self.reply

    def __bool__(self) -> bool:
        return self.success

    def __repr__(self) -> str:
        outcome = f"value={self.value!r}" if self.success else f"error={self.error!r}"
        return f"<{type(self.message).__name__} result: {outcome}>"


@final
class NestedResult(CommandResult[R]):
    """The result of a command with a deadline, or of one sent by a handler."""

    __slots__ = ("deadline", "on_lane", "parent")

    def __init__(
        self,
        command: Command[R],
        owner: object,
        deadline: float | None,
        parent: Frame | None,
        depth: int,
    ) -> None:
        self._depth = depth
        self.message = command
        self.owner = owner
        self.context = None
        self.deadline = deadline
        self.parent = parent
        self.on_lane = parent is not None and parent.on_lane


@final
class QueuedResult(CommandResult[R]):
    """The result of an enqueued command, which may have had attempts before."""

    __slots__ = ("delivery", "first_attempt", "is_retried_later")

    def __init__(
        self,
        command: Command[R],
        owner: object,
        attempt: int,
        *,
        retried: bool,
        delivery: object = None,
    ) -> None:
        self.message = command
        self.owner = owner
        self.context = None
        self.first_attempt = attempt
        self.is_retried_later = retried
        self.delivery = delivery


@final
class FailedResult(CommandResult[R]):
    """The result of a failed command. If it is never read, that is logged."""

    __slots__ = ("_error", "_exception", "_metadata", "_on_unobserved", "first_attempt")

    def __init__(
        self,
        frame: CommandResult[R],
        exception: Exception,
        error: str,
        duration: float,
        on_unobserved: Callable[[FailedResult[R]], None],
    ) -> None:
        self.message = frame.message
        self.owner = frame.owner
        self.context = None
        self.elapsed = duration
        self.first_attempt = frame.attempt
        self._exception = exception
        self._error = error
        self._metadata: dict[str, object] = {"handler": frame.owner.name}
        self._on_unobserved: Callable[[FailedResult[R]], None] | None = on_unobserved

    @property
    def success(self) -> bool:
        """Always false."""
        self._observe()
        return False

    @property
    def value(self) -> None:
        """Always `None`."""
        self._observe()

    @property
    def error(self) -> str:
        """The error as text, redacted."""
        self._observe()
        return self._error

    @property
    def exception(self) -> BaseException:
        """The exception that the handler raised."""
        self._observe()
        return self._exception

    @property
    def metadata(self) -> Mapping[str, object]:
        """More about the failure: `handler`, and `dead_letter` if it became one."""
        return self._metadata

    def add_metadata(self, key: str, value: object) -> None:
        """Add to `metadata`; for the bus."""
        self._metadata[key] = value

    def peek_error(self) -> str:
        """Return the error text without marking the result as read."""
        return self._error

    def peek_exception(self) -> Exception:
        """Return the exception without marking the result as read."""
        return self._exception

    def unwrap(self) -> R:
        """Raise the exception of the handler."""
        self._observe()
        raise self._exception

    def _observe(self) -> None:
        self._on_unobserved = None

    def __del__(self) -> None:
        report = getattr(self, "_on_unobserved", None)
        if report is not None:
            self._observe()
            report(self)
