"""Issue 20, point 3: errors, logs, letters and figures name types and fields, never payloads."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Annotated, Any, Final, Literal

import pytest
from pydantic import BaseModel, Field

from msgbus import Command, Event, MessageBus
from msgbus.errors import PipelineError, StoredMessageError
from msgbus.journal import MemoryJournal
from msgbus.journal.codec import MessageCodec
from msgbus.middleware import LoggingMiddleware, ValidationMiddleware
from msgbus.pipeline.arrow import pa
from msgbus.pipeline.schemas import to_row
from msgbus.pipeline.source.options import WriteOptions
from msgbus.pipeline.source.writer import RowRecords
from msgbus.resilience import ResilientMessageBus, RetryConfig
from msgbus.routing import DispatchRoute, EventEnvelope, MessageCategory, MessageDispatchEngine
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.tracebacks import redacted_traceback

MARKER: Final = "quagga4711"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"


class Noted(Event, key="text"):
    text: str = MARKER
    number: int = 0
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] | None = None


class Counted(Event):
    number: int = 0
    exact: Decimal = Decimal(0)


class Note(Command[int]):
    text: str = MARKER
    number: int = 0


class Plain(BaseModel):
    number: int


def wrong(cls: type[Any]) -> Any:
    """A message with the marker where a number should be."""
    return cls.model_construct(text=MARKER, number=MARKER)


async def _raised(call: Awaitable[object]) -> list[BaseException]:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (each case has its own)
        await call
    return [caught.value]


# -- one function for each place that says something of a message --------------------------


async def executes_an_event() -> list[BaseException]:
    async with MessageBus() as bus:
        return await _raised(bus.execute(Noted()))  # type: ignore[arg-type]


async def executes_text() -> list[BaseException]:
    async with MessageBus() as bus:
        return await _raised(bus.execute(MARKER))  # type: ignore[arg-type]


async def publishes_a_command() -> list[BaseException]:
    async with MessageBus() as bus:
        return await _raised(bus.publish(Note()))  # type: ignore[arg-type]


async def publishes_many_commands() -> list[BaseException]:
    async with MessageBus() as bus:
        return await _raised(bus.publish_many([Noted(), Note()]))  # type: ignore[list-item]


async def middleware_that_returns_the_message() -> list[BaseException]:
    def returns(message: Any, call_next: Any) -> Any:
        return message

    async with MessageBus(middleware=[returns]) as bus:
        bus.register_command_handler(Note, _answers)
        return [_failure(await bus.execute(Note()))]


async def validation_of_a_built_message() -> list[BaseException]:
    async with MessageBus(middleware=[LoggingMiddleware(), ValidationMiddleware()]) as bus:
        bus.register_command_handler(Note, _answers)
        return [_failure(await bus.execute(wrong(Note)))]


async def handler_that_validates() -> list[BaseException]:
    async def validates(command: Note) -> int:
        return Plain.model_validate({"number": command.text}).number

    async with MessageBus(middleware=[LoggingMiddleware()]) as bus:
        bus.register_command_handler(Note, validates)
        # Not the error itself, which is pydantic's own: what the bus says of it.
        result = await bus.execute(Note())
        error = _failure(result)
        return [RuntimeError(result.error, redact_exception(error), redacted_traceback(error))]


async def making_a_message() -> list[BaseException]:
    with pytest.raises(ValueError, match="valid integer") as caught:
        Noted(number=MARKER)  # type: ignore[arg-type]
    return [caught.value]


async def dead_letter_and_its_figures() -> list[BaseException]:
    async def validates(event: Noted) -> None:
        try:
            Plain.model_validate({"number": event.text})
        except ValueError as error:
            raise LookupError("no number") from error

    async with ResilientMessageBus(retry=RetryConfig(max_retries=0), breaker=None) as bus:
        bus.subscribe(Noted, validates)
        await bus.publish(Noted())
        await bus.settled()
        (letter,) = await bus.dead_letters.find()
        facts = (letter.error, letter.traceback, letter.reason, repr(bus.stats()))
        edits = await _raised(bus.dead_letters.edit(letter, number=MARKER))
        return [RuntimeError(*facts), *edits]


async def letters_of_a_file() -> list[BaseException]:
    async with ResilientMessageBus() as bus:
        found: list[BaseException] = []
        for line in (MARKER, json.dumps(MARKER), json.dumps({"payload": MARKER})):
            found += await _raised(bus.dead_letters.import_(io.StringIO(line)))
        return found


async def message_that_cannot_be_written() -> list[BaseException]:
    class Odd(Event):
        thing: Any = None

    codec = MessageCodec([Odd])
    with pytest.raises(StoredMessageError) as caught:
        codec.encode(Odd(thing={MARKER: object()}), time=0.0)
    return [caught.value]


async def message_that_cannot_be_read() -> list[BaseException]:
    codec = MessageCodec([Noted])
    record = codec.encode(Noted(), time=0.0)
    found: list[BaseException] = []
    for payload in (
        {"number": MARKER},
        {"pet": {"kind": MARKER}},
        {"pet": MARKER},
        [MARKER],
    ):
        with pytest.raises(StoredMessageError) as caught:
            codec.decode(record._replace(payload=json.dumps(payload).encode()))
        found.append(caught.value)
    return found


async def reply_that_cannot_be_kept() -> list[BaseException]:
    async def answers_wrongly(command: Note) -> int:
        return command.text  # type: ignore[return-value]

    async with MemoryJournal() as journal, MessageBus(journal=journal) as bus:
        bus.register_command_handler(Note, answers_wrongly)
        ticket = await bus.enqueue(Note())
        return await _raised(ticket.result())


async def dispatcher_that_returns_the_payload() -> list[BaseException]:
    found: list[BaseException] = []
    for output in ({"text": MARKER}, [Noted()], f"{MARKER}..x", Noted()):

        async def gives(envelope: EventEnvelope[Any], output: Any = output) -> Any:
            return output

        engine = MessageDispatchEngine()
        engine.register_dispatcher("gives", gives, MessageCategory.EVENT)
        engine.register_route(DispatchRoute("r", "**", MessageCategory.EVENT, "gives"))
        engine.freeze()
        result = await engine.dispatch("shop.events.notes", EventEnvelope({"text": MARKER}))
        assert result.error_message is not None
        found.append(RuntimeError(result.error_message))
    return found


async def row_that_cannot_be_written() -> list[BaseException]:
    rows: list[dict[str, Any]] = [
        {"name": "Noted", "kind": "event", "payload": MARKER, "key": MARKER},
        {"name": "Noted", "kind": "neither", "text": MARKER},
    ]
    found: list[BaseException] = []
    for row in rows:
        batch = pa.RecordBatch.from_pylist([row])
        with pytest.raises(PipelineError) as caught:
            list(RowRecords(WriteOptions(path="shop.db"), "").of(batch))
        found.append(caught.value)
    return found


async def number_that_fits_no_column() -> list[BaseException]:
    found: list[BaseException] = []
    for fields in ({"number": 4711 * 10**20}, {"exact": Decimal("4711e30")}):
        with pytest.raises(ValueError, match=r"A (whole )?number") as caught:
            to_row(Counted.model_validate(fields))
        assert "4711" not in str(caught.value)
        found.append(caught.value)
    return found


async def _answers(command: Note) -> int:
    return command.number


def _failure(result: Any) -> BaseException:
    assert result.exception is not None
    error: BaseException = result.exception
    return error


CASES: Final[tuple[Callable[[], Awaitable[list[BaseException]]], ...]] = (
    executes_an_event,
    executes_text,
    publishes_a_command,
    publishes_many_commands,
    middleware_that_returns_the_message,
    validation_of_a_built_message,
    handler_that_validates,
    making_a_message,
    dead_letter_and_its_figures,
    letters_of_a_file,
    message_that_cannot_be_written,
    message_that_cannot_be_read,
    reply_that_cannot_be_kept,
    dispatcher_that_returns_the_payload,
    row_that_cannot_be_written,
    number_that_fits_no_column,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_no_error_and_no_log_line_shows_a_payload(
    case: Callable[[], Awaitable[list[BaseException]]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="msgbus")

    errors = await case()

    assert errors
    for error in errors:
        assert MARKER not in str(error)
        assert MARKER not in repr(error)
    for entry in caplog.records:
        assert MARKER not in entry.getMessage()
        assert MARKER not in repr(getattr(entry, "msgbus", ""))
