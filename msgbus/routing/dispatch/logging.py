"""The log events of a dispatch engine. Their keys are in docs/reference/log-events.md."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, final

from msgbus.messages.topics.pattern import is_topic
from msgbus.protocols import require_members
from msgbus.routing.categories import MessageCategory
from msgbus.routing.dispatch.results import DispatchOutcome, DispatchResult
from msgbus.telemetry.logging import EventLogger, Log, StandardLogger

Keys: TypeAlias = dict[str, Any]


class Dispatched(NamedTuple):
    """A message as it was given to `dispatch`, where it may be wrong in any way."""

    topic: object
    category: MessageCategory | None
    envelope: object


_FIX: Final = "Give a logger of the module logging, one of structlog, or another that has them."


@final
class DispatchLog:
    """Writes the log events of one engine."""

    def __init__(self, logger: EventLogger | StandardLogger | None) -> None:
        if logger is not None:
            require_members(logger, EventLogger, "logger", _FIX)
        self._log = Log(logger)
        self.is_enabled: Callable[[int], bool] = self._log.is_enabled
        """Whether events of a level are written."""

    def started(self, given: Dispatched, dispatchers: Sequence[str], routes: Sequence[str]) -> None:
        """Log that a dispatch begins, and to whom the message goes."""
        self._log.info("dispatch_started", **_message(given), **_targets(dispatchers, routes))
        if not self._log.is_enabled(logging.DEBUG):
            return
        for dispatcher_id, route_id in zip(dispatchers, routes, strict=True):
            self._log.debug(
                "dispatch_routed", **_message(given), dispatcher_id=dispatcher_id, route_id=route_id
            )

    def unhandled(self, given: Dispatched, error: str, error_code: str) -> None:
        """Log that a message goes to nobody: a warning, or an error if it is not valid."""
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
        """Log that a dispatcher failed."""
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
        """Log that outputs were not published."""
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
        """Log how a dispatch ended, and each of its dispatchers."""
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
        """Log that the caller of a dispatch was cancelled."""
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
        # What is no topic may have line breaks, and any length.
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
