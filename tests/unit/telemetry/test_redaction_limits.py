"""Redaction of any text: it settles, never raises, and takes linear time."""

import itertools
import random
import time
from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import example, given, settings, strategies as st

from msgbus.telemetry.redaction import (
    MARKER,
    MAX_LENGTH,
    redact,
)
from tests.unit.telemetry.samples import GITHUB, INNOCENT, JWT, PEM, SECRETS

_FRAGMENTS: Final = [
    *(text for _, text, _, _ in SECRETS),
    *INNOCENT,
    *["password", "token", "secret", "pwd", "key", "sig", "pass", "Bearer", "Basic", "--token"],
    *["Authorization", "Digest", "cookie", "eyJ", "eyJaaaaa", "sk-", "AKIA", "ghp_", "://", "@"],
    *[":", "=", "==>", ";", ",", "&", "?", " ", "\t", "\n", "\r\n", "\\", "\\n", "%20", "*", "."],
    *['"', "'", '"""', '\\"', "(", ")", "[", "]", "{", "}", "<", ">", "</", "-", "--", "_", "b'"],
    *["4", "4111", "1111", "4111111111111111", "-----BEGIN PRIVATE KEY-----", "-----END", "A" * 20],
    *['  File "a.py", line 1, in f\n    ', MARKER, "[redacted", "redacted]", "\x00", "\ud800", "é"],
]
_WILD: Final = st.lists(st.sampled_from(_FRAGMENTS) | st.text(max_size=5), max_size=12).map("".join)


@given(st.text() | _WILD)
@settings(max_examples=500)
@example("password=[redacted])")
@example("password=[redacted]]")
def test_redacting_twice_is_redacting_once(text: str) -> None:
    once = redact(text)
    assert redact(once) == once


@given(st.text(st.characters()) | st.text(st.characters(categories=["Cs"])) | _WILD)
@settings(max_examples=500)
def test_no_string_makes_it_raise(text: str) -> None:
    assert isinstance(redact(text), str)


@given(st.text("abcdefghijkmnopqrstuvwxyzABCDEFGHKLMNPQRSTUVWXYZ0123456789!$%^*+~", min_size=8))
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
@pytest.mark.parametrize("filler", ["word ", "x", "token=a;", "token='", "4111111111111111 ", PEM])
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
        pytest.param(f"ghp_{GITHUB}", GITHUB[:2], id="github"),
        pytest.param("https://bob:hunter2hunter2hunter2hunter2@h", "hun", id="url"),
        pytest.param("4111 1111 1111 1111", "411", id="card"),
        pytest.param(JWT, "eyJ", id="jwt"),
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
    "equals": "=",
    "percents": "%25",
    "percent-urls": "%3A%2F%2Fa%3A",
    "percent-urls-with-users": "%3A%2F%2Fa%40",
    "percent-keys": "password%3D",
    "percent-keys-with-quotes": "password%22%3A%22",
    "passwords-said": "password is ",
    "passwords-said-for": "password for a ",
    "passwords-said-quoted": "password '",
    "keys-said": "api key provided: ",
    "not-passwords": "aaaaa is not a ",
    "pairs-said": "credentials: a/",
    "logins-said": "logged in with a",
    "mysql": "mysql ",
    "mysql-flags": "mysql -",
    "sshpass": "sshpass -p ",
    "redis-cli": "redis-cli -a",
    "ldap": "ldapaaa ",
    "logins": "login ",
    "curl": "-u a:",
    "curl-quoted": "'-u', 'a",
    "smb": "smbaaaa -U a%",
    "htpasswd": "htpasswd -b a a ",
    "sqlplus": "sqlplus a/",
    "auth-plain": "auth plain aaaa",
    "auth-redis": "AUTH aaaaa ",
    "ftp": "\nPASS a",
    "pgpass": ":5432:a:",
    "pgpass-stars": "*:",
    "cookies-in-dicts": "cookies={a:",
    "cookie-jars": "<cookie a=",
    "pairs": "auth=('a', '",
    "forms": 'name="password"',
    "forms-with-values": 'name="password" value=',
    "queries": "?key=aaaaaaa1",
    "random-values": "key=a1a1a1a1a1a1a1a1a1 ",
    "base64-json": "eyJaaaaaaaaaaaaaaaa ",
    "base64-json-in-one": "eyJaaaa",
    "url-users": "://aaaaaaaaaaaaaaaa1",
    "ibans": "DE89370400440532013000 ",
    "ibans-in-groups": "DE89 3704 ",
    "ssns": "078-05-1120 ",
    "ssns-in-one": "078-05-",
    "hexadecimal": "0123456789abcdef",
    "discord": "Maaaaaaaaaaaaaaaaaaaaaaa.",
    "azure": "aaa8Q~",
    "terraform": "aaaaaaaaaaaaaa.atlasv1.",
    "doppler": "dp.st.",
    "hashes": "$2b$12$",
    "putty": "Private-Lines: 2\n",
    "identified": "password for a",
    "semicolons": ";password=a ",
}
# Small enough that what is put in for the secrets never makes a text too long: a cut takes a round.
_SIZES: Final = (4 * 1024, 8 * 1024, 16 * 1024)
# The time for twice the length: linear growth would be 2, quadratic growth 4.
_LIMIT: Final = 3.0


def _cost(text: str) -> float:
    """CPU time of the fastest of several runs: what is left when disturbances are removed."""

    def once() -> float:
        start = time.process_time()
        redact(text)
        return time.process_time() - start

    return max(min(once() for _ in range(3)), 1e-5)


def _growth(build: Callable[[int], str]) -> float:
    """How much longer twice the length takes, at worst; the best of several measurements."""
    best = float("inf")
    for _ in range(6):
        costs = [_cost(build(size)) for size in _SIZES]
        best = min(best, max(after / before for before, after in itertools.pairwise(costs)))
        if best <= _LIMIT:
            break
    return best


@pytest.mark.parametrize("piece", _ADVERSARIAL.values(), ids=_ADVERSARIAL.keys())
def test_twice_the_length_takes_at_most_three_times_as_long(piece: str) -> None:
    # Whole pieces: half of one at the end may be a secret, which takes another round.
    assert _growth(lambda length: piece * (length // len(piece))) <= _LIMIT


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


@pytest.mark.parametrize("piece", ["a", "=", "://", "4", "password ", "\"'", "%25"])
def test_a_megabyte_takes_no_longer_than_the_part_of_it_that_is_examined(piece: str) -> None:
    def text(length: int) -> str:
        return (piece * length)[:length]

    ratios = (_cost(text(1024 * 1024)) / _cost(text(MAX_LENGTH)) for _ in range(6))
    assert any(ratio <= _LIMIT for ratio in ratios)
