"""The rules of redaction: one row for each kind of secret.

A row has a name, the words without which it cannot match, a pattern whose group ``secret`` is what
is removed (the rest of the match is kept), and the function that replaces a match: :func:`swap`
always, the others depending on the value.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from msgbus.telemetry.redaction import MARKER
from msgbus.telemetry.redaction.card_numbers import (
    DIGITS,
    IBANS,
    SSNS,
    Match,
    swap_cards,
    swap_iban,
)
from msgbus.telemetry.redaction.secret_values import (
    LITERALS,
    decoded,
    is_expression,
    is_masked,
    is_mixed,
    is_placeholder,
    is_prose,
    is_random,
    is_state,
    splice,
    swap,
)
from msgbus.telemetry.redaction.vendor_tokens import (
    LONG_WORD,
    START,
    START_AFTER_ESCAPE,
    TOKENS,
    TOKENS_AFTER_ESCAPE,
)

_Swap = Callable[[Match], str]


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of secret.

    Attributes:
        name: What it finds.
        needles: Lower-case substrings, or names of :data:`SHAPES`, one of which is in every text
            the pattern can match; a text without any skips the pattern, which keeps innocent
            texts cheap.
        pattern: Matches the secret in the group ``secret`` along with its context.
        swap: Turns a match into its replacement.
    """

    name: str
    needles: frozenset[str]
    pattern: re.Pattern[str]
    swap: _Swap


# --- Replacement of a match ----------------------------------------------------------------------

_CLOSERS: Final = ")]}>,."
_OPENERS: Final = "([{"
_QUOTES = frozenset("\"'")
_LOOKUP = re.compile(r"\w\[\Z|get(?:env)?\(\Z")
_HASH = re.compile(r"[0-9a-f]{32,}", re.IGNORECASE)
_BRACED = re.compile(r"\{[^{}]+\}")
_SCHEME_NAMES = frozenset({"aws4-hmac-sha256", "ssws"})


def _swap_unless_prose(match: Match) -> str:
    """Replace the group ``secret`` unless it is an ordinary word."""
    return match[0] if is_prose(match["secret"]) else swap(match)


def _swap_header(match: Match) -> str:
    """Replace the value of an ``Authorization`` header.

    Without a scheme, letters alone are taken for prose ("authorization: user lacks role").
    """
    secret: str = match["secret"]
    if match["scheme"] is None and (secret.isalpha() or secret.lower() in _SCHEME_NAMES):
        return match[0]
    if is_placeholder(secret):
        return match[0]
    return _swap_unless_prose(match)


def _swap_user_and_password(match: Match) -> str:
    """Replace base64 if it really decodes to ``user:password``."""
    text = decoded(match["secret"])
    return swap(match) if text and ":" in text and text.isprintable() else match[0]


def _swap_encoded_text(match: Match) -> str:
    """Replace base64 of an authentication command; its parts are separated by NUL or ^A."""
    text = decoded(match["secret"].partition(" ")[0])
    readable = text is not None and text.translate({0: " ", 1: " "}).isprintable()
    return swap(match) if readable else match[0]


def _swap_encoded_json(match: Match) -> str:
    """Replace base64 of a JSON object that has a secret in it."""
    text = decoded(match["secret"])
    hidden = text and any(rule.pattern.sub(rule.swap, text) != text for rule in _ASSIGNMENTS)
    return swap(match) if hidden else match[0]


def _swap_token(match: Match) -> str:
    """Replace the one group that has matched."""
    start, end = match.span(match.lastindex or 0)
    text = match.string
    return f"{text[match.start() : start]}{MARKER}{text[end : match.end()]}"


def _swap_random(match: Match) -> str:
    """Replace the value of an everyday key, if it is longer and wilder than names are."""
    return swap(match) if is_random(match["secret"]) else match[0]


def _swap_url_user(match: Match) -> str:
    """Replace the user of a URL if it is random, or a hash."""
    return swap(match) if _HASH.fullmatch(match["secret"]) else _swap_random(match)


def _swap_mixed(match: Match) -> str:
    """Replace a value that has letters and digits, as passwords have and words have not."""
    return swap(match) if is_mixed(match["secret"], 5) else match[0]


def _swap_long_mixed(match: Match) -> str:
    """Replace the value of a query, unless it is a number or a word."""
    return swap(match) if is_mixed(match["secret"], 8) else match[0]


def _swap_quoted(match: Match) -> str:
    """Replace a quoted value, unless it is the name of a setting being looked up in source code."""
    # os.environ["DB_PASSWORD"] in a traceback names a secret without containing it.
    if _LOOKUP.search(match["wrap"]) and is_expression(match):
        return match[0]
    return swap(match)


def _swap_unquoted(match: Match) -> str:
    """Replace an unquoted value, leaving closing punctuation of the surrounding text in place."""
    secret: str = match["secret"]
    if secret.startswith(MARKER) and not secret[len(MARKER) :].strip(_CLOSERS):
        return match[0]
    # "{a;b}" is how ODBC quotes: there the closing brace belongs to the value.
    value = secret if _BRACED.fullmatch(secret) else secret.rstrip(_CLOSERS)
    return match[0] if _is_harmless(match, value) else splice(match, len(value))


def _is_harmless(match: Match, value: str) -> bool:
    """Tell whether the unquoted right-hand side of an assignment is no secret."""
    if not value.strip(_OPENERS) or value.lower() in LITERALS:
        return True
    # The quoted part has been replaced already.
    if match.string[match.end() : match.end() + 1] in _QUOTES and _LEAD.fullmatch(value):
        return True
    if is_masked(value) or is_placeholder(value):
        return True
    if match["sep"] == ":" and match["gap"] and is_prose(value):
        return True
    # PWD and OLDPWD are working directories, not passwords.
    if match["key"].lower() == "pwd" and value[0] in "/~":
        return True
    return not value[0].isdigit() and is_expression(match)


def _swap_said(match: Match) -> str:
    """Replace what a sentence says the password is."""
    secret: str = match["secret"]
    value = secret.rstrip(_CLOSERS + ";:?")
    if not value or MARKER in secret or is_masked(value) or is_expression(match):
        return match[0]
    if match["short"]:
        is_secret = value.isdigit() and 4 <= len(value) <= 10
    elif match["link"]:
        is_secret = not is_state(value.strip("!")) and not is_placeholder(value)
    else:
        is_secret = is_mixed(value, 5) or (value.isdigit() and len(value) >= 5)
    return splice(match, len(value)) if is_secret else match[0]


def _swap_said_key(match: Match) -> str:
    """Replace what a sentence says the key or token is."""
    value: str = match["secret"].rstrip(_CLOSERS + ";:?!")
    # A key is called by a name more often than a token is, and less often than a password.
    is_secret = is_random(value) or (match["api"] and is_mixed(value, 8))
    return splice(match, len(value)) if is_secret and MARKER not in value else match[0]


def _swap_said_quoted(match: Match) -> str:
    """Replace a quoted password or key; a quoted token or secret only if it is not a name."""
    secret: str = match["secret"]
    if is_masked(secret) or is_expression(match):
        return match[0]
    if match["weak"] and not is_random(secret):
        return match[0]
    return match[0] if is_prose(secret.partition(" ")[0]) else swap(match)


def _swap_pair(match: Match) -> str:
    """Replace the second part of "bob/hunter2"; without a colon before it must be no word."""
    if match["colon"] or is_mixed(match["secret"], 5):
        return swap(match)
    return match[0]


# --- Parts of patterns ---------------------------------------------------------------------------

# ASCII keeps case folding and \w predictable, and lets the needles be plain lower-case strings.
_FLAGS: Final = re.ASCII | re.IGNORECASE

# A key needs no left boundary ("DB_PASSWORD", "clientSecret") but ends right before the separator:
# that is what tells "token=" from "max_tokens=", "token_type=" and "tokens:". The lookbehinds spare
# parser messages ("Unexpected token: <") and user names of URLs ("redis://token:...").
_KEY_WORDS: Final = (
    r"pass(?:word|wd|phrase|code|wort)(?:[_-]?(?:hash|confirm(?:ation)?|\d{1,2}))?|pwd"
    r"|secret(?:[_-]?key[_-]?base)?|(?<!unexpected )token"
    r"|(?:api|access|account|secret|private|signing|encryption|decryption|master|auth|licen[cs]e"
    r"|subscription|app|application|storage|service(?:[_-]?role)?|client|consumer|shared|webhook"
    r"|hmac|admin)[ _-]?key(?:[_-](?:data|id))?"
    r"|shared[_-]?access[_-]?signature|connection[ _-]?string|code[_-]verifier|client[_-]assertion"
    r"|saml(?:response|request)|mnemonic|seed[_-]phrase|contraseña|mot[ ]de[ ]passe"
    r"|(?:php|j)?sess(?:ion)?id|connect\.sid|(?<![a-z])(?:pw|psk)"
    # As words of a sentence these are too common, so here the syntax has to be unambiguous.
    r"|(?<![a-z])(?:cv[cv]2?|pat(?==[\w-]{20}))"
    r"|(?:(?<![a-z])(?:pass|otp|pin|ssn)|credentials?)"
    r"(?=[ \t]{0,8}=|\\{0,4}[\"'])"
)
_KEY: Final = rf"(?<!://)(?P<key>{_KEY_WORDS})"
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
# What may stand between the separator and the quote: SecretStr("..."), ["..."], b"...", \"...\".
_LEAD_PATTERN: Final = r"(?P<wrap>(?:[\w.]{0,40}[(\[])?)[bfru]{0,2}"
_LEAD = re.compile(rf"{_LEAD_PATTERN}\\*", _FLAGS)

_SCHEMES: Final = (
    r"bearer|basic|token|apikey|key|jwt|bot|ssws|negotiate|ntlm"
    r"|digest|hawk|oauth|signature|sharedkey(?:lite)?|sharedaccesssignature|aws4-hmac-sha256"
)
_AUTHORIZATION: Final = r"authorization\\*+[\"']?[ \t]*+[:=][ \t]*+(?:b(?=[\"']))?\\*+[\"']?"

# One argument of a command line, or of its list in Python: -p x, -p 'x y', '-p', 'x'.
_NEXT: Final = r"(?:[ \t]++|[\"'],[ \t]*+)(?P<open>[\"'])?"
_ARGUMENT: Final = r"(?P<secret>(?(open)[^\"'\r\n]++|[^\s\"']++))"
_FLAG_BEFORE: Final = r"[^\r\n]{0,160}?[ \"']"

# Percent-encoded, any number of times.
_PERCENT: Final = r"%(?:25){0,3}"
_ENCODED: Final = r"(?P<secret>(?:[^\s\"'&<>%]|%(?!(?:25){0,3}(?:2[26CF]|3B|40|7D)))++)"


def _rule(
    name: str, needles: str, pattern: str, replace: _Swap = swap, flags: int = _FLAGS
) -> Rule:
    """Build a rule; the needles are separated by blanks."""
    return Rule(name, frozenset(needles.split()), re.compile(pattern, flags), replace)


# --- The rules -----------------------------------------------------------------------------------

_KEY_BLOCKS = (
    _rule(
        "private key",
        "private",
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
        # The body ends at the next five dashes whatever they are, so that a series of headers
        # without footers is read once. Without a footer, take what looks like base64.
        r"(?P<secret>(?:[^-]|-(?!----))++(?=-----END)"
        r"|(?:(?:\s|\\++[nr])*+[A-Za-z0-9+/=]{20,}+)++(?:(?:\s|\\++[nr])*+[A-Za-z0-9+/]++={1,2})?)",
        flags=re.ASCII,
    ),
    _rule(
        "private key of PuTTY",
        "private-lines",
        r"Private-Lines: \d{1,4}(?P<secret>(?:(?:\s|\\++[nr])++[A-Za-z0-9+/=]{16,}+)++)",
        flags=re.ASCII,
    ),
)

_HEADERS = (
    _rule(
        "authorization with parameters",
        "authorization",
        # Any of the parameters may be the secret one, so the line goes.
        rf"{_AUTHORIZATION}(?:digest|hawk|oauth|signature|sharedaccesssignature|aws4-hmac-sha256)"
        r"[ \t]++(?=[^\r\n=]{1,64}=)(?P<secret>(?:\\[\"']|[^\r\n\\])++)",
    ),
    _rule(
        "authorization",
        "authorization",
        rf"{_AUTHORIZATION}(?P<scheme>(?:{_SCHEMES})(?:[ \t]++|%20))?(?P<secret>[^\s\"',;\\]++)",
        _swap_header,
    ),
    _rule(
        "cookie header",
        "cookie",
        r"cookie\\*+[\"']?[ \t]*+[:=][ \t]*+(?:b(?=[\"']))?\\*+[\"']?"
        r"(?P<secret>[\w.-]{1,64}=[^\r\n\"'\\]++)",
    ),
    _rule(
        "cookies in a dict",
        "cookies",
        r"cookies\\*+[\"']?[ \t]*+[:=][ \t]*+\{(?=[^{}\r\n:]{1,80}:)(?P<secret>[^{}\r\n]++)",
    ),
    _rule("cookie of a jar", "<cookie", r"<cookie [\w.-]{1,64}=(?P<secret>[^\s>]++)"),
    _rule(
        "bearer",
        "bearer",
        # Not what follows in a challenge (Bearer realm="api") or in a token response
        # (token_type=bearer expires_in=3600).
        r"bearer(?:[ \t]++|%20|\+)(?![a-z_]{1,32}=[\w\"'\\]|[a-z]{1,16}_[a-z_]{1,16}:)"
        r"(?P<secret>[A-Za-z0-9._~+/=%-]++)",
        _swap_unless_prose,
    ),
    _rule(
        "basic",
        "basic auth",
        r"(?:basic(?:[ \t]++|%20)|[\"']auth\\*+[\"']:[ ]?\\*+[\"'])"
        r"(?P<secret>[A-Za-z0-9+/_-]{4,}+={0,2})",
        _swap_user_and_password,
    ),
)

_URLS = (
    # The password reaches to the last "@" before a blank, because unescaped ones do occur. It never
    # crosses another "://", which also keeps a series of URLs linear. A number that ends like a
    # port is one. Quotes are allowed only if there is no other way to reach an "@".
    _rule(
        "password of a URL",
        "://",
        r"://[^\s/?#:@\"'<>\[\]]*+:(?!\d{1,5}(?:[/?#,;\"'\s)\]}<>]|\Z))"
        r"(?P<secret>(?:[^\s\"'<>:]|:(?!//))+|(?:[^\s:]|:(?!//))+)@",
    ),
    _rule(
        "password of an encoded URL",
        "2f",
        rf"{_PERCENT}3A(?:{_PERCENT}2F){{2}}[\w.~+-]*+(?:{_PERCENT}40[\w.~+-]*+)?"
        rf"(?:{_PERCENT}3A|:)(?P<secret>(?:[^\s\"'&<>%@]|%(?!(?:25){{0,3}}(?:2F|40)))++)"
        rf"(?={_PERCENT}40|@)",
    ),
    _rule("hook of Zapier", "zapier", r"hooks\.zapier\.com/hooks/catch/(?P<secret>[\w/]{4,64}+)"),
)

# These three after the tokens, so that one whose vendor is known keeps its prefix.
_QUERY_VALUE = _rule(
    "key or session of a query",
    "sid= key=",
    r"(?:[?&;]key|(?<![a-z0-9])sid)=(?P<secret>[\w.~+/-]{8,256}+)",
    _swap_long_mixed,
)
_RANDOM_VALUE = _rule(
    "everyday key with a random value",
    "sid session key auth appid code",
    r"(?:(?<![a-z0-9])(?:sid|session(?:[_-]?id)?|key|auth|app_?id)|[?&]code)[\"']?[ ]?[:=][ ]?"
    r"[\"']?(?P<secret>[\w+/=~.%-]{16,}+)",
    _swap_random,
)
_URL_USER = _rule(
    "token as the user of a URL",
    "://",
    r"://(?P<secret>[\w~.+-]{16,256}+)(?=@|:\[redacted\]@)",
    _swap_url_user,
)

_COMMAND_LINES = (
    _rule(
        "--password x",
        "--",
        rf"(?<![\w-])--[\w-]{{0,40}}?{_KEY}[\"']?,?[ \t]++[\"']?"
        r"(?P<secret>[^\s\"',;-][^\s\"',;]*+)",
        _swap_unless_prose,
    ),
    _rule(
        "mysql -px",
        "mysql mariadb",
        rf"\b(?:mysql|mariadb)[\w-]{{0,16}}\b{_FLAG_BEFORE}-p(?P<open>[\"'](?!,))?{_ARGUMENT}",
    ),
    _rule(
        "sshpass -p x", "sshpass", rf"\bsshpass(?:[ \t]++|[\"'],[ \t]*+[\"'])-p{_NEXT}{_ARGUMENT}"
    ),
    _rule("redis-cli -a x", "redis-cli", rf"\bredis-cli\b{_FLAG_BEFORE}-a{_NEXT}{_ARGUMENT}"),
    _rule("ldapsearch -w x", "ldap", rf"\bldap\w{{3,8}}\b{_FLAG_BEFORE}-w{_NEXT}{_ARGUMENT}"),
    _rule("login -p x", "login", rf"\blogin\b{_FLAG_BEFORE}-p{_NEXT}{_ARGUMENT}"),
    _rule(
        "curl -u bob:x",
        "-u --user",
        rf"(?<![\w-])(?:(?:-u|--(?:proxy-)?user)(?:=|{_NEXT})|(?<=curl )-u)(?!\d++:)"
        rf"[^\s:\"'/@]{{1,64}}:(?!/){_ARGUMENT}",
    ),
    _rule(
        "smbclient -U bob%x",
        "smb",
        rf"\bsmb\w{{3,10}}\b{_FLAG_BEFORE}-U{_NEXT}[\w\\.-]{{1,64}}%{_ARGUMENT}",
    ),
    _rule(
        "htpasswd -b file bob x",
        "htpasswd",
        r"\bhtpasswd[ ]+-\w{0,6}b\w{0,6}[ ]+\S{1,128}[ ]+\S{1,64}[ ]+(?P<secret>[^\s\"']++)",
    ),
    _rule("openssl pass:x", "pass:", r"[ \"'=]pass:(?P<secret>[^\s\"']++)", _swap_unless_prose),
    _rule(
        "sqlplus bob/x@db",
        "sqlplus",
        r"\bsqlplus[ ]+(?:-\w+[ ]+)?[\w$#]{1,64}/(?P<secret>[^\s\"'@]++)",
    ),
)

_PROTOCOLS = (
    _rule(
        "AUTH PLAIN",
        "auth",
        r"\bauth(?:enticate)? [a-z][a-z0-9-]{3,16} "
        r"(?P<secret>[a-z0-9+/]{4,}+={0,2}(?: [a-z0-9+/]{4,}+={0,2})?)",
        _swap_encoded_text,
    ),
    _rule(
        "AUTH of Redis",
        "auth",
        r"\bAUTH (?P<secret>[^\s\"'<>]{5,256}+)",
        _swap_mixed,
        re.ASCII,
    ),
    _rule(
        "AUTH of Redis with a user, LOGIN of IMAP",
        "auth login",
        r"\b(?:AUTH|LOGIN) [\w.@+-]{1,64} (?P<secret>[^\s\"'<>]{5,256}+)",
        _swap_mixed,
        re.ASCII,
    ),
    _rule(
        "PASS of FTP",
        "pass ",
        r"^(?:> ?|C: ?|-+> ?)?PASS (?P<secret>[^\s/]++)\r?$",
        flags=re.ASCII | re.MULTILINE,
    ),
    _rule(
        "line of .pgpass",
        ":",
        r":(?:\d{4,5}|\*):(?:[a-z]\w{0,63}|\*):(?:[a-z][\w.@-]{0,63}|\*):"
        r"(?P<secret>[^\s\"']++)",
    ),
)

_ASSIGNMENTS = (
    # In connection strings a value ends at the semicolon only, blanks included.
    _rule(
        "password of a connection string",
        "password pwd",
        r"(?:password|pwd)[ ]?=[ ]?(?P<secret>[^\s;=\"'{][^;=\r\n\"']{0,127})"
        r"(?=;[ ]{0,2}[a-z][\w ]{0,40}=)",
    ),
    _rule(
        "password at the end of a connection string",
        "password pwd",
        r";[ ]?(?:password|pwd)[ ]?=[ ]?(?P<secret>[^\s;=\"'{][^;=\r\n\"']{0,127})(?=[\"'\r\n]|\Z)",
    ),
    _rule(
        "quoted value",
        "<key>",
        rf"{_KEY}{_KEY_END}{_SEPARATOR}{_LEAD_PATTERN}{_QUOTED}",
        _swap_quoted,
    ),
    _rule(
        "pair of quoted user and password",
        "auth cred login(",
        r"(?:(?:auth|credentials?|creds)[\"']?[ ]?[=:][ ]?[(\[]|auth\(|login\()"
        rf"b?[\"'][^\"'\r\n]{{0,128}}[\"'],[ ]?b?{_QUOTED}",
    ),
    # ASGI header lists and the like: (b'x-api-key', b'...').
    _rule(
        "pair of name and value",
        "(b' (' (b\" (\"",
        rf"\(b?(?P<open>[\"'])[\w-]{{0,40}}?(?:{_KEY}|authorization|cookie)(?P=open),[ \t]*+b?"
        rf"{_QUOTED}",
    ),
    # The rejected value may be any part of a message.
    _rule(
        "validation error of pydantic",
        "input_value=",
        r"\binput_value=(?P<secret>[^\r\n]{1,400}?)(?=, input_type=)",
    ),
    _rule(
        "tag of a validation error of pydantic",
        "found",
        r"\binput tag '(?P<secret>[^\r\n]{1,400}?)'(?= found using )",
    ),
    _rule("XML element", "</", rf"{_KEY}>(?P<secret>[^<>\r\n]++)(?=</)"),
    _rule(
        "field of a form",
        "name=",
        rf"name=\\*+\"{_KEY}\\*+\"(?:(?:\r?\n|\\r\\n|\\n){{2}}|[^<>\r\n]{{0,160}}?value=\\*+\")"
        r"(?P<secret>[^\r\n\"\\]++)",
    ),
    _rule(
        "password in SQL",
        "password identified",
        rf"(?:\bpassword(?:[ ]for[ ][^=\r\n]{{1,80}}=)?|\bidentified[ ]by)[ \t]++(?=\\*'){_QUOTED}",
    ),
    _rule(
        "encoded value",
        "%3d %3a %253 %2525",
        rf"{_KEY}(?:{_PERCENT}22)?{_PERCENT}3[AD](?:\+|{_PERCENT}2[02])*+{_ENCODED}",
    ),
    # After the others, so that what they understand better is gone already.
    _rule(
        "unquoted value",
        "<key>",
        rf"{_KEY}{_KEY_END}{_SEPARATOR}{_UNQUOTED}",
        _swap_unquoted,
    ),
    # Signed URLs. Outside of a query string "sig" may be a signal number, so length decides.
    _rule(
        "signature",
        "sig",
        r"(?:[?&;]sig=|(?:\bsig|signature)=(?=[\w%+/=-]{16}))(?P<secret>[\w%+/=~.-]++)",
    ),
)

_NOUN: Final = (
    r"(?<![a-z0-9])(?:pass(?:word|phrase|wd)|pwd|requirepass|masterauth"
    r"|(?P<short>pin|otp|passcode|(?:one-time|verification|security)[ ]code))"
)
_KEY_NOUN: Final = r"(?P<api>(?:api|access|license|auth|signing|secret|encryption)[ _-]?key)"
_IS: Final = r"(?:[ ](?:is|was)|[ ]provided:?|:)"
_OPEN: Final = r"(?P<quote>[\"'`])(?P<secret>[^\r\n\"'`]{1,256})(?P=quote)"

_SENTENCES = (
    _rule(
        "quoted password or key in a sentence",
        "pass pwd key token secret",
        rf"(?<![a-z0-9])(?:pass(?:word|phrase|code|wd)|pwd|{_KEY_NOUN}|(?P<weak>token|secret)){_IS}?"
        rf"[ ]{_OPEN}",
        _swap_said_quoted,
    ),
    _rule(
        "password in a sentence",
        "pass pwd pin otp code masterauth",
        rf"{_NOUN}(?P<link>[ ]for[ ](?:user[ ])?[^\s:;,]{{1,64}}(?:[ ](?:is|was)|:)|[ ](?:is|was)"
        r"|[ ](?:given|provided|entered|used|sent|supplied|tried):|(?<=code):)?[ ]{1,4}\(?"
        r"(?P<secret>[^\s\"'`=:(]\S{0,255})",
        _swap_said,
    ),
    _rule(
        "key or token in a sentence",
        "key token secret",
        rf"(?<![a-z0-9])(?:{_KEY_NOUN}|token|secret){_IS}?[ ]{{1,4}}"
        r"(?P<secret>[\w.~+/=-]{8,512}+)",
        _swap_said_key,
    ),
    _rule(
        "what is not a password",
        "password passphrase key",
        r"(?<!\S)[\"'`]?(?P<secret>[^\s\"'`]{5,128}+)[\"'`]?[ ]is[ ](?:not[ ]|no[ ])?(?:an?[ ])?"
        rf"(?:valid|invalid|wrong|correct|incorrect)[ ](?:password|passphrase|{_KEY_NOUN})",
        _swap_mixed,
    ),
    _rule(
        "user and password in a sentence",
        "credential log auth sign",
        r"\b(?:credentials?|(?:log|sign)(?:ged|ed)?[ -]?in[ ](?:with|as|for)"
        r"|(?:authentication|login)[ ]failed[ ]for)"
        r"(?P<colon>[:=])?[ ]{1,4}[\w.@+-]{1,64}(?:[:/]|[ ]/[ ])(?P<secret>[^\s\"'/]{1,256}+)",
        _swap_pair,
    ),
)

RULES: Final = (
    *_KEY_BLOCKS,
    *_HEADERS,
    # Before the assignments, so that "token://user:pw@host" keeps its host.
    *_URLS,
    *_COMMAND_LINES,
    *_PROTOCOLS,
    # Before the tokens and numbers: a marker in the middle of a value must not hide its other half.
    *_ASSIGNMENTS,
    Rule("token of a vendor", frozenset({"<long word>"}), TOKENS, _swap_token),
    Rule("token after an escape", frozenset({"\\", "%"}), TOKENS_AFTER_ESCAPE, _swap_token),
    _rule(
        "JSON in base64",
        "eyj ewo",
        rf"(?:{START}|{START_AFTER_ESCAPE})(?P<secret>(?:eyJ|ewo)[A-Za-z0-9+/_-]{{12,}}+={{0,2}})",
        _swap_encoded_json,
        re.ASCII,
    ),
    _QUERY_VALUE,
    _RANDOM_VALUE,
    _URL_USER,
    *_SENTENCES,
    Rule("bank account", frozenset({"<digits>"}), IBANS, swap_iban),
    Rule("social security number", frozenset({"<digits>"}), SSNS, swap),
    Rule("card number", frozenset({"<digits>"}), DIGITS, swap_cards),
)

SHAPES: Final = {
    "<long word>": LONG_WORD,
    "<digits>": re.compile(r"\d[\d -]{8}", re.ASCII),
    # What the keys end with, and a separator: most of the texts that speak of passwords have no
    # value. No lookbehind and no ignored case here, which makes the search ten times faster.
    "<key>": re.compile(
        r"(?:pass[a-z_-]{0,18}\d{0,2}|pwd?|secret[a-z_-]{0,9}|token|key(?:[_-](?:data|id))?|signature"
        r"|string|verifier|assertion|samlre[a-z]{5,6}|mnemonic|seed[_-]phrase|contrase[^=:]{1,3}|psk"
        r"|sess(?:ion)?id|connect\.sid|otp|pin|cv[cv]2?|ssn|pat|credentials?)"
        rf"{_KEY_END}[=:]",
        re.ASCII,
    ),
}
"""What a rule may need that is no substring, searched for in the lower-case text."""

NEEDLES: Final = tuple(
    sorted(frozenset[str]().union(*(rule.needles for rule in RULES)) - SHAPES.keys())
)
"""All substrings that the rules look for."""
