"""Redaction of exceptions and their tracebacks."""

import traceback

import pytest

from msgbus.telemetry.redaction import (
    redact,
    redact_exception,
    redact_traceback,
)


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
