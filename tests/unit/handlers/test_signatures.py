"""What a handler's parameters may ask for is checked when it is registered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from msgbus import (
    Command,
    ConfigurationError,
    Context,
    Event,
    HandlerRegistry,
    HandlerSignatureError,
    MessageBus,
)


class Ask(Command[str]):
    pass


class Happened(Event):
    pass


class TestSignatures:
    """Wrong handlers are refused when they are registered."""

    def test_wrong_message_annotation(self) -> None:
        async def wrong(command: Happened) -> str:
            return ""

        handler: Any = wrong
        with pytest.raises(HandlerSignatureError, match="annotate it Ask"):
            MessageBus().register_command_handler(Ask, handler)

    def test_no_parameter(self) -> None:
        async def wrong() -> str:
            return ""

        handler: Any = wrong
        with pytest.raises(HandlerSignatureError, match="takes no positional parameter"):
            MessageBus().register_command_handler(Ask, handler)

    def test_extra_parameter_without_annotation(self) -> None:
        async def wrong(command: Ask, other) -> str:  # type: ignore[no-untyped-def]  # noqa: ANN001
            return ""

        with pytest.raises(HandlerSignatureError, match="neither annotation nor"):
            MessageBus().register_command_handler(Ask, wrong)  # pyright: ignore[reportUnknownArgumentType]

    def test_something_that_cannot_be_called(self) -> None:
        with pytest.raises(HandlerSignatureError, match="cannot be called"):
            MessageBus().register_command_handler(Ask, 3)  # type: ignore[arg-type]

    def test_a_generator(self) -> None:
        async def wrong(command: Ask) -> AsyncIterator[str]:
            yield ""

        with pytest.raises(HandlerSignatureError, match="generator"):
            MessageBus().register_command_handler(Ask, wrong)  # type: ignore[arg-type]

    def test_a_list_without_batch(self) -> None:
        async def wrong(events: list[Happened]) -> None: ...

        with pytest.raises(HandlerSignatureError, match="batch=True"):
            MessageBus().subscribe(Happened, wrong)  # type: ignore[arg-type]

    def test_batch_without_a_list(self) -> None:
        async def wrong(event: Happened) -> None: ...

        with pytest.raises(HandlerSignatureError, match=r"list\[Happened\]"):
            MessageBus().subscribe(Happened, wrong, batch=True)  # type: ignore[call-overload]

    def test_commands_and_events_are_not_mixed_up(self) -> None:
        async def handle(message: object) -> None: ...

        with pytest.raises(ConfigurationError, match="not a Command class"):
            MessageBus().register_command_handler(Happened, handle)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="not an Event class"):
            MessageBus().subscribe(Ask, handle)  # type: ignore[type-var]

    async def test_a_class_with_call_is_a_handler(self) -> None:
        class AskHandler:
            def __init__(self, name: str) -> None:
                self.name = name

            async def __call__(self, command: Ask, context: Context) -> str:
                return f"{self.name} {context.handler}"

        registry = HandlerRegistry()
        registry.register_command_handler(Ask, AskHandler("me"))

        assert (await MessageBus(registries=[registry]).call(Ask())).startswith("me ")

    async def test_local_classes_in_annotations_work(self) -> None:
        class Local(Command[int]):
            pass

        bus = MessageBus()

        @bus.handles(Local)
        async def handle(command: Local, context: Context) -> int:
            return 1

        assert await bus.call(Local()) == 1

    def test_decorators_give_the_function_back_unchanged(self) -> None:
        bus = MessageBus()

        async def handle(command: Ask) -> str:
            return ""

        async def listen(event: Happened) -> None: ...

        assert bus.handles(Ask)(handle) is handle
        assert bus.on(Happened)(listen) is listen

    @pytest.mark.parametrize("options", [{"timeout": 0}, {"concurrency": 0}, {"timeout": -1}])
    def test_options_out_of_range(self, options: dict[str, Any]) -> None:
        async def listen(event: Happened) -> None: ...

        with pytest.raises(ConfigurationError, match="above 0"):
            MessageBus().subscribe(Happened, listen, **options)

    @pytest.mark.parametrize("on", [MessageBus(), MessageBus(journal="memory:"), HandlerRegistry()])
    def test_a_misspelt_option_is_refused_with_the_one_that_is_meant(
        self, on: MessageBus | HandlerRegistry
    ) -> None:
        async def listen(event: Happened) -> None: ...

        options: dict[str, Any] = {"time_out": 5}
        wanted = r"no option 'time_out'\. Did you mean 'timeout'\?"
        with pytest.raises(ConfigurationError, match=wanted):
            on.subscribe(Happened, listen, **options)

    def test_durable_options_need_a_journal(self) -> None:
        async def listen(event: Happened) -> None: ...

        with pytest.raises(ConfigurationError, match="journal"):
            MessageBus().subscribe(Happened, listen, durable="receipts")
        with pytest.raises(ConfigurationError, match="ack_timeout is for durable"):
            MessageBus().subscribe(Happened, listen, ack_timeout=3)
        registry = HandlerRegistry()
        registry.subscribe(Happened, listen, durable="receipts")
        with pytest.raises(ConfigurationError, match="no journal"):
            MessageBus(registries=[registry])
        with pytest.raises(ConfigurationError, match="The journal is 3, which lacks acquire"):
            MessageBus(journal=cast("Any", 3))
