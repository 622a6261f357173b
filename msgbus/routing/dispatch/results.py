"""DispatchResult, DispatchOutcome and DispatchStatus: the results of a dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Final, final

from msgbus.routing.envelope import Id, MessageCategory, new_id


class DispatchStatus(Enum):
    """The status of a dispatch, or of one dispatcher's part in it."""

    SUCCESS = "success"
    """Every dispatcher succeeded."""

    PARTIAL = "partial"
    """Some dispatchers succeeded, some failed; the outcomes say which."""

    ROUTED = "routed"
    """The dispatchers are found, and nothing has run."""

    NO_DISPATCHER = "no_dispatcher"
    """No route matches the message."""

    HANDLER_ERROR = "handler_error"
    """No dispatcher succeeded; at least one raised."""

    TIMEOUT = "timeout"
    """No dispatcher finished in time."""

    INVALID_MESSAGE = "invalid_message"
    """The topic or the envelope is not valid; nothing has run."""

    PUBLISH_FAILED = "publish_failed"
    """The dispatchers ran, but an output could not be published."""

    SKIPPED = "skipped"
    """Only disabled routes match, or the dispatchers returned this status."""

    # Enum's own is written in Python, and each dispatch hashes several times.
    __hash__ = object.__hash__

    def is_successful(self) -> bool:
        """Return whether it is `SUCCESS`."""
        return self is DispatchStatus.SUCCESS

    def is_error(self) -> bool:
        """Return whether anything failed, including partial failures."""
        return self in _ERRORS

    def requires_retry(self) -> bool:
        """Return whether a retry may succeed."""
        return self in _TRANSIENT

    def is_terminal(self) -> bool:
        """Return whether the dispatch has ended; only `ROUTED` has not."""
        return self is not DispatchStatus.ROUTED


HOP_LIMIT: Final = "HOP_LIMIT"
"""The `error_code` of a message that has reached the limit of hops."""

_ERRORS: Final = frozenset(
    {
        DispatchStatus.PARTIAL,
        DispatchStatus.NO_DISPATCHER,
        DispatchStatus.HANDLER_ERROR,
        DispatchStatus.TIMEOUT,
        DispatchStatus.INVALID_MESSAGE,
        DispatchStatus.PUBLISH_FAILED,
    }
)
_TRANSIENT: Final = frozenset({DispatchStatus.TIMEOUT, DispatchStatus.PUBLISH_FAILED})


def _no_outputs() -> list[str]:
    return []  # `list[str]()` takes ten times as long


@final
@dataclass(slots=True)
class DispatchOutcome:
    """The outcome of one dispatcher for one message."""

    dispatcher_id: str
    route_id: str
    """The first matching route of the dispatcher, by priority."""

    status: DispatchStatus
    outputs: list[str] = field(default_factory=_no_outputs)
    duration_ms: float = 0.0
    error_message: str | None = None
    """The error, redacted."""

    error_code: str | None = None
    exception: BaseException | None = field(default=None, repr=False)
    """The exception itself, not redacted: never log it."""

    def is_successful(self) -> bool:
        """Return whether it succeeded."""
        return self.status is DispatchStatus.SUCCESS

    def is_error(self) -> bool:
        """Return whether it failed."""
        return self.status.is_error()


@final
class DispatchResult:
    """The result of one dispatch. Read-only.

    Ids and times are computed on first access, as most callers only read the status.

    Args:
        dispatch_id: The id of this dispatch; a new one by default.
        status: The status of the whole dispatch.
        topic: The topic of the message.
        route_id: The route of `dispatcher_id`.
        dispatcher_id: The first dispatcher that ran, by priority.
        message_category: The category of the message.
        message_type: The name of its type.
        duration_ms: Milliseconds, including the publishing of outputs.
        started_at: The start, as a datetime or as seconds since the epoch.
        completed_at: The end; by default `started_at` plus `duration_ms`.
        outputs: All output topics, in the order of the dispatchers.
        outcomes: One for each dispatcher that ran, by priority.
        error_message: The error, redacted.
        error_code: A code for the error, for programs.
        correlation_id: The envelope's.
        trace_id: The envelope's.
        span_id: The envelope's.
        unpublished: Outputs that could not be published.
    """

    __slots__ = (
        "_completed", "_dispatch_id", "_started", "correlation_id", "dispatcher_id", "duration_ms",
        "error_code", "error_message", "message_category", "message_type", "outcomes", "outputs",
        "route_id", "span_id", "status", "topic", "trace_id", "unpublished",
    )  # fmt: skip

    def __init__(
        self,
        *,
        status: DispatchStatus,
        topic: str,
        dispatch_id: Id | None = None,
        route_id: str | None = None,
        dispatcher_id: str | None = None,
        message_category: MessageCategory | None = None,
        message_type: str | None = None,
        duration_ms: float = 0.0,
        started_at: datetime | float | None = None,
        completed_at: datetime | None = None,
        outputs: list[str] | None = None,
        output_count: int | None = None,
        outcomes: Sequence[DispatchOutcome] = (),
        error_message: str | None = None,
        error_code: str | None = None,
        correlation_id: Id | None = None,
        trace_id: Id | None = None,
        span_id: Id | None = None,
        unpublished: Sequence[str] = (),
    ) -> None:
        self.status = status
        self.topic = topic
        self._dispatch_id = dispatch_id
        self.route_id = route_id
        self.dispatcher_id = dispatcher_id
        self.message_category = message_category
        self.message_type = message_type
        self.duration_ms = duration_ms
        self._started = started_at
        self._completed = completed_at
        self.outputs = [] if outputs is None else outputs
        self.outcomes = outcomes
        self.error_message = error_message
        self.error_code = error_code
        self.correlation_id = correlation_id
        self.trace_id = trace_id
        self.span_id = span_id
        self.unpublished = unpublished
        if output_count is not None and output_count != len(self.outputs):
            message = f"output_count={output_count}, but there are {len(self.outputs)} outputs."
            raise ValueError(message)

    @property
    def dispatch_id(self) -> Id:
        """The id of this dispatch."""
        if self._dispatch_id is None:
            self._dispatch_id = new_id()
        return self._dispatch_id

    @property
    def started_at(self) -> datetime:
        """The start, in UTC."""
        started = self._started
        if not isinstance(started, datetime):
            stamp = datetime.now(UTC).timestamp() if started is None else started
            self._started = started = datetime.fromtimestamp(stamp, tz=UTC)
        return started

    @property
    def completed_at(self) -> datetime:
        """The end, in UTC."""
        if self._completed is None:
            end = self.started_at.timestamp() + self.duration_ms / 1000
            self._completed = datetime.fromtimestamp(end, tz=UTC)
        return self._completed

    @property
    def output_count(self) -> int:
        """The number of outputs."""
        return len(self.outputs)

    def is_successful(self) -> bool:
        """Return whether every dispatcher succeeded and every output was published."""
        return self.status is DispatchStatus.SUCCESS

    def is_error(self) -> bool:
        """Return whether anything failed, including partial failures."""
        return self.status.is_error()

    def requires_retry(self) -> bool:
        """Return whether a retry may succeed.

        After a partial failure: whether a retry of one of the failed dispatchers may. Retry
        only those, not the whole message. At the hop limit a retry never succeeds.
        """
        if self.status is DispatchStatus.PARTIAL:
            return any(outcome.status.requires_retry() for outcome in self.failed)
        return self.status.requires_retry() and self.error_code != HOP_LIMIT

    def is_terminal(self) -> bool:
        """Return whether the dispatch has ended; only `ROUTED` has not."""
        return self.status.is_terminal()

    @property
    def failed(self) -> list[DispatchOutcome]:
        """The outcomes of the dispatchers that failed."""
        return [outcome for outcome in self.outcomes if outcome.is_error()]

    def __repr__(self) -> str:
        who = f" {self.dispatcher_id}" if self.dispatcher_id else ""
        why = f": {self.error_message}" if self.error_message else ""
        return f"<DispatchResult {self.status.value} {self.topic}{who}{why}>"
