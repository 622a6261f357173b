"""Classification of values: a secret, a word of a sentence, a placeholder, or source code."""

import base64
import binascii
import re
from typing import Final

from msgbus.telemetry.redaction import MARKER
from msgbus.telemetry.redaction.card_numbers import Match

_MASKED = re.compile(r"\*+|x{5,}|X{5,}|\[redacted\]")
LITERALS = frozenset({"none", "null", "nil", "true", "false", "undefined"})
# "password: must not be empty" is a sentence, "password: hunter2" is not. Only words that
# validation and authentication messages put right after the key are listed, and they count only
# where a sentence is possible (after a colon and a blank, after "Bearer", after "is").
_PROSE_WORDS: Final = """
    a an and any are as at auth authentication authorization bad be been but by bytes can cannot
    challenge command contains could credential credentials data date datetime decimal delivery
    denied dictionary did do does empty ensure enum error event expected expired expires extra
    failed failure field file flag for forbidden format from got handler handlers has have header if
    in incorrect input inputs instance int invalid is it json key keys length list malformed may
    message mismatch missing must no not number object of on only option optional or password
    permission please provided realm rejected required revoked scheme scope secretstr set should
    signature str string the this time timed to token tokens too tuple type unable unauthorized
    unexpected unknown unset unsupported url uuid value verification was will with wrong yes you
    your
"""
_PROSE = frozenset(_PROSE_WORDS.split())
# What a password may be said to be: "password is weak".
_STATES: Final = """
    absent again all already also always blank busy case case-insensitive case-sensitive common
    compromised correct due either equal exactly fine first found gone good here identical inactive
    just kept known last less like locked long lost made mandatory more most neither never new null
    off ok okay old one open out over pending present public read ready reset right safe same secure
    sent set shared short shown so stale still strong then there unchanged under up used valid
    visible void weak what when where which yours
"""
_IS_STATE = re.compile(
    rf"(?:{'|'.join(_STATES.split())}|[a-z]+(?:ed|ing|able|ible|ly|en))", re.IGNORECASE
)
# Bound parameters in SQL echoed by drivers, and unexpanded environment references.
_PLACEHOLDER = re.compile(
    r"\?|%s|%\(\w+\)s|\$\d+(?:::[\w ]+)?|:\w*(?:pass|pwd|secret|token|key)\w*|\$\{[A-Z_][A-Z0-9_]*"
    # A call without arguments is code: token = read().
    r"|[A-Za-z_.]+\("
    # What others put for a secret: <hidden>.
    r"|<[A-Za-z _-]+>?",
    re.ASCII,
)
_ALGORITHM = re.compile(
    r"(?:sha|md|v|base|argon|b?crypt|pbkdf|utf|rfc|aes|rsa|oauth|http)[-_]?\d.*|\d{1,3}-[a-z]+",
    re.IGNORECASE,
)
_WORD = re.compile(r"[A-Za-z0-9]{16,}", re.ASCII)
_CHANGE = re.compile(r"[A-Za-z](?=\d)|\d(?=[A-Za-z])|[a-z](?=[A-Z])", re.ASCII)
_LETTER = re.compile(r"[^\W\d_]")
_DIGIT_OR_SIGN = re.compile(r"[\d!@#$%^&*+~]")
_URLSAFE_TO_STANDARD = str.maketrans("-_", "+/")


def is_masked(value: str) -> bool:
    """Tell whether nothing of the value is readable any more."""
    return _MASKED.fullmatch(value) is not None


def is_placeholder(value: str) -> bool:
    """Tell whether the value stands for another one: a bound parameter, a variable, a call."""
    return _PLACEHOLDER.fullmatch(value) is not None


def is_prose(value: str) -> bool:
    """Tell whether the value is a word that starts or continues a sentence."""
    return value.partition("[")[0].rstrip("=.,:;!?)").lower() in _PROSE


def is_state(word: str) -> bool:
    """Tell whether a word says how a password is rather than what it is."""
    return is_prose(word) or word.lower() in LITERALS or _IS_STATE.fullmatch(word) is not None


def is_random(value: str) -> bool:
    """Tell whether the value has a long part that mixes letters and digits as no name does."""
    return any(len(_CHANGE.findall(word)) >= 3 for word in _WORD.findall(value))


def is_mixed(value: str, least: int) -> bool:
    """Tell whether the value has letters, and digits or signs among them, as passwords have."""
    return (
        len(value) >= least
        and _LETTER.search(value) is not None
        and _DIGIT_OR_SIGN.search(value) is not None
        and _ALGORITHM.fullmatch(value) is None
        and "://" not in value
        and value[0] not in "<{[("
    )


def decoded(encoded: str) -> str | None:
    """Return the text that base64 stands for, with or without padding; None if it is no text."""
    plain = encoded.rstrip("=").translate(_URLSAFE_TO_STANDARD)
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


# --- Replacements --------------------------------------------------------------------------------


def swap(match: Match) -> str:
    """Replace the group ``secret``, keeping the text around it."""
    secret = match["secret"]
    return match[0] if is_masked(secret) else splice(match, len(secret))


def splice(match: Match, length: int) -> str:
    """Replace the first ``length`` characters of the group ``secret``."""
    start = match.start("secret")
    before = match.string[match.start() : start]
    after = match.string[start + length : match.end()]
    return f"{before}{MARKER}{after}"


# --- Source lines of tracebacks ------------------------------------------------------------------

_FRAME = re.compile(r'[ |]*File "[^"\n]*", line \d+, in ')
_LINE_LIMIT: Final = 512


def is_expression(match: Match) -> bool:
    """Tell whether the match is code, outside of string literals, on a traceback's source line.

    ``connect(password=password)`` passes a name around; it shows no secret. Lines longer than a
    fixed limit are not considered, so that the cost per match stays bounded.
    """
    text = match.string
    line = _line_start(text, match.start())
    frame = _line_start(text, line - 1)
    if not 0 <= frame < line or not _FRAME.match(text, frame, line):
        return False
    return not _ends_in_literal(text[line : match.start()])


def _line_start(text: str, position: int) -> int:
    """Return where the line around a position starts, or -1 if that is too far to the left."""
    nearest = max(0, position - _LINE_LIMIT)
    start = text.rfind("\n", nearest, max(0, position)) + 1
    return start if start or not nearest else -1


def _ends_in_literal(code: str) -> bool:
    """Tell whether a string literal is still open at the end of a piece of source code."""
    quote = ""
    for character in code:
        if not quote and character in "\"'":
            quote = character
        elif character == quote:
            quote = ""
    return bool(quote)
