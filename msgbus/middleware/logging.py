"""Logging of every outcome."""

from __future__ import annotations

from typing import Any, Final, Literal, final

from pydantic import ValidationError

from msgbus.errors import ConfigurationError, Refusal
from msgbus.messages.message import first_message, ids_of
from msgbus.middleware.chain import CallNext
from msgbus.middleware.delivery import (
    current_attempt,
    current_clock,
    current_handler,
    messages_in,
)
from msgbus.runtime.clock import Clock
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact, redact_exception


@final
class LoggingMiddleware:
    """Log the outcome of every message, never its payload.

    | Event | Level | When |
    |---|---|---|
    | `message_handled` | `level` | the handler succeeded |
    | `message_cancelled` | `level` | its caller was cancelled, or the bus stopped |
    | `message_refused` | info | the handler raised a `Refusal` |
    | `message_failed` | warning | it raised anything else |

    All have the keys `message_type`, `message_id`, `correlation_id`, `causation_id`,
    `session_id`, `handler`, `attempt` and `duration` (seconds); the last two have `error`, with
    secrets removed. The traceback is in the bus's own event about the failure.

    A list for a batch handler is one outcome: the type and id are those of its first
    event, and `count` says how many there are.

    Args:
        level: Level of a success: `"debug"` or `"info"`.
        clock: Clock for durations; the bus's clock unless given.

    Raises:
        ConfigurationError: `level` is neither.
    """

    batch: Final = True

    def __init__(
        self, *, level: Literal["debug", "info"] = "debug", clock: Clock | None = None
    ) -> None:
        if level not in ("debug", "info"):
            message = f"level must be 'debug' or 'info', not {level!r}."
            raise ConfigurationError(message)
        self._log_success = log.debug if level == "debug" else log.info
        self._clock = clock

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        """Call the handler and log the outcome."""
        now = current_clock(self._clock).now
        began = now()
        try:
            value = await call_next(message)
        except Refusal as refusal:
            log.info(
                "message_refused", **_facts(message, now() - began), error=_error_text(refusal)
            )
            raise
        except Exception as error:
            log.warning(
                "message_failed", **_facts(message, now() - began), error=_error_text(error)
            )
            raise
        except BaseException:
            self._log_success("message_cancelled", **_facts(message, now() - began))
            raise
        self._log_success("message_handled", **_facts(message, now() - began))
        return value


def _facts(handled: Any, duration: float) -> dict[str, Any]:
    first = first_message(handled)
    facts: dict[str, Any] = {
        **ids_of(first),
        "causation_id": first.causation_id,
        "handler": current_handler(),
        "attempt": current_attempt(),
        "duration": duration,
    }
    if isinstance(handled, list):
        facts["count"] = len(messages_in(handled))
    return facts


def _error_text(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return redact_exception(error)
    # Its own text shows the input values, which may be the message's payload.
    faults = [
        f"{'.'.join(map(str, fault['loc'])) or 'the whole'} ({fault['type']})"
        for fault in error.errors(include_input=False, include_context=False, include_url=False)
    ]
    return redact(f"ValidationError: {error.title}: {', '.join(faults)}")
