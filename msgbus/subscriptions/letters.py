"""What a subscription writes of a message that it gives up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgbus.journal.records import DeadLetter
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.tracebacks import redacted_traceback

if TYPE_CHECKING:
    from msgbus.subscriptions.desk import Desk
    from msgbus.subscriptions.window import Entry


def letter_of(name: str, target: str, entry: Entry, desk: Desk, time: float) -> DeadLetter:
    """The dead letter of a message whose last try has failed; secrets are removed here."""
    reason = _reason(entry, desk)
    letter = DeadLetter(name, entry.record, entry.attempt, None, time, reason=reason, target=target)
    error = entry.error
    if error is None:
        return letter
    return letter._replace(
        error=redact_exception(error),
        error_type=type(error).__name__,
        traceback=redacted_traceback(error),
    )


def _reason(entry: Entry, desk: Desk) -> str:
    """Why it is given up, in the words of `msgbus.resilience`."""
    config = desk.config
    if entry.key is not None and entry.key in desk.parked:
        return "key parked"
    if config.is_at_most_once or config.retry.max_attempts == 1:
        return "not retried"
    is_exhausted = entry.attempt >= config.retry.max_attempts
    return "retries exhausted" if is_exhausted else "not to be retried"
