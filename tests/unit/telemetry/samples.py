"""Texts with secrets in them, and texts that only look so."""

import base64
from typing import Final

from msgbus.telemetry.redaction import (
    MARKER,
)

# Put together at run time, so that secret scanners do not take this file for a leak.
AWS_ID: Final = "AKIA" + "IOSFODNN7EXAMPLE"
AWS_SECRET: Final = "wJalrXUtnFEMI/K7MDENG/bPxRfiCY" + "EXAMPLEKEY"
AZURE_KEY: Final = base64.b64encode(bytes(range(64))).decode()
JWT_HEAD: Final = "eyJhbGciOiJIUzI1NiJ9"
JWT_BODY: Final = "eyJzdWIiOiIxMjM0NTY3ODkwIn0"
JWT_TAIL: Final = "dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
JWT: Final = f"{JWT_HEAD}.{JWT_BODY}.{JWT_TAIL}"
BASIC: Final = base64.b64encode(b"bob:hunter2").decode()
GITHUB: Final = "16C7e42F292c6912E7710c838347Ae178B4a"
HEX: Final = "4eC39HqLyjWDarjtT1zdp7dc"
PEM_BODY: Final = "\n".join(["MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQ"] * 3)
PEM: Final = f"-----BEGIN PRIVATE KEY-----\n{PEM_BODY}\n-----END PRIVATE KEY-----"

# (name, text, what must be gone, what the whole result must be)
SECRETS: Final[list[tuple[str, str, str, str]]] = [
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
        f"Authorization: Basic {BASIC}",
        BASIC,
        "Authorization: Basic [redacted]",
    ),
    ("basic", f"got Basic {BASIC}.", BASIC, "got Basic [redacted]."),
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
    ("jwt", f"bad jwt {JWT}.", JWT_TAIL, "bad jwt [redacted]."),
    ("jwt-cut-off", f"jwt {JWT_HEAD}.{JWT_BODY}...", JWT_BODY, "jwt [redacted]..."),
    ("jwt-in-repr", rf"'line\n{JWT}'", JWT_TAIL, r"'line\n[redacted]'"),
    ("jwe", f"{JWT_HEAD}..a-1.b_2.c3 end", "b_2", "[redacted] end"),
    ("aws-id", f"key {AWS_ID} denied", AWS_ID[4:], "key AKIA[redacted] denied"),
    ("aws-temporary-id", f"ASIA{AWS_ID[4:]}", AWS_ID[4:], "ASIA[redacted]"),
    (
        "aws-secret",
        f"aws_secret_access_key = {AWS_SECRET}",
        AWS_SECRET,
        "aws_secret_access_key = [redacted]",
    ),
    (
        "aws-secret-json",
        f'"SecretAccessKey": "{AWS_SECRET}"',
        AWS_SECRET,
        '"SecretAccessKey": "[redacted]"',
    ),
    (
        "aws-presigned",
        f"https://b/o?X-Amz-Signature={HEX}&X=1",
        HEX,
        "https://b/o?X-Amz-Signature=[redacted]&X=1",
    ),
    ("github-personal", f"ghp_{GITHUB}", GITHUB, "ghp_[redacted]"),
    ("github-oauth", f"x gho_{GITHUB} y", GITHUB, "x gho_[redacted] y"),
    ("github-server", f"(ghs_{GITHUB})", GITHUB, "(ghs_[redacted])"),
    ("github-fine", f"github_pat_{GITHUB}_a", GITHUB, "github_pat_[redacted]"),
    ("github-url", f"https://ghp_{GITHUB}@h/r", GITHUB, "https://ghp_[redacted]@h/r"),
    ("gitlab", f"glpat-{HEX}", HEX, "glpat-[redacted]"),
    ("slack", f"xoxb-123456789012-{HEX}", HEX, "xoxb-[redacted]"),
    ("slack-user", f"xoxp-1-{HEX}", HEX, "xoxp-[redacted]"),
    ("google", f"key=AIza{GITHUB}", GITHUB, "key=AIza[redacted]"),
    ("stripe", f"sk_live_{HEX}", HEX, "sk_live_[redacted]"),
    ("stripe-restricted", f"rk_live_{HEX}", HEX, "rk_live_[redacted]"),
    ("openai", f"Incorrect key: sk-{HEX}", HEX, "Incorrect key: sk-[redacted]"),
    ("openai-project", f"sk-proj-{HEX}-{HEX}", HEX, "sk-[redacted]"),
    ("sendgrid", f"SG.{HEX}.{HEX}", HEX, "SG.[redacted]"),
    (
        "pem",
        f"bad {PEM} here",
        PEM_BODY[:40],
        "bad -----BEGIN PRIVATE KEY-----[redacted]-----END PRIVATE KEY----- here",
    ),
    (
        "pem-rsa-in-repr",
        repr(PEM.replace("PRIVATE", "RSA PRIVATE")),
        PEM_BODY[:40],
        "'-----BEGIN RSA PRIVATE KEY-----[redacted]-----END RSA PRIVATE KEY-----'",
    ),
    (
        "pem-cut-off",
        f"-----BEGIN EC PRIVATE KEY-----\n{PEM_BODY}\nabc=\nnext: line",
        PEM_BODY[:40],
        "-----BEGIN EC PRIVATE KEY-----[redacted]\nnext: line",
    ),
    # Connection strings
    (
        "azure-account",
        f"AccountName=n;AccountKey={AZURE_KEY};EndpointSuffix=e",
        AZURE_KEY,
        "AccountName=n;AccountKey=[redacted];EndpointSuffix=e",
    ),
    (
        "azure-bus",
        f"SharedAccessKeyName=Root;SharedAccessKey={AZURE_KEY}",
        AZURE_KEY,
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
    ("token-as-password", f"password=ghp_{GITHUB}!tail", "tail", "password=[redacted]"),
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

TRACEBACK: Final = (
    'Traceback (most recent call last):\n  File "/srv/app.py", line 12, in main\n'
    "    run(token=token, password=settings.db.password, secret=load_secret(1))\n"
    '  File "/srv/app.py", line 20, in run\n'
    '    password = os.environ["DB_PASSWORD"]\n'
    "               ~~~~~~~~~~^^^^^^^^^^^^^^^\n"
    "KeyError: 'DB_PASSWORD'\n"
)

INNOCENT: Final[list[str]] = [
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
    TRACEBACK,
    MARKER,
]
