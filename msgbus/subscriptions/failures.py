"""Failed attempts: their outcome, their text, and their log event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgbus.errors import HandlerTimeoutError, Refusal
from msgbus.journal.records import Outcome
from msgbus.subscriptions.decision import FailureDecision, Next
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.subscriptions.in_flight import InFlight


def outcome_of(error: BaseException | None) -> Outcome:
    """Return the outcome of an attempt that raised this, if anything."""
    if error is None:
        return Outcome.OK
    if isinstance(error, Refusal):
        return Outcome.REFUSED
    if isinstance(error, HandlerTimeoutError):
        return Outcome.TIMED_OUT
    return Outcome.FAILED if isinstance(error, Exception) else Outcome.CANCELLED


def error_text(error: BaseException | None, attempts: int = 1) -> str:
    """Return the redacted text of an error; of none if the process ended so many times."""
    if error is not None:
        return redact_exception(error)
    times = "" if attempts == 1 else f", {attempts} times"
    return f"The process ended while the message was being handled{times}."


def log_failure(
    one: InFlight, error: Exception | None, decision: FailureDecision, *, is_command: bool
) -> None:
    """Log a failed attempt, with what follows from it: a retry is a warning."""
    if decision.then in {Next.RETRY, Next.LATER}:
        if is_command:
            log.warning("enqueued_command_retried", delay=decision.pause, **_facts(one, error))
        else:
            log.warning("subscription_retry_scheduled", delay=decision.pause, **_facts(one, error))
    elif decision.then is Next.BLOCK:
        log.error("subscription_blocked", **_facts(one, error))
    elif decision.then is Next.DROP:
        log.error("subscription_dropped_message", **_facts(one, error))
    elif is_command:
        log.error("enqueued_command_failed", **_facts(one, error))
    else:
        log.error("subscription_dead_lettered", **_facts(one, error))


def log_overflow(one: InFlight, error: str) -> None:
    """Log a message that is dead-lettered, as too many of its key are parked."""
    log.error("subscription_dead_lettered", **_facts(one, None, error))


def _facts(one: InFlight, error: Exception | None, text: str = "") -> dict[str, Any]:
    record = one.record
    return {
        "subscription": one.subscription,
        "offset": one.offset,
        "message_type": record.name,
        "message_id": record.message_id,
        "correlation_id": record.correlation_id,
        "session_id": record.session_id,
        "attempt": one.attempt,
        "error": text or error_text(error, one.attempt),
        "traceback": error,
    }
