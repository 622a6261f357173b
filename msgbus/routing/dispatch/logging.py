"""Log events of a dispatch engine. Their fields are in docs/reference/log-events.md."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, final

from msgbus.messages.topics.pattern import is_topic
from msgbus.routing.dispatch.results import DispatchOutcome, DispatchResult
from msgbus.routing.envelope import MessageCategory
from msgbus.runtime.arguments import require_members
from msgbus.telemetry.logging import EventLog, EventLogger, StandardLogger

Keys: TypeAlias = dict[str, Any]


class Dispatched(NamedTuple):
    """A message as passed to `dispatch`, not validated."""

    topic: object
    category: MessageCategory | None
    envelope: object


_FIX: Final = "Give a logger of the module logging, one of structlog, or any with these methods."


@final
class DispatchLog:
    """Write the log events of one engine."""

    def __init__(self, logger: EventLogger | StandardLogger | None) -> None:
        if logger is not None:
            require_members(logger, EventLogger, "logger", _FIX)
        self._log = EventLog(logger)
        self.is_enabled: Callable[[int], bool] = self._log.is_enabled
        """Return whether events of a level are written."""

    def started(self, given: Dispatched, dispatchers: Sequence[str], routes: Sequence[str]) -> None:
        """Log the start of a dispatch, and its dispatchers."""
        self._log.info("dispatch_started", **_message(given), **_targets(dispatchers, routes))
        if not self._log.is_enabled(logging.DEBUG):
            return
        for dispatcher_id, route_id in zip(dispatchers, routes, strict=True):
            self._log.debug(
                "dispatch_routed", **_message(given), dispatcher_id=dispatcher_id, route_id=route_id
            )

    def unhandled(self, given: Dispatched, error: str, error_code: str) -> None:
        """Log a message without dispatchers: a warning, or an error if it is not valid."""
        if error_code == "NO_DISPATCHER":
            self._log.warning(
                "no_dispatcher", **_message(given), error=error, error_code=error_code
            )
        elif error_code == "CATEGORY_MISMATCH":
            self._log.warning(
                "category_mismatch", **_message(given), error=error, error_code=error_code
            )
        else:
            self._log.error(
                "invalid_message", **_message(given), error=error, error_code=error_code
            )

    def failed(self, given: Dispatched, outcome: DispatchOutcome) -> None:
        """Log the failure of a dispatcher."""
        self._log.error(
            "dispatcher_failed",
            **_message(given),
            dispatcher_id=outcome.dispatcher_id,
            route_id=outcome.route_id,
            duration_ms=outcome.duration_ms,
            error=outcome.error_message,
            error_code=outcome.error_code,
            traceback=outcome.exception,
        )

    def unpublished(self, given: Dispatched, result: DispatchResult) -> None:
        """Log outputs that were not published."""
        self._log.warning(
            "output_not_published",
            **_message(given),
            outputs=list(result.unpublished),
            error=result.error_message,
            error_code=result.error_code,
        )

    def completed(
        self,
        given: Dispatched,
        result: DispatchResult,
        dispatchers: Sequence[str],
        routes: Sequence[str],
    ) -> None:
        """Log the end of a dispatch and of each of its dispatchers."""
        for outcome in result.outcomes if self._log.is_enabled(logging.DEBUG) else ():
            self._log.debug(
                "dispatcher_completed",
                **_message(given),
                dispatcher_id=outcome.dispatcher_id,
                route_id=outcome.route_id,
                **_ending(outcome, len(outcome.outputs)),
            )
        self._log.info(
            "dispatch_completed",
            **_message(given),
            **_targets(dispatchers, routes),
            **_ending(result, result.output_count),
        )

    def cancelled(
        self,
        given: Dispatched,
        duration_ms: float,
        dispatchers: Sequence[str],
        routes: Sequence[str],
    ) -> None:
        """Log a dispatch whose caller was cancelled."""
        self._log.info(
            "dispatch_cancelled",
            **_message(given),
            **_targets(dispatchers, routes),
            duration_ms=duration_ms,
        )


def _message(given: Dispatched) -> Keys:
    topic, category, envelope = given
    correlation_id: object = getattr(envelope, "correlation_id", None)
    trace_id: object = getattr(envelope, "trace_id", None)
    return {
        # Text that is not a topic may contain line breaks and have any length.
        "topic": topic if isinstance(topic, str) and is_topic(topic) else f"{topic!r:.80}",
        "category": None if category is None else category.value,
        "message_type": getattr(envelope, "message_type", None),
        "message_id": getattr(envelope, "envelope_id", None),
        "correlation_id": None if correlation_id is None else str(correlation_id),
        "trace_id": None if trace_id is None else str(trace_id),
    }


def _targets(dispatchers: Sequence[str], routes: Sequence[str]) -> Keys:
    return {
        "dispatcher_ids": list(dispatchers),
        "route_ids": list(routes),
        "dispatcher_count": len(dispatchers),
    }


def _ending(result: DispatchOutcome | DispatchResult, output_count: int) -> Keys:
    return {
        "status": result.status.value,
        "duration_ms": result.duration_ms,
        "output_count": output_count,
        "error_code": result.error_code,
    }
