"""What a secret looks like: one rule for each kind, and what only looks like one."""

import base64
import binascii
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from msgbus.telemetry.cards import DIGITS, MARKER, Match, swap_cards

_Replace = Callable[[Match], str]


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of secret.

    Attributes:
        needles: Lower-case substrings, one of which is in every text the pattern can match; a
            text without any skips the pattern, which keeps innocent texts cheap.
        pattern: Matches the secret in the group ``secret`` along with its context.
        replace: Turns a match into its replacement.
    """

    needles: tuple[str, ...]
    pattern: re.Pattern[str]
    replace: _Replace

    def apply(self, text: str, lowered: str) -> str:
        """Return ``text`` without this kind of secret; ``lowered`` is for the needles."""
        # A loop, because any() over a generator takes most of the time of a short text.
        for needle in self.needles:
            if needle in lowered:
                return self.pattern.sub(self.replace, text)
        return text


# --- What is not a secret ------------------------------------------------------------------------

_MASKED = re.compile(r"\*+|\[redacted\]")
_LITERALS = frozenset({"none", "null", "nil", "true", "false", "undefined"})
# "password: must not be empty" is a sentence, "password: hunter2" is not. Only words that
# validation and authentication messages put right after the key are listed, and they count only
# where a sentence is possible (after a colon and a blank, after "Bearer").
_PROSE_WORDS: Final = """
    a an and any are as at auth authentication authorization bad be been but by bytes can cannot
    challenge command contains could credential credentials delivery denied did do does empty
    error event expected expired expires failed failure field file flag for forbidden format
    from got handler handlers has have header if in incorrect input int invalid is it key length
    malformed may message mismatch missing must no not of on only option optional or permission
    please provided realm rejected required revoked scheme scope secretstr should signature str
    string the this timed to token tokens too type unable unauthorized unexpected unknown unset
    unsupported value verification was will with wrong you your
"""
_PROSE = frozenset(_PROSE_WORDS.split())
# Bound parameters in SQL echoed by drivers, and unexpanded environment references.
_PLACEHOLDER = re.compile(
    r"\?|%s|%\(\w+\)s|\$\d+(?:::[\w ]+)?|:\w*(?:pass|pwd|secret|token|key)\w*|\$\{[A-Z_][A-Z0-9_]*",
    re.ASCII,
)
_CLOSERS: Final = ")]}>,."
_OPENERS: Final = "([{"


def _is_masked(value: str) -> bool:
    """Tell whether nothing of the value is readable any more."""
    return _MASKED.fullmatch(value) is not None


def _is_prose(value: str) -> bool:
    """Tell whether the value is a word that starts or continues a sentence."""
    return value.partition("[")[0].rstrip("=.,:;!?)").lower() in _PROSE


# --- Replacements --------------------------------------------------------------------------------


def _swap(match: Match) -> str:
    """Replace the group ``secret``, keeping the text around it."""
    secret = match["secret"]
    return match[0] if _is_masked(secret) else _splice(match, len(secret))


def _splice(match: Match, length: int) -> str:
    """Replace the first ``length`` characters of the group ``secret``."""
    start = match.start("secret")
    before = match.string[match.start() : start]
    after = match.string[start + length : match.end()]
    return f"{before}{MARKER}{after}"


def _swap_unless_prose(match: Match) -> str:
    """Replace the group ``secret`` unless it is an ordinary word."""
    return match[0] if _is_prose(match["secret"]) else _swap(match)


def _swap_header(match: Match) -> str:
    """Replace the value of an ``Authorization`` header.

    Without a scheme, letters alone are taken for prose ("authorization: user lacks role").
    """
    secret: str = match["secret"]
    if match["scheme"] is None and (secret.isalpha() or secret.lower() in _SCHEME_NAMES):
        return match[0]
    return _swap_unless_prose(match)


def _swap_basic(match: Match) -> str:
    """Replace what follows ``Basic`` if it really decodes to ``user:password``."""
    encoded: str = match["secret"].rstrip("=").translate(_URLSAFE_TO_STANDARD)
    try:
        decoded = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return match[0]
    return _swap(match) if ":" in decoded and decoded.isprintable() else match[0]


def _swap_quoted(match: Match) -> str:
    """Replace a quoted value, unless it is the name of a setting being looked up in source code."""
    # os.environ["DB_PASSWORD"] in a traceback names a secret without containing it.
    if _LOOKUP.search(match["wrap"]) and _is_expression(match):
        return match[0]
    return _swap(match)


def _swap_unquoted(match: Match) -> str:
    """Replace an unquoted value, leaving closing punctuation of the surrounding text in place."""
    secret: str = match["secret"]
    if secret.startswith(MARKER) and not secret[len(MARKER) :].strip(_CLOSERS):
        return match[0]
    # "{a;b}" is how ODBC quotes: there the closing brace belongs to the value.
    value = secret if _BRACED.fullmatch(secret) else secret.rstrip(_CLOSERS)
    return match[0] if _is_harmless(match, value) else _splice(match, len(value))


def _is_harmless(match: Match, value: str) -> bool:
    """Tell whether the unquoted right-hand side of an assignment is no secret."""
    if not value.strip(_OPENERS) or value.lower() in _LITERALS:
        return True
    # What is in the quotes has been dealt with already.
    if match.string[match.end() : match.end() + 1] in _QUOTES and _LEAD.fullmatch(value):
        return True
    if _is_masked(value) or _PLACEHOLDER.fullmatch(value):
        return True
    if match["sep"] == ":" and match["gap"] and _is_prose(value):
        return True
    # PWD and OLDPWD are working directories, not passwords.
    if match["key"].lower() == "pwd" and value[0] in "/~":
        return True
    return not value[0].isdigit() and _is_expression(match)


# --- Source lines of tracebacks ------------------------------------------------------------------

_FRAME = re.compile(r'[ |]*File "[^"\n]*", line \d+, in ')
_LOOKUP = re.compile(r"\w\[\Z|get(?:env)?\(\Z")
_LINE_LIMIT: Final = 512


def _is_expression(match: Match) -> bool:
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


# --- Patterns ------------------------------------------------------------------------------------

# ASCII keeps case folding and \w predictable, and lets the needles be plain lower-case strings.
_FLAGS: Final = re.ASCII | re.IGNORECASE
_URLSAFE_TO_STANDARD = str.maketrans("-_", "+/")

# A key needs no left boundary ("DB_PASSWORD", "clientSecret") but ends right before the separator:
# that is what tells "token=" from "max_tokens=", "token_type=" and "tokens:". The lookbehinds spare
# parser messages ("Unexpected token: <") and user names of URLs ("redis://token:...").
_KEY: Final = (
    r"(?<!://)(?P<key>pass(?:word|wd|phrase|code)(?:[_-]?(?:hash|\d{1,2}))?|pwd|secret"
    r"|(?<!unexpected )token"
    r"|(?:api|access|account|secret|private|signing|encryption|master|auth)[ _-]?key"
    r"|shared[_-]?access[_-]?signature"
    # As words of a sentence these are too common, so here the syntax has to be unambiguous.
    r"|(?:(?<![a-z])pass|credentials?)(?=[ \t]{0,8}=|\\{0,4}[\"']))"
)
_KEY_NEEDLES: Final = ("pass", "pwd", "secret", "token", "key", "signature", "credential")
_KEY_END: Final = r"\\*+[\"']?\]?[ \t]*+"
_SEPARATOR: Final = r"(?P<sep>={1,3}>?|:=|:(?!:|//))(?P<gap>[ \t]*+)"
# A possibly escaped quote, then everything up to the same quote, or to the end of the line if the
# text was cut off. A quote after a backslash or doubled as in SQL never ends the value: at worst
# too much is hidden.
_QUOTED: Final = (
    r"(?P<quote>\\*+(?:\"\"\"|'''|[\"']))"
    r"(?P<secret>(?:(?!(?<!\\)(?P=quote))[^\r\n]|(?P=quote){2})++)"
)
# A comma ends the value only where another item follows: "p,w" is one password.
_UNQUOTED: Final = (
    r"(?P<secret>\{[^{}\"'\r\n]+\}|(?:[^\s\"'&;,]|,(?![\s\"']|\Z|[\w.-]{1,64}[=:]))++)"
)
_QUOTES = frozenset("\"'")
# What may stand between the separator and the quote: SecretStr("..."), ["..."], b"...", \"...\".
_LEAD_PATTERN: Final = r"(?P<wrap>(?:[\w.]{0,40}[(\[])?)[bfru]{0,2}"
_LEAD = re.compile(rf"{_LEAD_PATTERN}\\*", _FLAGS)
_BRACED = re.compile(r"\{[^{}]+\}")

_SCHEMES: Final = (
    r"bearer|basic|token|apikey|key|jwt|bot|negotiate|ntlm"
    r"|digest|hawk|oauth|signature|sharedkey(?:lite)?|sharedaccesssignature|aws4-hmac-sha256"
)
_SCHEME_NAMES = frozenset({"aws4-hmac-sha256"})
_AUTHORIZATION: Final = r"authorization\\*+[\"']?[ \t]*+[:=][ \t]*+(?:b(?=[\"']))?\\*+[\"']?"

# Start of a token: not inside a word, unless the letter before belongs to an escape sequence as in
# repr("\neyJ...") or "%20eyJ...".
_START: Final = r"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f][0-9A-Fa-f]))"


def _rule(needles: str, pattern: str, replace: _Replace = _swap, flags: int = _FLAGS) -> Rule:
    """Build a rule; the needles are separated by blanks."""
    return Rule(tuple(needles.split()), re.compile(pattern, flags), replace)


def _token(prefix: str, body: str, *needles: str) -> Rule:
    """Build a rule for tokens whose vendor gave them a telling, case-sensitive prefix."""
    pattern = re.compile(f"{_START}(?:{prefix})(?P<secret>{body})", re.ASCII)
    return Rule(needles or (prefix.lower(),), pattern, _swap)


_KEY_BLOCK = _rule(
    "private",
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
    # The body ends at the next five dashes whatever they are, so that a series of headers without
    # footers is read once. Without a footer, take what looks like base64.
    r"(?P<secret>(?:[^-]|-(?!----))++(?=-----END)"
    r"|(?:(?:\s|\\++[nr])*+[A-Za-z0-9+/=]{20,}+)++(?:(?:\s|\\++[nr])*+[A-Za-z0-9+/]++={1,2})?)",
    flags=re.ASCII,
)

_HEADERS = (
    _rule(
        "authorization",
        # Schemes with parameters: any of them may be the secret one, so the line goes.
        rf"{_AUTHORIZATION}(?:digest|hawk|oauth|signature|sharedaccesssignature|aws4-hmac-sha256)"
        r"[ \t]++(?=[^\r\n=]{1,64}=)(?P<secret>(?:\\[\"']|[^\r\n\\])++)",
    ),
    _rule(
        "authorization",
        rf"{_AUTHORIZATION}(?P<scheme>(?:{_SCHEMES})(?:[ \t]++|%20))?(?P<secret>[^\s\"',;\\]++)",
        _swap_header,
    ),
    _rule(
        "cookie",
        r"cookie\\*+[\"']?[ \t]*+[:=][ \t]*+(?:b(?=[\"']))?\\*+[\"']?"
        r"(?P<secret>[\w.-]{1,64}=[^\r\n\"'\\]++)",
    ),
    _rule(
        "bearer",
        # Not what follows in a challenge (Bearer realm="api") or in a token response
        # (token_type=bearer expires_in=3600).
        r"bearer(?:[ \t]++|%20|\+)(?![a-z_]{1,32}=[\w\"'\\]|[a-z]{1,16}_[a-z_]{1,16}:)"
        r"(?P<secret>[A-Za-z0-9._~+/=%-]++)",
        _swap_unless_prose,
    ),
    _rule("basic", r"basic(?:[ \t]++|%20)(?P<secret>[A-Za-z0-9+/_-]{4,}+={0,2})", _swap_basic),
)

# The password reaches to the last "@" before a blank, because unescaped ones do occur. It never
# crosses another "://", which also keeps a series of URLs linear. A number that ends like a port
# is one. Quotes are allowed only if there is no other way to reach an "@".
_URL_CREDENTIALS = _rule(
    "://",
    r"://[^\s/?#:@\"'<>\[\]]*+:(?!\d{1,5}(?:[/?#,;\"'\s)\]}<>]|\Z))"
    r"(?P<secret>(?:[^\s\"'<>:]|:(?!//))+|(?:[^\s:]|:(?!//))+)@",
)

_ASSIGNMENTS = (
    # In connection strings a value ends at the semicolon only, blanks included.
    _rule(
        "password pwd",
        r"(?:password|pwd)[ ]?=[ ]?(?P<secret>[^\s;=\"'{][^;=\r\n\"']{0,127})"
        r"(?=;[ ]{0,2}[a-z][\w ]{0,40}=)",
    ),
    Rule(
        _KEY_NEEDLES,
        re.compile(
            rf"{_KEY}{_KEY_END}{_SEPARATOR}{_LEAD_PATTERN}{_QUOTED}",
            _FLAGS,
        ),
        _swap_quoted,
    ),
    # ASGI header lists and the like: (b'x-api-key', b'...').
    Rule(
        (*_KEY_NEEDLES, "authorization", "cookie"),
        re.compile(
            rf"\(b?(?P<open>[\"'])[\w-]{{0,40}}?(?:{_KEY}|authorization|cookie)(?P=open),[ \t]*+b?"
            rf"{_QUOTED}",
            _FLAGS,
        ),
        _swap,
    ),
    # Command lines, also as lists: --password hunter2, ['--password', 'hunter2'].
    _rule(
        "--",
        rf"(?<![\w-])--[\w-]{{0,40}}?{_KEY}[\"']?,?[ \t]++[\"']?"
        r"(?P<secret>[^\s\"',;-][^\s\"',;]*+)",
        _swap_unless_prose,
    ),
    # Validation errors of pydantic, which show the rejected value on the line after the field.
    Rule(
        ("input_value=",),
        re.compile(
            rf"{_KEY}\n[ ]++[^\n]{{0,400}}?input_value=(?P<secret>[^\n]+?)(?=, input_type=)", _FLAGS
        ),
        _swap,
    ),
    # XML elements.
    Rule(
        _KEY_NEEDLES,
        re.compile(rf"{_KEY}>(?P<secret>[^<>\r\n]++)(?=</)", _FLAGS),
        _swap,
    ),
    # SQL: CREATE USER bob WITH PASSWORD '...'.
    _rule("password identified", rf"(?:\bpassword|\bidentified by)[ \t]++(?=\\*'){_QUOTED}"),
    # Last, so that what the rules above understand better is gone already.
    Rule(
        _KEY_NEEDLES,
        re.compile(rf"{_KEY}{_KEY_END}{_SEPARATOR}{_UNQUOTED}", _FLAGS),
        _swap_unquoted,
    ),
    # Signed URLs. Outside of a query string "sig" may be a signal number, so length decides.
    _rule(
        "sig",
        r"(?:[?&;]sig=|(?:\bsig|signature)=(?=[\w%+/=-]{16}))(?P<secret>[\w%+/=~.-]++)",
    ),
)

_TOKENS = (
    # Three parts, or two if the rest was cut off, or five if encrypted.
    _token(
        "",
        r"eyJ[\w-]{5,}+\.(?:eyJ[\w-]++(?:\.[\w-]++)*+|[\w-]*+(?:\.[\w-]++)++)",
        "eyj",
    ),
    _token("AKIA|ASIA|ABIA|ACCA", r"[A-Z0-9]{16}(?![A-Za-z0-9])", "akia", "asia", "abia", "acca"),
    _token("gh[opsur]_", r"[A-Za-z0-9]{20,}+", "gho_", "ghp_", "ghs_", "ghu_", "ghr_"),
    _token("github_pat_", r"\w{20,}+"),
    _token("glpat-", r"[\w-]{16,}+"),
    _token("xox[a-z]-|xapp-", r"[A-Za-z0-9-]{8,}+", "xox", "xapp-"),
    _token("hooks.slack.com/services/", r"[\w/]{16,}+"),
    _token("AIza", r"[\w-]{30,}+"),
    _token(r"ya29\.", r"[\w-]{20,}+", "ya29."),
    _token("GOCSPX-", r"[\w-]{20,}+"),
    _token("[sr]k_(?:live|test)_", r"[A-Za-z0-9]{10,}+", "k_live_", "k_test_"),
    _token("whsec_", r"[A-Za-z0-9+/=]{16,}+"),
    # The digit tells keys from long hyphenated names such as "sk-estimator-doc-link-fitted".
    _token("sk-", r"(?=[A-Za-z_-]{0,64}\d)[\w-]{20,}+"),
    _token(r"SG\.", r"[\w-]{16,}+\.[\w-]{16,}+", "sg."),
    _token(r"hv[sb]\.", r"[\w-]{20,}+", "hvs.", "hvb."),
    _token("npm_", r"[A-Za-z0-9]{30,}+"),
    _token("pypi-", r"AgE[\w-]{20,}+"),
)

RULES: Final = (
    _KEY_BLOCK,
    *_HEADERS,
    # Before the assignments, so that "token://user:pw@host" keeps its host.
    _URL_CREDENTIALS,
    # Before the tokens and cards: a marker in the middle of a value must not hide its other half.
    *_ASSIGNMENTS,
    *_TOKENS,
    # Every text contains the empty needle: digits have no telling substring.
    Rule(("",), DIGITS, swap_cards),
)
