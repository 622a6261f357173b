"""Redaction of exceptions."""

import os

from msgbus.telemetry.redaction import redact, redact_exception
from msgbus.telemetry.tracebacks import redacted_traceback


class _UnprintableError(Exception):
    def __str__(self) -> str:
        message = "no text"
        raise RuntimeError(message)


class _InvalidToken(Exception):  # noqa: N818 - named like those of third parties
    pass


def test_an_exception_is_shown_as_type_and_redacted_message() -> None:
    assert redact_exception(ValueError("password=hunter2")) == "ValueError: password=[redacted]"


def test_an_exception_without_message_is_shown_as_its_type() -> None:
    assert redact_exception(KeyError()) == "KeyError"


def test_the_type_of_an_exception_is_not_taken_for_a_key() -> None:
    assert redact_exception(_InvalidToken("abc")) == "_InvalidToken: abc"


def test_an_exception_that_cannot_be_printed_is_still_shown() -> None:
    assert redact_exception(_UnprintableError()) == "_UnprintableError: <unprintable>"


def test_half_a_character_is_shown_as_what_any_file_can_hold() -> None:
    error = OSError(os.fsdecode(b"no file \xff, \xc3\xa9"))

    assert redact_exception(error) == "OSError: no file \\udcff, \xe9"
    redacted_traceback(error).encode()


def test_an_interrupt_is_shown_like_any_exception() -> None:
    assert redact_exception(KeyboardInterrupt("token=abc")) == "KeyboardInterrupt: token=[redacted]"


def test_code_is_recognised_only_right_below_its_frame() -> None:
    frame = '  File "/srv/app.py", line 12, in main\n'
    code = f"{frame}    f('a', token=name)"
    assert redact(code) == code
    for between in ("x\n", "x" * 1000 + "\n", "\n"):
        assert "hunter" not in redact(f"{frame}{between}    f(token=hunter)")
    assert "hunter" not in redact(f"{frame}    {'x' * 1000} token=hunter")
    assert "1234" not in redact(f"{frame}    f(token=1234)")
