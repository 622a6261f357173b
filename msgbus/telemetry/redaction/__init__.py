"""Removal of secrets from text that leaves the process (logs, spans, dead letters).

Secrets are recognised by the *shape of a value* (a credential inside a URL, a JWT, a cloud key, a
card number, the right-hand side of ``password=``), never by a word alone: "token expired" stays
readable. Only the value is replaced by ``[redacted]``; the key, scheme or vendor prefix next to it
stays, so that a reader still sees what was there.

Properties the rest of the code base relies on:

* Total: no string makes :func:`redact` raise.
* Idempotent: the rules are repeated until the text no longer changes, and a text that refuses to
  settle is withheld as a whole. The result is therefore always a fixed point.
* Linear: no pattern can rescan the same characters from many starting points. Unbounded
  repetitions either cannot fail once they have consumed, or stop at a character that the next
  starting point needs; everything else carries an explicit bound.
* Bounded: at most :data:`MAX_LENGTH` characters are examined and returned. Of a longer text the
  beginning is kept and ``... [truncated]`` is appended; see :func:`redact`.

Where leaking and over-redacting compete, over-redaction wins: a lost word costs a reader a minute,
a leaked password costs a rotation.
"""

import functools
from typing import TYPE_CHECKING, Final

from pydantic_core import ValidationError

if TYPE_CHECKING:
    import re

    from msgbus.telemetry.redaction.rules import Rule

__all__ = ["MARKER", "MAX_LENGTH", "redact", "redact_exception", "warm_up"]

MARKER: Final = "[redacted]"
"""What a secret is replaced by."""

MAX_LENGTH: Final = 64 * 1024
"""Upper bound, in characters, of what is examined and of what is returned."""

_TRUNCATED: Final = " ... [truncated]"
# A secret cut in half by the length limit is no longer recognisable, so that much of the end is
# dropped unseen. Longer secrets (keys, JWTs, quoted values) are recognised by their beginning.
_EDGE: Final = 1024
# One round settles nearly every text, a second one proves it; the rest is for pathological input.
_MAX_ROUNDS: Final = 8


def redact(text: str) -> str:
    """Return the text with every recognised secret replaced by ``[redacted]``.

    A text of more than :data:`MAX_LENGTH` characters, before or after the replacements, is cut: its
    beginning is kept without the last kilobyte, where a secret might have been cut in half, and
    ``... [truncated]`` is appended. The result is never longer than :data:`MAX_LENGTH`.

    Args:
        text: Any string.

    Returns:
        The redacted text; the same text if there was nothing to redact.
    """
    for _ in range(_MAX_ROUNDS):
        cleaned = _redact_bounded(text)
        if cleaned == text:
            return text
        text = cleaned
    # Still changing: the text is withheld as a whole.
    return MARKER


def redact_exception(exc: BaseException) -> str:
    """Return ``TypeName: message`` of an exception, redacted.

    Args:
        exc: The exception; its ``__str__`` may raise.

    Returns:
        The redacted line, or only the type name if the message is empty.
    """
    name = type(exc).__name__
    try:
        message = _without_inputs(exc) if isinstance(exc, ValidationError) else str(exc)
    except Exception:
        message = "<unprintable>"
    # The name is not redacted: "InvalidToken: ..." is not an assignment.
    return f"{name}: {encodable(redact(message))}" if message else name


def encodable(text: str) -> str:
    r"""Return the text with halves of characters, which no file can hold, as ``\udcff``."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _without_inputs(error: ValidationError) -> str:
    """The fields and their errors without the values, which are the user's payload."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [f"{'.'.join(map(str, fault['loc'])) or 'value'}: {fault['msg']}" for fault in faults]
    return f"{error.title} is not valid: {'; '.join(lines)}"


def _redact_bounded(text: str) -> str:
    """Apply every rule once, examining and returning no more than the maximal length."""
    if len(text) <= MAX_LENGTH:
        return _redact_once(text)
    cleaned = _redact_once(text[:MAX_LENGTH])
    return cleaned[: max(0, min(len(cleaned), MAX_LENGTH) - _EDGE)] + _TRUNCATED


def _redact_once(text: str) -> str:
    """Apply every rule once."""
    rules, needles, shapes = _rules()
    # Rules only remove text, so what is found in the original text serves them all.
    lowered = text.lower()
    found = {needle for needle in needles if needle in lowered}
    found.update([name for name, shape in shapes if shape.search(lowered)])
    if not found:
        return text
    for rule in rules:
        if not found.isdisjoint(rule.needles):
            text = rule.pattern.sub(rule.swap, text)
    return text


@functools.cache
def _rules() -> "tuple[tuple[Rule, ...], tuple[str, ...], list[tuple[str, re.Pattern[str]]]]":
    # Compiling the patterns takes longer than importing all the rest of the library.
    from msgbus.telemetry.redaction.rules import NEEDLES, RULES, SHAPES

    return RULES, NEEDLES, list(SHAPES.items())


def warm_up() -> None:
    """Compile the rules now, rather than on the event loop at the first failure."""
    _rules()
