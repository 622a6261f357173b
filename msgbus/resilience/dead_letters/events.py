"""`LetterNotifier`: counts, logs and events of a dead-letter queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from msgbus.messages.message import SystemEvent, set_meta
from msgbus.messages.metadata import Metadata
from msgbus.messages.system_events import (
    DeadLetterDroppedEvent,
    DeadLetteredEvent,
    DeadLetterRefusedEvent,
)
from msgbus.resilience.dead_letters.entry import DeadLetterEntry
from msgbus.resilience.dead_letters.store import Notice
from msgbus.runtime.event_loop import Runtime
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception


@final
class LetterNotifier:
    """Counts letters that come and that are lost, and calls those who listen."""

    def __init__(self) -> None:
        self.added = 0
        self.dropped = 0
        self.refused = 0
        self.runtime: Runtime | None = None
        """Where callbacks run; in the thread that found out, if there is none."""
        self._callbacks: list[Callable[[SystemEvent], object]] = []
        self._lock = threading.Lock()

    def on_event(self, callback: Callable[[SystemEvent], object]) -> None:
        """Call this with each event."""
        self._callbacks.append(callback)

    def took(self, letter: DeadLetterEntry) -> None:
        """Count a letter that was added."""
        with self._lock:
            self.added += 1
        self._tell(DeadLetteredEvent, letter, letter.reason)

    def lost(self, notice: Notice) -> None:
        """Count and log a letter that was dropped or refused; may be called in any thread."""
        letter, reason = notice.letter, notice.reason
        if notice.kind == "dropped":
            with self._lock:
                self.dropped += 1
            log.warning("dead_letter_dropped", **_described(letter), reason=reason)
            self._tell(DeadLetterDroppedEvent, letter, reason)
        else:
            with self._lock:
                self.refused += 1
            log.error("dead_letter_refused", **_described(letter), reason=reason)
            self._tell(DeadLetterRefusedEvent, letter, reason)

    def could_not_write(self, message_type: str, handler: str, error: Exception) -> None:
        """Count and log a message that could not even become a letter."""
        with self._lock:
            self.refused += 1
        log.error(
            "dead_letter_refused",
            message_type=message_type,
            handler=handler,
            letter_id=None,
            reason=redact_exception(error),
        )

    def _tell(self, event_type: type[SystemEvent], letter: DeadLetterEntry, reason: str) -> None:
        if not self._callbacks:
            return
        event = _event(event_type, letter, reason)
        runtime = self.runtime
        if runtime is None or runtime.thread_id == threading.get_ident():
            self._call_back(event)
        else:
            runtime.call_soon(lambda: self._call_back(event))

    def _call_back(self, event: SystemEvent) -> None:
        for callback in self._callbacks:
            try:
                callback(event)
            except Exception as error:  # the border to user code
                log.error(
                    "dead_letter_callback_failed", error=redact_exception(error), traceback=error
                )


def _described(letter: DeadLetterEntry) -> dict[str, str]:
    return {
        "message_type": letter.message_type,
        "handler": letter.handler,
        "letter_id": letter.letter_id,
    }


def _event(event_type: type[SystemEvent], letter: DeadLetterEntry, reason: str) -> SystemEvent:
    """Make the event about a letter, caused by the letter's message."""
    values = {name: getattr(letter, name) for name in event_type.model_fields}
    event = event_type(**{**values, "reason": reason})
    meta = Metadata(
        correlation_id=letter.correlation_id,
        causation_id=letter.message_id,
        session_id=letter.session_id,
        headers=letter.headers,
        fixed=True,
    )
    set_meta(event, meta)
    return event
