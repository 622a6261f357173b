"""Redaction hides values that are secrets, and nothing else."""

import base64
import random
import time
import traceback
import uuid
from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from msgbus.telemetry.redaction import (
    MARKER,
    MAX_LENGTH,
    redact,
    redact_exception,
    redact_traceback,
)

# Put together at run time, so that secret scanners do not take this file for a leak.
_AWS_ID: Final = "AKIA" + "IOSFODNN7EXAMPLE"
_AWS_SECRET: Final = "wJalrXUtnFEMI/K7MDENG/bPxRfiCY" + "EXAMPLEKEY"
_AZURE_KEY: Final = base64.b64encode(bytes(range(64))).decode()
_JWT_HEAD: Final = "eyJhbGciOiJIUzI1NiJ9"
_JWT_BODY: Final = "eyJzdWIiOiIxMjM0NTY3ODkwIn0"
_JWT_TAIL: Final = "dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
_JWT: Final = f"{_JWT_HEAD}.{_JWT_BODY}.{_JWT_TAIL}"
_BASIC: Final = base64.b64encode(b"bob:hunter2").decode()
_GITHUB: Final = "16C7e42F292c6912E7710c838347Ae178B4a"
_HEX: Final = "4eC39HqLyjWDarjtT1zdp7dc"
_PEM_BODY: Final = "\n".join(["MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQ"] * 3)
_PEM: Final = f"-----BEGIN PRIVATE KEY-----\n{_PEM_BODY}\n-----END PRIVATE KEY-----"

# (name, text, what must be gone, what the whole result must be)
_SECRETS: Final[list[tuple[str, str, str, str]]] = [
    # URLs and DSNs
    ("url", "GET https://bob:hunter2@h/x", "hunter2", "GET https://bob:[redacted]@h/x"),
    (
        "dsn",
        "postgresql+asyncpg://u:s3cr3t@h:5432/db",
        "s3cr3t",
        "postgresql+asyncpg://u:[redacted]@h:5432/db",
    ),
    ("dsn-without-user", "redis://:s3cr3t@h:6379/0", "s3cr3t", "redis://:[redacted]@h:6379/0"),
    ("dsn-short", "postgresql+asyncpg://u:p@h/db", ":p@", "postgresql+asyncpg://u:[redacted]@h/db"),
    ("url-at-in-password", "amqp://u:p@ss@h/v", "ss@", "amqp://u:[redacted]@h/v"),
    ("url-slash-in-password", "amqp://u:pa/ss@h/v", "ss", "amqp://u:[redacted]@h/v"),
    ("url-quote-in-password", "amqp://u:pa'ss@h/v", "ss", "amqp://u:[redacted]@h/v"),
    ("url-colon-in-password", "amqp://u:12:34@h/v", "34", "amqp://u:[redacted]@h/v"),
    ("url-numeric-password", "amqp://u:12345@h/v", "12345", "amqp://u:[redacted]@h/v"),
    (
        "url-list",
        "amqp://u:one@a,amqp://u:two@b",
        "two",
        "amqp://u:[redacted]@a,amqp://u:[redacted]@b",
    ),
    ("url-user-named-token", "redis://token:abc1@h/0", "abc1", "redis://token:[redacted]@h/0"),
    ("url-quoted", "'https://bob:hunter2@h' x@y", "hunter2", "'https://bob:[redacted]@h' x@y"),
    ("url-query", "GET /a?token=abc1&x=2", "abc1", "GET /a?token=[redacted]&x=2"),
    # Authorization
    ("bearer-header", "Authorization: Bearer xxx", "xxx", "Authorization: Bearer [redacted]"),
    ("bearer", "sent Bearer abc.def-12 to h", "abc.def", "sent Bearer [redacted] to h"),
    ("bearer-encoded", "q=Bearer%20abc12&x=1", "abc12", "q=Bearer%20[redacted]&x=1"),
    (
        "bearer-json",
        '{"Authorization": "Bearer abc12", "a": 1}',
        "abc12",
        '{"Authorization": "Bearer [redacted]", "a": 1}',
    ),
    (
        "bearer-escaped-json",
        r"{\"authorization\": \"Bearer abc12\"}",
        "abc12",
        r"{\"authorization\": \"Bearer [redacted]\"}",
    ),
    (
        "bearer-asgi",
        "[(b'host', b'h'), (b'authorization', b'Bearer abc12')]",
        "abc12",
        "[(b'host', b'h'), (b'authorization', b'[redacted]')]",
    ),
    (
        "basic-header",
        f"Authorization: Basic {_BASIC}",
        _BASIC,
        "Authorization: Basic [redacted]",
    ),
    ("basic", f"got Basic {_BASIC}.", _BASIC, "got Basic [redacted]."),
    ("proxy", "Proxy-Authorization: Basic x1", "x1", "Proxy-Authorization: Basic [redacted]"),
    ("bare-header", "authorization: a1b2c3", "a1b2c3", "authorization: [redacted]"),
    (
        "digest",
        'Authorization: Digest username="bob", response="6629fae4"\nHost: h',
        "6629fae4",
        "Authorization: Digest [redacted]\nHost: h",
    ),
    ("cookie", "Cookie: sid=abc12; lang=de\nHost: h", "abc12", "Cookie: [redacted]\nHost: h"),
    # Tokens
    ("jwt", f"bad jwt {_JWT}.", _JWT_TAIL, "bad jwt [redacted]."),
    ("jwt-cut-off", f"jwt {_JWT_HEAD}.{_JWT_BODY}...", _JWT_BODY, "jwt [redacted]..."),
    ("jwt-in-repr", rf"'line\n{_JWT}'", _JWT_TAIL, r"'line\n[redacted]'"),
    ("jwe", f"{_JWT_HEAD}..a-1.b_2.c3 end", "b_2", "[redacted] end"),
    ("aws-id", f"key {_AWS_ID} denied", _AWS_ID[4:], "key AKIA[redacted] denied"),
    ("aws-temporary-id", f"ASIA{_AWS_ID[4:]}", _AWS_ID[4:], "ASIA[redacted]"),
    (
        "aws-secret",
        f"aws_secret_access_key = {_AWS_SECRET}",
        _AWS_SECRET,
        "aws_secret_access_key = [redacted]",
    ),
    (
        "aws-secret-json",
        f'"SecretAccessKey": "{_AWS_SECRET}"',
        _AWS_SECRET,
        '"SecretAccessKey": "[redacted]"',
    ),
    (
        "aws-presigned",
        f"https://b/o?X-Amz-Signature={_HEX}&X=1",
        _HEX,
        "https://b/o?X-Amz-Signature=[redacted]&X=1",
    ),
    ("github-personal", f"ghp_{_GITHUB}", _GITHUB, "ghp_[redacted]"),
    ("github-oauth", f"x gho_{_GITHUB} y", _GITHUB, "x gho_[redacted] y"),
    ("github-server", f"(ghs_{_GITHUB})", _GITHUB, "(ghs_[redacted])"),
    ("github-fine", f"github_pat_{_GITHUB}_a", _GITHUB, "github_pat_[redacted]"),
    ("github-url", f"https://ghp_{_GITHUB}@h/r", _GITHUB, "https://ghp_[redacted]@h/r"),
    ("gitlab", f"glpat-{_HEX}", _HEX, "glpat-[redacted]"),
    ("slack", f"xoxb-123456789012-{_HEX}", _HEX, "xoxb-[redacted]"),
    ("slack-user", f"xoxp-1-{_HEX}", _HEX, "xoxp-[redacted]"),
    ("google", f"key=AIza{_GITHUB}", _GITHUB, "key=AIza[redacted]"),
    ("stripe", f"sk_live_{_HEX}", _HEX, "sk_live_[redacted]"),
    ("stripe-restricted", f"rk_live_{_HEX}", _HEX, "rk_live_[redacted]"),
    ("openai", f"Incorrect key: sk-{_HEX}", _HEX, "Incorrect key: sk-[redacted]"),
    ("openai-project", f"sk-proj-{_HEX}-{_HEX}", _HEX, "sk-[redacted]"),
    ("sendgrid", f"SG.{_HEX}.{_HEX}", _HEX, "SG.[redacted]"),
    (
        "pem",
        f"bad {_PEM} here",
        _PEM_BODY[:40],
        "bad -----BEGIN PRIVATE KEY-----[redacted]-----END PRIVATE KEY----- here",
    ),
    (
        "pem-rsa-in-repr",
        repr(_PEM.replace("PRIVATE", "RSA PRIVATE")),
        _PEM_BODY[:40],
        "'-----BEGIN RSA PRIVATE KEY-----[redacted]-----END RSA PRIVATE KEY-----'",
    ),
    (
        "pem-cut-off",
        f"-----BEGIN EC PRIVATE KEY-----\n{_PEM_BODY}\nabc=\nnext: line",
        _PEM_BODY[:40],
        "-----BEGIN EC PRIVATE KEY-----[redacted]\nnext: line",
    ),
    # Connection strings
    (
        "azure-account",
        f"AccountName=n;AccountKey={_AZURE_KEY};EndpointSuffix=e",
        _AZURE_KEY,
        "AccountName=n;AccountKey=[redacted];EndpointSuffix=e",
    ),
    (
        "azure-bus",
        f"SharedAccessKeyName=Root;SharedAccessKey={_AZURE_KEY}",
        _AZURE_KEY,
        "SharedAccessKeyName=Root;SharedAccessKey=[redacted]",
    ),
    (
        "azure-signature",
        "SharedAccessSignature sr=h&sig=ab%2Bcd%3D&se=1",
        "ab%2Bcd",
        "SharedAccessSignature sr=h&sig=[redacted]&se=1",
    ),
    (
        "azure-signature-assigned",
        "SharedAccessSignature=sv=2019&sig=abc;X=1",
        "abc",
        "SharedAccessSignature=[redacted]&sig=[redacted];X=1",
    ),
    ("azure-url", "https://h/c?sv=1&sig=abc%3D", "abc", "https://h/c?sv=1&sig=[redacted]"),
    ("pwd", "Server=h;Uid=u;Pwd=hunter2;", "hunter2", "Server=h;Uid=u;Pwd=[redacted];"),
    ("pwd-blank", "Uid=u;Password=my pass;Db=x", "pass;", "Uid=u;Password=[redacted];Db=x"),
    ("pwd-braces", "Pwd={a;b c};Db=x", "b c", "Pwd=[redacted];Db=x"),
    # Assignments
    ("password", "login password=hunter2 failed", "hunter2", "login password=[redacted] failed"),
    ("passwd", "passwd: hunter2", "hunter2", "passwd: [redacted]"),
    ("secret", "client_secret=abc", "abc", "client_secret=[redacted]"),
    ("api-key", "api_key=abc", "abc", "api_key=[redacted]"),
    ("api-key-header", "X-Api-Key: abc", "abc", "X-Api-Key: [redacted]"),
    ("api-key-words", "Invalid API key: abc1", "abc1", "Invalid API key: [redacted]"),
    ("token", "token=abc, user=bob", "abc", "token=[redacted], user=bob"),
    ("camel-case", "refreshToken=abc", "abc", "refreshToken=[redacted]"),
    ("environment", "DB_PASSWORD=abc DB_HOST=h", "abc", "DB_PASSWORD=[redacted] DB_HOST=h"),
    ("environment-pass", "DB_PASS=abc1", "abc1", "DB_PASS=[redacted]"),
    ("numbered", "password2=abc", "abc", "password2=[redacted]"),
    ("json", '{"password": "a b", "n": 1}', "a b", '{"password": "[redacted]", "n": 1}'),
    ("json-compact", '{"password":"ab","n":1}', '"ab"', '{"password":"[redacted]","n":1}'),
    ("json-number", '{"password":12345}', "12345", '{"password":[redacted]}'),
    ("json-quote", r'{"password": "a\"bcd"}', "bcd", '{"password": "[redacted]"}'),
    ("json-cut-off", '{"a": 1, "secret": "a bc', "bc", '{"a": 1, "secret": "[redacted]'),
    ("json-escaped", r"{\"token\":\"abc\"}", "abc", r"{\"token\":\"[redacted]\"}"),
    ("dict", "{'password': 'a b', 'n': 1}", "a b", "{'password': '[redacted]', 'n': 1}"),
    ("dict-quote", """{'password': "it's"}""", "it's", """{'password': "[redacted]"}"""),
    ("dict-bytes", "{'password': b'ab'}", "b'ab'", "{'password': b'[redacted]'}"),
    ("dict-list", "{'password': ['ab']}", "'ab'", "{'password': ['[redacted]']}"),
    ("call", "connect(user=u, password=ab)", "ab)", "connect(user=u, password=[redacted])"),
    ("comma-inside", "password=a,bcd x", "bcd", "password=[redacted] x"),
    ("comma-before-item", "password=ab,user=u", "ab,", "password=[redacted],user=u"),
    ("behind-marker", "password=[redacted]rest", "rest", "password=[redacted]"),
    ("card-as-password", "password=4111111111111111!tail", "tail", "password=[redacted]"),
    ("token-as-password", f"password=ghp_{_GITHUB}!tail", "tail", "password=[redacted]"),
    ("asgi-key", "(b'x-api-key', b'ab')", "b'ab'", "(b'x-api-key', b'[redacted]')"),
    ("flag", "run --db-password ab1 -v", "ab1", "run --db-password [redacted] -v"),
    ("flag-list", "['x', '--token', 'ab1']", "ab1", "['x', '--token', '[redacted]']"),
    ("xml", "<u:Password>ab</u:Password>", ">ab<", "<u:Password>[redacted]</u:Password>"),
    ("sql", "CREATE USER b PASSWORD 'ab'", "'ab'", "CREATE USER b PASSWORD '[redacted]'"),
    ("sql-doubled-quote", "WITH PASSWORD 'it''s'", "s'", "WITH PASSWORD '[redacted]'"),
    (
        "pydantic",
        "1 validation error for Login\npassword\n  String should have at least 8 characters "
        "[type=string_too_short, input_value='hunter2', input_type=str]",
        "hunter2",
        "1 validation error for Login\npassword\n  String should have at least 8 characters "
        "[type=string_too_short, input_value=[redacted], input_type=str]",
    ),
    # Cards
    ("visa", "card 4111111111111111 declined", "4111", "card [redacted] declined"),
    ("visa-blanks", "4111 1111 1111 1111", "1111", "[redacted]"),
    ("visa-dashes", "pan=4111-1111-1111-1111.", "1111", "pan=[redacted]."),
    ("visa-old", "4222222222222", "4222", "[redacted]"),
    ("amex", "3782 822463 10005", "3782", "[redacted]"),
    ("mastercard", "5555555555554444", "5555", "[redacted]"),
    ("mastercard-2", "2223003122003222", "2223", "[redacted]"),
    ("discover", '"6011111111111117"', "6011", '"[redacted]"'),
    ("unionpay-19", "6205500000000000004", "6205", "[redacted]"),
    ("card-after-number", "order 12 4111 1111 1111 1111", "4111", "order 12 [redacted]"),
    ("card-before-word", "4111 1111 1111 1111 2nd", "4111", "[redacted] 2nd"),
    (
        "cards",
        "4111 1111 1111 1111 5555555555554444",
        "1111",
        "[redacted] [redacted]",
    ),
    ("card-on-its-line", "card\n4111111111111111\nx", "4111", "card\n[redacted]\nx"),
    ("card-as-float", "pan 4111111111111111.0", "4111", "pan [redacted].0"),
    ("card-in-repr", r"'a\n4111111111111111'", "4111", r"'a\n[redacted]'"),
]

_TRACEBACK: Final = (
    'Traceback (most recent call last):\n  File "/srv/app.py", line 12, in main\n'
    "    run(token=token, password=settings.db.password, secret=load_secret(1))\n"
    '  File "/srv/app.py", line 20, in run\n'
    '    password = os.environ["DB_PASSWORD"]\n'
    "               ~~~~~~~~~~^^^^^^^^^^^^^^^\n"
    "KeyError: 'DB_PASSWORD'\n"
)

_INNOCENT: Final[list[str]] = [
    "",
    "author 42 not found",
    "Unexpected token < in JSON at position 0",
    "Unexpected token: < at 3",
    "unexpected token: 'else'",
    "token expired",
    "token: expired",
    "Invalid token: Signature has expired",
    "password must not be empty",
    "password: Field required",
    "password: String should have at least 8 characters",
    "password: str | None",
    "token=None, secret=null, password=''",
    "secret santa",
    "missing password",
    "passwords: 3",
    "ResetPassword: handler failed",
    "login() missing 1 required positional argument: 'password'",
    "KeyError: 'token'",
    "order 1234567890123456 not found",
    "order 4111111111111112 not found",
    "snowflake 1541815603606036480",
    "0.4111111111111111 and 17.5555555555554444",
    "4111111111111111x a4111111111111111",
    "0x4111111111111111",
    "550e8400-e29b-41d4-a716-446655440000",
    "41111111-1111-1111-8111-111111111111",
    "2024-01-15T10:30:00.123456+00:00",
    "2024-01-15 10:30:00,123",
    "20240115103000 20240115103001 20240115103002",
    "1705314600000 1705314600123456789",
    "da39a3ee5e6b4b0d3255bfef95601890afd80709",
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "user:42",
    "http://host:8080/path",
    "http://host:8080/path?mail=bob@example.com",
    'http://host:8080","mail":"bob@example.com"',
    "http://host:8080, see bob@example.com",
    "http://[::1]:8080/a@b",
    "https://bob@example.com/x",
    "postgresql://u:***@h/db",
    "bob@example.com, mailto:bob@example.com",
    "key=order_id",
    "partition_key=42 routing_key=a.b idempotency_key=abc",
    "max_tokens=100",
    "tokens: 12",
    "token_type=bearer token_count: 3",
    "token_type=bearer expires_in=3600",
    "password=SecretStr('**********') token=b''",
    "Bearer token missing",
    'WWW-Authenticate: Bearer realm="api", error="invalid_token"',
    "Basic authentication required, see Basic usage",
    "authorization: denied",
    "Authorization header missing",
    "process killed sig=9",
    "PWD=/srv/app OLDPWD=/srv",
    "WHERE users.token = $1::VARCHAR AND password = %(password)s AND secret = ?",
    "first pass: 3 of 4",
    "secret://vault/path, Token::new",
    "eyJ is how they start",
    "sk-estimator-doc-link-fitted-and-more",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    "no -----BEGIN PRIVATE KEY----- in the file",
    '{"token": {"kind": "opaque"}, "secret": []}',
    _TRACEBACK,
    MARKER,
]


@pytest.mark.parametrize(
    ("text", "secret", "expected"),
    [pytest.param(*case, id=name) for name, *case in _SECRETS],
)
def test_a_secret_is_replaced_and_its_surroundings_stay(
    text: str, secret: str, expected: str
) -> None:
    assert secret in text
    result = redact(text)
    assert secret not in result
    assert result == expected


@pytest.mark.parametrize("text", _INNOCENT, ids=lambda text: str(text)[:40])
def test_an_innocent_text_survives_unchanged(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    ("text", "secret"), [pytest.param(text, secret, id=name) for name, text, secret, _ in _SECRETS]
)
def test_a_secret_is_found_anywhere_in_a_log_record(text: str, secret: str) -> None:
    record = f"2024-01-15 10:30:00,123 ERROR orders: delivery 7 failed ({text}\n) after 3 tries"
    assert secret not in redact(record)


@given(st.uuids())
@settings(deadline=None)
def test_a_uuid_survives_unchanged(value: uuid.UUID) -> None:
    assert redact(f"message {value} lost") == f"message {value} lost"


@given(st.datetimes())
@settings(deadline=None)
def test_a_timestamp_survives_unchanged(value: object) -> None:
    assert redact(f"since {value}") == f"since {value}"


# Larger ones may well be card numbers that went through a column of floats.
@given(st.floats(-1e12, 1e12))
@settings(deadline=None)
def test_a_measured_float_survives_unchanged(value: float) -> None:
    assert redact(f"took {value} s") == f"took {value} s"


# --- Properties ----------------------------------------------------------------------------------

_FRAGMENTS: Final = [
    *(text for _, text, _, _ in _SECRETS),
    *_INNOCENT,
    *["password", "token", "secret", "pwd", "key", "sig", "pass", "Bearer", "Basic", "--token"],
    *["Authorization", "Digest", "cookie", "eyJ", "eyJaaaaa", "sk-", "AKIA", "ghp_", "://", "@"],
    *[":", "=", "==>", ";", ",", "&", "?", " ", "\t", "\n", "\r\n", "\\", "\\n", "%20", "*", "."],
    *['"', "'", '"""', '\\"', "(", ")", "[", "]", "{", "}", "<", ">", "</", "-", "--", "_", "b'"],
    *["4", "4111", "1111", "4111111111111111", "-----BEGIN PRIVATE KEY-----", "-----END", "A" * 20],
    *['  File "a.py", line 1, in f\n    ', MARKER, "[redacted", "redacted]", "\x00", "\ud800", "é"],
]
_WILD: Final = st.lists(st.sampled_from(_FRAGMENTS) | st.text(max_size=5), max_size=12).map("".join)


@given(st.text() | _WILD)
@settings(max_examples=500, deadline=None)
@example("password=[redacted])")
@example("password=[redacted]]")
def test_redacting_twice_is_redacting_once(text: str) -> None:
    once = redact(text)
    assert redact(once) == once


@given(st.text(st.characters()) | st.text(st.characters(categories=["Cs"])) | _WILD)
@settings(max_examples=500, deadline=None)
def test_no_string_makes_it_raise(text: str) -> None:
    assert isinstance(redact(text), str)


@given(st.text("abcdefghijkmnopqrstuvwxyzABCDEFGHKLMNPQRSTUVWXYZ0123456789!$%^*+~", min_size=8))
@settings(deadline=None)
def test_any_password_is_hidden_wherever_it_is_assigned(tail: str) -> None:
    password = f"Zq7{tail}"
    for template in (
        "password={}",
        "https://bob:{}@host/",
        '"password": "{}"',
        "Pwd={};",
        "Authorization: Bearer {}",
    ):
        assert password not in redact(template.format(password))


def test_a_text_that_does_not_settle_is_withheld_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def grow(text: str) -> str:
        return text + "x"

    monkeypatch.setattr("msgbus.telemetry.redaction._redact_bounded", grow)
    assert redact("never the same") == MARKER


# --- Size and time -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [MAX_LENGTH - 1, MAX_LENGTH, MAX_LENGTH + 1, 5 * MAX_LENGTH])
@pytest.mark.parametrize("filler", ["word ", "x", "token=a;", "token='", "4111111111111111 ", _PEM])
def test_the_result_is_never_longer_than_the_limit_and_stays_as_it_is(
    filler: str, length: int
) -> None:
    result = redact((filler * length)[:length])
    assert len(result) <= MAX_LENGTH
    assert redact(result) == result


def test_a_text_within_the_limit_is_not_cut() -> None:
    text = ("word " * MAX_LENGTH)[:MAX_LENGTH]
    assert redact(text) == text


def test_a_longer_text_keeps_its_beginning_and_says_that_it_was_cut() -> None:
    result = redact("password=hunter2 " + "word " * MAX_LENGTH)
    assert result.startswith("password=[redacted] word word")
    assert result.endswith(" ... [truncated]")


@pytest.mark.parametrize("visible", range(1, 60, 4))
@pytest.mark.parametrize(
    ("text", "start"),
    [
        pytest.param(f"ghp_{_GITHUB}", _GITHUB[:2], id="github"),
        pytest.param("https://bob:hunter2hunter2hunter2hunter2@h", "hun", id="url"),
        pytest.param("4111 1111 1111 1111", "411", id="card"),
        pytest.param(_JWT, "eyJ", id="jwt"),
    ],
)
def test_half_a_secret_at_the_cut_is_not_shown(text: str, start: str, visible: int) -> None:
    padding = "." * (MAX_LENGTH - visible - 1) + " "
    assert start not in redact(f"{padding}{text} and more")


_ADVERSARIAL: Final = {
    "at-signs": "@",
    "colons": ":",
    "slashes": "://",
    "urls-without-password": "x://a:b",
    "urls-with-password": "x://a:b@c",
    "urls-with-blanks": "x://a:b ",
    "user-and-colon": "://a:b:c",
    "jwt-starts": "eyJ",
    "jwt-starts-with-dashes": "-eyJaaaaaaaa",
    "jwt-heads": "eyJaaaaaaaa.",
    "jwt-heads-with-blanks": "eyJaaaaaaaa.a ",
    "jwt-in-escapes": "\\neyJaaaaaaaa",
    "digits": "4",
    "digit-groups": "4111 ",
    "digit-groups-glued": "4111-1111-1111-1112x",
    "short-digit-groups": "4 ",
    "cards": "4111111111111111 ",
    "hex": "deadbeef-",
    "double-quotes": '"',
    "single-quotes": "'",
    "mixed-quotes": "\"'",
    "backslashes": "\\",
    "escaped-quotes": '\\"',
    "keys": "password",
    "keys-with-quotes": 'password="',
    "keys-with-escaped-quotes": 'password=\\"',
    "keys-with-triple-quotes": 'password="""',
    "keys-with-blanks": "password ",
    "keys-with-many-blanks": "password" + " " * 50,
    "keys-with-braces": "pwd={",
    "keys-with-brackets": "token=([{",
    "keys-with-commas": "token=a,",
    "keys-with-values": "token=a ",
    "keys-with-colons": "token: expired ",
    "keys-with-closers": "token=a)]}",
    "closers": "token=" + ")" * 40,
    "validation-errors": "token\n  input_value=",
    "validation-errors-on-one-line": "token\n " + "input_value=" * 100,
    "elements": "token>",
    "elements-with-text": "token>aaaaaaaa<",
    "connection-strings": "pwd=a b c ",
    "connection-strings-with-ends": "pwd=a b;c ",
    "commas": ",",
    "items": "a,",
    "dashes": "-",
    "flags": "--a-",
    "flags-with-keys": "--token -",
    "tuples": "('a-",
    "key-headers": "-----BEGIN PRIVATE KEY-----",
    "key-headers-with-body": "-----BEGIN PRIVATE KEY-----" + "A" * 20,
    "key-headers-with-newlines": "-----BEGIN PRIVATE KEY-----\n\\n",
    "key-prefixes": "-----BEGIN A ",
    "authorization": "authorization: ",
    "authorization-digest": "authorization: digest a ",
    "authorization-escapes": 'authorization: digest \\"',
    "bearer": "bearer ",
    "bearer-with-values": "bearer a",
    "basic": "basic aaaa",
    "cookies": "cookie: a",
    "signatures": "&sig=",
    "openai": "sk-",
    "openai-words": " sk-aaaa",
    "sendgrid": "SG.aaaaaaaaaaaaaaaaaaaa",
    "slack": "xoxb-",
    "github": "ghp_",
    "frames": '  File "a.py", line 1, in f\n    token=a\n',
    "frames-on-one-line": 'File "a.py", line 1, in f token=a ',
    "blanks": " ",
    "newlines": "\n",
    "letters": "a",
    "markers": MARKER,
}
_SHORT: Final = 2 * 1024
_GROWTH: Final = 8
# Linear growth would be 8, quadratic growth 64.
_LIMIT: Final = 40


def _cost(text: str) -> float:
    """CPU time of the fastest of several runs: what is left when disturbances are removed."""

    def once() -> float:
        start = time.process_time()
        redact(text)
        return time.process_time() - start

    return min(once() for _ in range(4))


def _growth(build: Callable[[int], str]) -> float:
    """How much longer the redaction of the long text takes; the best of three measurements."""
    best = float("inf")
    for _ in range(3):
        best = min(best, _cost(build(_SHORT * _GROWTH)) / max(_cost(build(_SHORT)), 1e-6))
        if best <= _LIMIT:
            break
    return best


@pytest.mark.parametrize("piece", _ADVERSARIAL.values(), ids=_ADVERSARIAL.keys())
def test_time_grows_with_the_length_not_with_its_square(piece: str) -> None:
    assert _growth(lambda length: (piece * length)[:length]) <= _LIMIT


@pytest.mark.parametrize("head", ["token=", 'token="', "x://a:", "authorization: digest a="])
@pytest.mark.parametrize("piece", [":", "@", ",", "\\", '"', "a", "4", ")", "{", "eyJ.", " "])
def test_time_grows_with_the_length_of_a_single_value(head: str, piece: str) -> None:
    assert _growth(lambda length: head + (piece * length)[:length]) <= _LIMIT


@pytest.mark.parametrize("seed", range(10))
def test_time_grows_with_the_length_of_random_compositions(seed: int) -> None:
    def build(length: int) -> str:
        chooser = random.Random(seed)  # the same beginning for each length
        palette = chooser.sample(_FRAGMENTS, 4)
        return "".join(chooser.choice(palette) for _ in range(length))[:length]

    assert _growth(build) <= _LIMIT


# --- Exceptions ----------------------------------------------------------------------------------


class _UnprintableError(Exception):
    def __str__(self) -> str:
        message = "no text"
        raise RuntimeError(message)


class _InvalidToken(Exception):  # noqa: N818 - named like those of third parties
    pass


def _raised(exc: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise exc from cause
    except Exception as caught:
        return caught


def test_an_exception_is_shown_as_type_and_redacted_message() -> None:
    assert redact_exception(ValueError("password=hunter2")) == "ValueError: password=[redacted]"


def test_an_exception_without_message_is_shown_as_its_type() -> None:
    assert redact_exception(KeyError()) == "KeyError"


def test_the_type_of_an_exception_is_not_taken_for_a_key() -> None:
    assert redact_exception(_InvalidToken("abc")) == "_InvalidToken: abc"


def test_an_exception_that_cannot_be_printed_is_still_shown() -> None:
    assert redact_exception(_UnprintableError()) == "_UnprintableError: <unprintable>"


def test_an_interrupt_is_shown_like_any_exception() -> None:
    assert redact_exception(KeyboardInterrupt("token=abc")) == "KeyboardInterrupt: token=[redacted]"


def test_a_traceback_shows_frames_but_no_secrets_of_messages_causes_and_notes() -> None:
    cause = _raised(OSError("redis://:hunter2@h refused"))
    exc = _raised(ValueError("password=hunter3"), cause)
    exc.add_note("Authorization: Bearer hunter4")
    text = redact_traceback(exc)
    assert "hunter" not in text
    assert "in _raised" in text
    assert "OSError: redis://:[redacted]@h refused" in text
    assert "ValueError: password=[redacted]" in text


def test_a_traceback_shows_no_secrets_of_source_lines() -> None:
    try:
        raise ValueError("token=hunter2")
    except ValueError as exc:
        text = redact_traceback(exc)
    assert "hunter2" not in text
    assert 'raise ValueError("token=[redacted]")' in text


def test_code_is_recognised_only_right_below_its_frame() -> None:
    frame = '  File "/srv/app.py", line 12, in main\n'
    code = f"{frame}    f('a', token=name)"
    assert redact(code) == code
    for between in ("x\n", "x" * 1000 + "\n", "\n"):
        assert "hunter" not in redact(f"{frame}{between}    f(token=hunter)")
    assert "hunter" not in redact(f"{frame}    {'x' * 1000} token=hunter")
    assert "1234" not in redact(f"{frame}    f(token=1234)")


def test_a_traceback_without_secrets_survives_unchanged() -> None:
    token = object()
    with pytest.raises(TypeError) as caught:
        _reject(password=token)
    text = "".join(traceback.format_exception(caught.value))
    assert "password=token" in text
    assert redact_traceback(caught.value) == text


def _reject(password: object) -> None:
    message = f"unusable: {type(password).__name__}"
    raise TypeError(message)


def test_the_traceback_of_an_unprintable_exception_is_still_shown() -> None:
    assert "_UnprintableError" in redact_traceback(_raised(_UnprintableError()))


def test_the_traceback_of_a_group_is_redacted() -> None:
    group = ExceptionGroup("several", [_raised(ValueError("secret=hunter2")), KeyError("b")])
    text = redact_traceback(_raised(group))
    assert "hunter2" not in text
    assert "ValueError: secret=[redacted]" in text


def test_a_traceback_that_cannot_be_formatted_falls_back_to_the_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: BaseException) -> list[str]:
        raise RuntimeError

    monkeypatch.setattr(traceback, "format_exception", fail)
    assert redact_traceback(ValueError("token=abc")) == "ValueError: token=[redacted]"
