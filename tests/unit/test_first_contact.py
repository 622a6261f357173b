"""First mistakes are answered in one line that names the fix (issue 20, point 2)."""

from __future__ import annotations

import asyncio
import gc
import importlib.abc
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import msgbus
from msgbus import (
    BusConfig,
    Command,
    ConfigurationError,
    Event,
    HandlerSignatureError,
    MessageBus,
    MissingExtraError,
    QueueConfig,
)
from msgbus.errors import MessageDefinitionError, WrongMessageTypeError
from msgbus.resilience import ResilientMessageBus, RetryConfig
from tests.fakes import OrderPlaced

LIBRARY = str(Path(msgbus.__file__).parent)
FRAMES = 5


class Pay(Command[int]):
    amount: int = 1


class Plain:
    """Not a message."""


def library_frames(error: BaseException) -> list[str]:
    """The frames of the library between the user's line and the raise."""
    frames = traceback.extract_tb(error.__traceback__)
    return [str(frame) for frame in frames if frame.filename.startswith(LIBRARY)]


def on_without_parentheses() -> None:
    bus: Any = MessageBus()

    @bus.on  # type: ignore[untyped-decorator]
    async def note(event: OrderPlaced) -> None: ...


def handles_without_parentheses() -> None:
    bus: Any = MessageBus()

    @bus.handles  # type: ignore[untyped-decorator]
    async def pay(command: Pay) -> int:
        return 1


def misspelt_option() -> None:
    bus: Any = MessageBus()

    @bus.on(OrderPlaced, priorty=3)  # type: ignore[untyped-decorator]
    async def note(event: OrderPlaced) -> None: ...


def misspelt_durable_option() -> None:
    bus: Any = MessageBus()
    bus.subscribe(OrderPlaced, print, max_inflight=3)


def misspelt_config() -> None:
    QueueConfig(maxsize=3)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]


def misspelt_retry() -> None:
    RetryConfig(max_retry=3)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]


def misspelt_policy() -> None:
    ResilientMessageBus(retrys=3)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]


def unlike_any_option() -> None:
    BusConfig(zzz=1)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]


def decorated_method() -> None:
    bus: Any = MessageBus()

    class Shop:  # pyright: ignore[reportUnusedClass]
        @bus.on(OrderPlaced)  # type: ignore[untyped-decorator]
        async def note(self, event: OrderPlaced) -> None: ...


def decorated_command_method() -> None:
    bus: Any = MessageBus()

    class Shop:  # pyright: ignore[reportUnusedClass]
        @bus.handles(Pay)  # type: ignore[untyped-decorator]
        async def pay(self, command: Pay) -> int:
            return 1


def url_as_config() -> None:
    MessageBus("sqlite:///x.db")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


def plain_field() -> None:
    class Placed(Event):  # pyright: ignore[reportUnusedClass]
        basket: Plain


MISTAKES: list[tuple[Callable[[], None], type[Exception], str]] = [
    (
        on_without_parentheses,
        ConfigurationError,
        "@bus.on above note names no message class: write @bus.on(OrderPlaced).",
    ),
    (
        handles_without_parentheses,
        ConfigurationError,
        "@bus.handles above pay names no message class: write @bus.handles(PlaceOrder).",
    ),
    (
        misspelt_option,
        ConfigurationError,
        "A handler has no option 'priorty'. Did you mean 'priority'?",
    ),
    (
        misspelt_durable_option,
        ConfigurationError,
        "A handler has no option 'max_inflight'. Did you mean 'max_in_flight'?",
    ),
    (
        misspelt_config,
        ConfigurationError,
        "QueueConfig has no option 'maxsize'. Did you mean 'max_size'?",
    ),
    (
        misspelt_retry,
        ConfigurationError,
        "RetryConfig has no option 'max_retry'. Did you mean 'max_retries'?",
    ),
    (
        misspelt_policy,
        ConfigurationError,
        "ResilientMessageBus has no option 'retrys'. Did you mean 'retry'?",
    ),
    (
        decorated_method,
        HandlerSignatureError,
        "Shop.note is an unbound method: while the class body runs, there is no object yet. "
        "Register the method of an object, bus.subscribe(OrderPlaced, obj.note), or a class with "
        "a method `handle`.",
    ),
    (
        decorated_command_method,
        HandlerSignatureError,
        "Shop.pay is an unbound method: while the class body runs, there is no object yet. "
        "Register the method of an object, bus.register_command_handler(Pay, obj.pay), or a class "
        "with a method `handle`.",
    ),
    (
        url_as_config,
        ConfigurationError,
        "The first argument of a bus is its BusConfig, not a str. A journal is given by name: "
        "MessageBus(journal='sqlite:///x.db').",
    ),
    (
        plain_field,
        MessageDefinitionError,
        "Placed has a field of <class 'tests.unit.test_first_contact.Plain'>, which cannot be "
        "checked or written as JSON. Make that a pydantic model, a dataclass or a TypedDict, or "
        "keep its id.",
    ),
]


@pytest.mark.parametrize(("mistake", "kind", "text"), MISTAKES)
def test_a_mistake_in_the_set_up_is_one_line_with_the_fix(
    mistake: Callable[[], None], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as raised:
        mistake()

    assert str(raised.value) == text
    assert len(library_frames(raised.value)) <= FRAMES, library_frames(raised.value)


def test_an_option_like_no_other_is_answered_with_all_there_are() -> None:
    with pytest.raises(ConfigurationError, match="has no option 'zzz'") as e:
        unlike_any_option()

    assert all(name in str(e.value) for name in BusConfig.model_fields)


async def delayed(bus: Any) -> None:
    await bus.publish(OrderPlaced(), delay=timedelta(seconds=3))


async def timed(bus: Any) -> None:
    await bus.execute(Pay(), timeout=timedelta(seconds=3))


async def requested(bus: Any) -> None:
    await bus.request(Pay(), timeout=timedelta(seconds=3))


async def enqueued(bus: Any) -> None:
    await bus.enqueue(Pay(), delay=timedelta(seconds=3))


@pytest.mark.parametrize("send", [delayed, timed, requested, enqueued])
async def test_a_timedelta_is_refused_with_what_to_write(
    send: Callable[[Any], Coroutine[Any, Any, None]],
) -> None:
    async def pay(command: Pay) -> int:
        return command.amount

    bus = MessageBus(journal="sqlite:///:memory:")
    bus.register_command_handler(Pay, pay)
    async with bus:
        with pytest.raises(TypeError) as raised:
            await send(bus)

    name = "timeout" if send in (timed, requested) else "delay"
    assert str(raised.value) == (
        f"{name} is a number of seconds, not a timedelta: write {name}=value.total_seconds()."
    )
    assert len(library_frames(raised.value)) <= FRAMES, library_frames(raised.value)


@pytest.mark.parametrize("payload", [Plain(), {"sku": "tea"}, "tea"])
async def test_a_plain_object_is_no_message(payload: Any) -> None:
    async with MessageBus() as bus:
        with pytest.raises(WrongMessageTypeError) as published:
            await bus.publish(payload)
        with pytest.raises(WrongMessageTypeError) as executed:
            await bus.execute(payload)

    name = type(payload).__name__
    assert str(published.value) == (
        f"publish takes an Event, not {name}. Define one: class Something(Event): ..."
    )
    assert str(executed.value) == (
        f"execute takes a Command, not {name}. Define one: class Something(Command): ..."
    )
    for raised in (published, executed):
        assert len(library_frames(raised.value)) <= FRAMES, library_frames(raised.value)


class _NoSpark(importlib.abc.MetaPathFinder):
    """Makes pyspark impossible to find, as where it is not installed."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname.partition(".")[0] == "pyspark":
            raise ModuleNotFoundError(fullname, name=fullname)


def test_a_missing_pyspark_is_one_line_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyspark"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_NoSpark(), *sys.meta_path])
    from msgbus import pipeline

    with pytest.raises(MissingExtraError) as raised:
        pipeline.open("sqlite:///shop.db")

    assert str(raised.value) == (
        "This feature needs the package 'pyspark'. Install it with: pip install 'msgbus[spark]'"
    )
    assert len(library_frames(raised.value)) <= FRAMES


# -- a bus that is never started -------------------------------------------------------------------

PROGRAM = textwrap.dedent(
    """
    import asyncio
    from msgbus import Event, MessageBus

    class Placed(Event):
        pass

    bus = MessageBus()

    @bus.on(Placed)
    async def note(event: Placed) -> None: ...

    async def main() -> None:
        await bus.publish(Placed())
        await bus.publish(Placed())
        {more}

    asyncio.run(main())
    """
)


def run(more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(more=more)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout + done.stderr


def test_events_on_a_bus_that_is_never_started_are_said_at_exit() -> None:
    said = run("pass")

    assert said.count("bus_never_started") == 1
    assert "events=2" in said
    assert "async with bus:" in said


def test_a_bus_that_is_started_or_stopped_says_nothing_of_the_kind() -> None:
    assert run("await bus.start(); await bus.stop()") == ""
    assert "bus_never_started" not in run("await bus.stop(0)")


def test_it_is_said_when_the_bus_is_collected_too(caplog: pytest.LogCaptureFixture) -> None:
    def forget() -> None:
        bus = MessageBus()
        bus.subscribe(OrderPlaced, lambda event: None)
        asyncio.run(_publish(bus))

    forget()
    gc.collect()

    assert [one.message.split()[0] for one in caplog.records] == ["bus_never_started"]


async def _publish(bus: MessageBus) -> None:
    await bus.publish(OrderPlaced())
