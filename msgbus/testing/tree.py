"""The causation tree: which message caused which, and what became of each, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgbus.messages.receipts import PublishStatus
from msgbus.telemetry.redaction import redact_exception
from msgbus.testing.recording.observer import PublishState, RecordedOutcome

if TYPE_CHECKING:
    from msgbus.testing.recording.observer import (
        History,
        RecordedDelivery,
        RecordedMessage,
        RecordedPublish,
    )

_TURNED_AWAY: Final = {
    PublishStatus.FILTERED: "filtered by",
    PublishStatus.REJECTED: "rejected:",
}


def causation_tree(history: History, *, ids: bool) -> str:
    """All messages, each below the one that caused it."""
    entries = {entry.message.message_id: entry for entry in history.messages}
    effects: dict[str | None, list[RecordedMessage]] = {}
    for entry in entries.values():
        cause = entry.message.causation_id
        effects.setdefault(cause if cause in entries else None, []).append(entry)

    lines: list[str] = []
    # A stack, not recursion: a chain of causes may be longer than Python's stack.
    pending = [(entry, "", "") for entry in reversed(effects.get(None, []))]
    while pending:
        entry, first, rest = pending.pop()
        lines.append(first + _line(entry, ids=ids))
        children = effects.get(entry.message.message_id, [])
        for place, child in enumerate(reversed(children)):
            last = place == 0
            pending.append(
                (child, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "))
            )
    return "\n".join(lines)


def _line(entry: RecordedMessage, *, ids: bool) -> str:
    name = type(entry.message).__name__
    if ids:
        name = f"{name} {entry.message.message_id}"
    return f"{name}: {'; '.join(_outcomes(entry)) or 'no handlers'}"


def _outcomes(entry: RecordedMessage) -> list[str]:
    texts = [text for one in entry.publishes if (text := _publish_text(one))]
    if entry.queue_state and not entry.deliveries:
        texts.append(entry.queue_state)
    for outcome in RecordedOutcome:
        # By name: which of several handlers comes first is the event loop's affair.
        mine = [one for one in entry.deliveries if one.outcome is outcome]
        mine.sort(key=lambda one: one.handler)
        if outcome is RecordedOutcome.FAILED:
            texts += [f"{outcome.value} {one.handler}: {_shown(one)}" for one in mine]
        elif mine:
            texts.append(f"{outcome.value} {', '.join(one.handler for one in mine)}")
    expected = sum(one.receipt.handlers for one in entry.publishes if one.receipt is not None)
    missing = expected - len(entry.deliveries)
    if missing > 0:
        # Still queued, or turned away by the handler's own filter: nobody tells which.
        texts.append(f"not run by {missing} of {expected} handlers")
    return texts


def _shown(delivery: RecordedDelivery) -> str:
    return "" if delivery.error is None else redact_exception(delivery.error)


def _publish_text(publish: RecordedPublish) -> str:
    """The outcome of the publish itself; empty if it simply went well."""
    if publish.state is not PublishState.ENDED:
        text: str = publish.state.value
        return text
    if publish.error is not None:
        return f"not published: {redact_exception(publish.error)}"
    receipt = publish.receipt
    if receipt is not None and receipt.duplicate:
        return "published before"
    if receipt is None or receipt.status not in _TURNED_AWAY:
        return ""
    return f"{_TURNED_AWAY[receipt.status]} {receipt.reason}"
