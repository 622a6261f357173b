"""Redaction of any text: it settles, never raises, and takes linear time."""

import random
import time
from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

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
