"""Tracebacks of logs and dead letters: for the reader's own code, without secrets (20.6)."""

from __future__ import annotations

import ast
import gc
import json
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import msgbus
from msgbus import Command, MessageBus, MissingHandlerError
from msgbus.telemetry.tracebacks import MAX_LENGTH, redacted_traceback

PACKAGE = str(Path(msgbus.__file__).parent)


class Order(Command[None]):
    pass


class Parcel(BaseModel):
    weight: int


class _UnprintableError(Exception):
    def __str__(self) -> str:
        message = "no text"
        raise RuntimeError(message)


def raised_by(work: Callable[[], object]) -> Exception:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:
        return caught


def formatted_by_python(error: Exception) -> str:
    """Format a traceback without the lines that mark a part of the source line."""
    text = "".join(traceback.format_exception(error))
    return re.sub(r"^ +[~^]+\n", "", text, flags=re.MULTILINE)


# -- which frames ------------------------------------------------------------------------------


async def test_consecutive_frames_of_msgbus_are_one_line() -> None:
    async def send() -> None:
        async with MessageBus() as bus:

            @bus.handles(Order)
            async def ship(command: Order) -> None:
                json.loads("{")

            await bus.call(Order())

    text = ""
    try:
        await send()
    except ValueError as error:
        text = redacted_traceback(error)

    assert re.search(r"^  \.\.\. \d+ frames? of msgbus$", text, re.MULTILINE)
    assert PACKAGE not in text
    assert ", in send\n" in text
    assert ", in ship\n" in text
    assert "decoder.py" in text  # frames of other packages stay
    assert text.endswith("column 2 (char 1)\n")


async def test_the_frame_that_raised_is_shown_even_if_it_is_one_of_msgbus() -> None:
    text = ""
    async with MessageBus() as bus:
        try:
            await bus.call(Order())
        except MissingHandlerError as error:
            text = redacted_traceback(error)

    frames = [line for line in text.splitlines() if line.startswith("  File")]
    assert "test_tracebacks.py" in frames[0]
    assert PACKAGE in frames[-1]
    assert len(frames) == 2


def test_a_traceback_without_secrets_and_frames_of_msgbus_is_pythons_own_but_for_markers() -> None:
    token = object()

    def reject(password: object) -> None:
        message = f"unusable: {type(password).__name__}"
        raise TypeError(message)

    error = raised_by(lambda: reject(password=token))

    text = formatted_by_python(error)
    assert "password=token" in text
    assert redacted_traceback(error) == text


def test_a_traceback_formatted_by_a_finalizer_does_not_disturb_the_parser() -> None:
    # Python 3.11 parses a source line to mark the part that raised, and its parser cannot be
    # entered again by a finalizer that the garbage collector runs in the middle of it.
    class Failed:
        def __init__(self, error: Exception) -> None:
            self.error = error
            self.cycle = self

        def __del__(self) -> None:
            texts.append(redacted_traceback(self.error))

    texts: list[str] = []
    error = raised_by(lambda: json.loads("{") or json.loads("}"))
    source = "value = (1 + 2) * [3, 4][0]\n" * 2_000
    thresholds = gc.get_threshold()
    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            Failed(error)
        gc.set_threshold(100)
        gc.enable()
        tree = ast.parse(source)
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()

    assert len(tree.body) == 2_000
    assert len(texts) == 50


def test_the_cause_and_the_context_of_an_error_are_in_its_traceback() -> None:
    def cause() -> None:
        try:
            json.loads("{")
        except ValueError as error:
            raise KeyError("order") from error

    def context() -> None:
        try:
            cause()
        finally:
            raise LookupError("second")

    error = raised_by(context)

    text = formatted_by_python(error)
    assert redacted_traceback(error) == text.replace(
        "json.decoder.JSONDecodeError", "JSONDecodeError"
    )


def test_a_suppressed_context_is_left_out() -> None:
    def hide() -> None:
        try:
            json.loads("{")
        except ValueError:
            raise KeyError("order") from None

    assert "JSONDecodeError" not in redacted_traceback(raised_by(hide))


def test_errors_that_cause_each_other_in_a_circle_end() -> None:
    one, other = raised(KeyError("one")), raised(KeyError("other"))
    one.__cause__, other.__cause__ = other, one

    text = redacted_traceback(one)

    assert text.count("KeyError: 'one'") == text.count("KeyError: 'other'") == 1


def test_the_members_of_a_group_are_shown_each_with_its_traceback() -> None:
    inner = ExceptionGroup("inner", [raised(OSError("deep"))])
    group = ExceptionGroup("several", [raised(ValueError("secret=hunter2")), inner])

    text = redacted_traceback(raised(group))

    assert "hunter2" not in text
    assert "ExceptionGroup: several (2 sub-exceptions)\n  +- 1 of 2\n" in text
    assert "  | ValueError: secret=[redacted]\n" in text
    assert "  |   | OSError: deep\n" in text
    assert text.count(", in raised\n") == 3


def test_wide_and_deep_groups_are_bounded() -> None:
    wide = ExceptionGroup("wide", [ValueError(number) for number in range(1000)])
    deep: Exception = ValueError("lowest")
    for level in range(50):
        inner: list[Exception] = [deep]
        deep = ExceptionGroup(f"level {level}", inner)

    assert "  +- ... 992 more exceptions\n" in redacted_traceback(wide)
    assert "lowest" not in redacted_traceback(deep)


# -- secrets -----------------------------------------------------------------------------------


def test_messages_causes_notes_and_source_lines_show_no_secrets() -> None:
    cause = raised(OSError("redis://:hunter2@h refused"))
    error = raised(ValueError("password=hunter3"), cause)
    error.add_note("Authorization: Bearer hunter4")

    text = redacted_traceback(error)

    assert "hunter" not in text
    assert "in raised" in text
    assert "OSError: redis://:[redacted]@h refused" in text
    assert "ValueError: password=[redacted]" in text

    def in_the_code() -> None:
        raise ValueError("token=hunter2")

    assert 'raise ValueError("token=[redacted]")' in redacted_traceback(raised_by(in_the_code))


def test_the_input_of_a_validation_error_is_left_out() -> None:
    weight = "Lovelace-1815"
    error = raised_by(lambda: Parcel(weight=weight))  # type: ignore[arg-type]

    text = redacted_traceback(error)

    assert "Lovelace-1815" not in text
    assert "Parcel is not valid: weight: Input should be a valid integer" in text


# -- limits ------------------------------------------------------------------------------------


def test_an_unprintable_error_is_named() -> None:
    text = redacted_traceback(raised(_UnprintableError()))

    assert ", in raised\n" in text
    assert text.endswith("_UnprintableError: <unprintable>\n")


def test_a_traceback_that_cannot_be_formatted_is_the_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: Any) -> list[Any]:
        raise RuntimeError

    monkeypatch.setattr(traceback, "walk_tb", fail)

    assert redacted_traceback(raised(ValueError("token=abc"))) == "ValueError: token=[redacted]\n"


def test_a_long_message_is_cut_and_the_frames_stay() -> None:
    text = redacted_traceback(raised(KeyError("x" * 3 * MAX_LENGTH), raised(OSError("cause"))))

    assert len(text) <= MAX_LENGTH
    assert text.count(", in raised\n") == 2
    assert "OSError: cause" in text
    assert text.endswith("... [truncated]\n")


def test_of_a_deep_traceback_the_middle_is_left_out() -> None:
    def first(depth: int) -> None:
        second(depth)

    def second(depth: int) -> None:
        if not depth:
            raise ValueError("at the bottom")
        first(depth - 1)

    text = redacted_traceback(raised_by(lambda: first(200)))

    assert len(text) <= MAX_LENGTH
    assert text.startswith("Traceback (most recent call last):\n")
    assert ", in raised_by\n" in text
    assert "\n... [truncated]\n" in text
    assert text.endswith("ValueError: at the bottom\n")
    assert 'raise ValueError("at the bottom")' in text
