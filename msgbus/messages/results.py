"""What became of a command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Generic, final

from msgbus.bus.context import Frame
from msgbus.messages.message import Command, R

_NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


class CommandResult(Frame, Generic[R]):
    """The outcome of one command: a value, or the reason there is none.

    Read-only: there are no setters. The command's id is made only if somebody asks for it.
    """

    # One object is both the frame of a command while it runs and its result afterwards,
    # and it has no constructor: `execute` fills the slots. Both are measured: a second
    # object and a call of __init__ would cost as much as two awaits.
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
        """The handler's reply; `None` if the command failed."""
        return self.reply

    @property
    def error(self) -> str | None:
        """The error as text, secrets removed; `None` on success."""
        return None

    @property
    def exception(self) -> BaseException | None:
        """The handler's own exception; `None` on success."""
        return None

    @property
    def command_id(self) -> str:
        """The command's message id."""
        return self.message.message_id

    @property
    def duration(self) -> float:
        """Seconds from `execute` to the result, middleware and retries included."""
        return self.elapsed

    @property
    def attempts(self) -> int:
        """How often the handler was tried."""
        return self.attempt

    @property
    def is_fallback(self) -> bool:
        """Whether the value is a fallback's, as the handler failed."""
        return self._answered_for is not None

    @property
    def metadata(self) -> Mapping[str, object]:
        """What the bus has to tell beside the value, such as the handler that failed.

        `fallback` is the error that a fallback has answered for.
        """
        error = self._answered_for
        if error is None:
            return _NOTHING
        return MappingProxyType({"handler": self.owner.name, "fallback": error})

    @property
    def _answered_for(self) -> str | None:
        trouble = None if self.context is None else self.context.trouble
        return None if trouble is None else trouble.fallback

    def unwrap(self) -> R:
        """The value, or the handler's own exception raised again."""
        return self.reply

    def __bool__(self) -> bool:
        return self.success

    def __repr__(self) -> str:
        outcome = f"value={self.value!r}" if self.success else f"error={self.error!r}"
        return f"<{type(self.message).__name__} result: {outcome}>"


@final
class NestedResult(CommandResult[R]):
    """The same for a command with a deadline, or a caller that is itself a handler."""

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
    """The same for a command out of a journal, which may have been tried before."""

    __slots__ = ("first_attempt", "is_retried_later")

    def __init__(self, command: Command[R], owner: object, attempt: int, *, retried: bool) -> None:
        self.message = command
        self.owner = owner
        self.context = None
        self.first_attempt = attempt
        self.is_retried_later = retried


@final
class FailedResult(CommandResult[R]):
    """A failed command. If nobody ever looks at it, it says so in the log."""

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
        """Always false here."""
        self._observe()
        return False

    @property
    def value(self) -> None:
        """Nothing: the command failed."""
        self._observe()

    @property
    def error(self) -> str:
        """The error as text, secrets removed."""
        self._observe()
        return self._error

    @property
    def exception(self) -> BaseException:
        """The handler's own exception."""
        self._observe()
        return self._exception

    @property
    def metadata(self) -> Mapping[str, object]:
        """What the bus has to tell beside the error, such as the handler that failed."""
        return self._metadata

    def tell(self, key: str, value: object) -> None:
        """For the bus: put something into `metadata`."""
        self._metadata[key] = value

    def peek_error(self) -> str:
        """The error text, without counting as a look at the result."""
        return self._error

    def peek_exception(self) -> Exception:
        """The exception, without counting as a look at the result."""
        return self._exception

    def unwrap(self) -> R:
        """Raise the handler's own exception."""
        self._observe()
        raise self._exception

    def _observe(self) -> None:
        self._on_unobserved = None

    def __del__(self) -> None:
        report = getattr(self, "_on_unobserved", None)
        if report is not None:
            self._observe()
            report(self)
