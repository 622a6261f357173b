"""The data of a dispatch: the route, what became of each dispatcher, and the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, final

from msgbus.messages.topics.pattern import TopicPattern
from msgbus.routing.categories import MessageCategory
from msgbus.routing.envelope import Id, new_id
from msgbus.routing.inputs import require_category, require_id, require_priority


class DispatchStatus(Enum):
    """What became of a message, or of one dispatcher's work on it."""

    SUCCESS = "success"
    """Every dispatcher did its work."""

    PARTIAL = "partial"
    """Some dispatchers did, some did not; the outcomes say which."""

    ROUTED = "routed"
    """It is known who would get it, and nothing has run."""

    NO_DISPATCHER = "no_dispatcher"
    """No route leads from here to a dispatcher."""

    HANDLER_ERROR = "handler_error"
    """No dispatcher did its work; at least one raised."""

    TIMEOUT = "timeout"
    """No dispatcher did its work in time."""

    INVALID_MESSAGE = "invalid_message"
    """The topic or the envelope is wrong; nothing has run."""

    PUBLISH_FAILED = "publish_failed"
    """The dispatchers ran, but an output could not be published."""

    SKIPPED = "skipped"
    """Left alone on purpose: by disabled routes, or by the dispatchers themselves."""

    # Enum's own is written in Python, and a dispatch asks for it several times.
    __hash__ = object.__hash__

    def is_successful(self) -> bool:
        """Whether everything went well."""
        return self is DispatchStatus.SUCCESS

    def is_error(self) -> bool:
        """Whether anything went wrong, be it only in part."""
        return self in _ERRORS

    def requires_retry(self) -> bool:
        """Whether the same may go well another time."""
        return self in _TRANSIENT

    def is_terminal(self) -> bool:
        """Whether it is over; only `ROUTED` is not."""
        return self is not DispatchStatus.ROUTED


HOP_LIMIT: Final = "HOP_LIMIT"
"""The `error_code` of a message that was passed on too often."""

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


@final
@dataclass(frozen=True)
class DispatchRoute:
    """Which messages of which topics go to which dispatcher.

    Raises:
        InvalidTopicError: `topic_pattern` is not a pattern.
        ConfigurationError: An id or `message_type` is blank, `message_category` is none, or
            `priority` is no whole number.
    """

    route_id: str
    topic_pattern: str
    message_category: MessageCategory
    dispatcher_id: str
    message_type: str | None = None
    """Only messages of this name; `None` for all."""

    priority: int = 0
    """Higher comes first; among equals, the one registered first."""

    enabled: bool = True
    description: str = ""
    correlation_id: Id | None = None
    metadata: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    pattern: TopicPattern = field(init=False, repr=False, compare=False)
    """`topic_pattern`, compiled."""

    def __post_init__(self) -> None:
        """Check everything and compile the pattern, so that a wrong route is refused here."""
        require_id("A route's id", self.route_id)
        what = f"route {self.route_id!r}"
        require_category(what, self.message_category)
        require_id(f"The dispatcher_id of {what}", self.dispatcher_id)
        if self.message_type is not None:
            require_id(f"The message_type of {what}", self.message_type)
        require_priority(what, self.priority)
        object.__setattr__(self, "pattern", TopicPattern(self.topic_pattern))
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

    def matches_topic(self, topic: str) -> bool:
        """Whether the pattern matches `topic`, be the route enabled or not."""
        return self.pattern.matches(topic)

    def matches(
        self, topic: str, category: MessageCategory, message_type: str | None = None
    ) -> bool:
        """Whether such a message takes this route."""
        return self.enabled and self.takes(category, message_type) and self.matches_topic(topic)

    def takes(self, category: MessageCategory, message_type: str | None) -> bool:
        """Whether category and type fit, whatever the topic."""
        return self.message_category is category and self.message_type in (None, message_type)


def _no_outputs() -> list[str]:
    return []  # `list[str]()` takes ten times as long


@final
@dataclass(slots=True)
class DispatchOutcome:
    """What became of one dispatcher's work on one message."""

    dispatcher_id: str
    route_id: str
    """The first route, by priority, that led to it."""

    status: DispatchStatus
    outputs: list[str] = field(default_factory=_no_outputs)
    duration_ms: float = 0.0
    error_message: str | None = None
    """What went wrong, secrets removed."""

    error_code: str | None = None
    exception: BaseException | None = field(default=None, repr=False)
    """What was raised, as it was: for code in this process, never for a log."""

    def is_successful(self) -> bool:
        """Whether it did its work."""
        return self.status is DispatchStatus.SUCCESS

    def is_error(self) -> bool:
        """Whether it failed."""
        return self.status.is_error()


@final
class DispatchResult:
    """What became of one message. Read it, do not write it.

    Ids and times are made when somebody looks at them, as most results are only asked
    whether they are successful.

    Args:
        dispatch_id: An id for this dispatch; made if not given.
        status: The whole in one word.
        topic: Where the message was sent.
        route_id: The route of `dispatcher_id`.
        dispatcher_id: The first dispatcher, in order of priority, that ran.
        message_category: What sort of message it was.
        message_type: What it was called.
        duration_ms: How long it took, publishing included.
        started_at: When it began, as a time or as seconds since the epoch.
        completed_at: When it ended; `started_at` and `duration_ms` say so too.
        outputs: All output topics, in the order of the dispatchers.
        outcomes: One for each dispatcher that ran, in order of priority.
        error_message: What went wrong, secrets removed.
        error_code: The same in one word, for programs.
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
        """An id for this dispatch."""
        if self._dispatch_id is None:
            self._dispatch_id = new_id()
        return self._dispatch_id

    @property
    def started_at(self) -> datetime:
        """When it began, in UTC."""
        started = self._started
        if not isinstance(started, datetime):
            stamp = datetime.now(UTC).timestamp() if started is None else started
            self._started = started = datetime.fromtimestamp(stamp, tz=UTC)
        return started

    @property
    def completed_at(self) -> datetime:
        """When it ended, in UTC."""
        if self._completed is None:
            end = self.started_at.timestamp() + self.duration_ms / 1000
            self._completed = datetime.fromtimestamp(end, tz=UTC)
        return self._completed

    @property
    def output_count(self) -> int:
        """How many outputs there are."""
        return len(self.outputs)

    def is_successful(self) -> bool:
        """Whether every dispatcher did its work and every output was published."""
        return self.status is DispatchStatus.SUCCESS

    def is_error(self) -> bool:
        """Whether anything went wrong, be it only in part."""
        return self.status.is_error()

    def requires_retry(self) -> bool:
        """Whether the same may go well another time.

        In a partial failure: whether one of those that failed may. Try those again that
        failed, not the whole message: the others have done their work. A message that has
        reached the hop limit would reach it again.
        """
        if self.status is DispatchStatus.PARTIAL:
            return any(outcome.status.requires_retry() for outcome in self.failed)
        return self.status.requires_retry() and self.error_code != HOP_LIMIT

    def is_terminal(self) -> bool:
        """Whether it is over; only `ROUTED` is not."""
        return self.status.is_terminal()

    @property
    def failed(self) -> list[DispatchOutcome]:
        """The outcomes of those that did not do their work."""
        return [outcome for outcome in self.outcomes if outcome.is_error()]

    def __repr__(self) -> str:
        who = f" {self.dispatcher_id}" if self.dispatcher_id else ""
        why = f": {self.error_message}" if self.error_message else ""
        return f"<DispatchResult {self.status.value} {self.topic}{who}{why}>"
