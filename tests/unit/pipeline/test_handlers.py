"""`on_batch`: what it decorates, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from msgbus import ConfigurationError, Event
from msgbus.pipeline import BatchHandler, MicroBatch, on_batch

BATCH = MicroBatch(3, "query")


class Placed(Event):
    number: int


def test_a_handler_has_the_name_of_its_function_and_may_be_called_as_before() -> None:
    @on_batch(Placed)
    def count(frame: Any) -> Any:
        return ("counted", frame)

    assert isinstance(count, BatchHandler)
    assert (count.name, count.message_type, count.returns) == ("count", Placed, None)
    assert count("frame") == ("counted", "frame")


def test_a_handler_gets_the_batch_if_it_takes_two_arguments() -> None:
    def alone(frame: Any) -> Any:
        return (frame,)

    def both(frame: Any, batch: MicroBatch) -> Any:
        return (frame, batch)

    one: Any = on_batch(Placed)(alone)
    two: Any = on_batch(Placed)(both)

    assert one.handle("frame", BATCH) == ("frame",)
    assert two.handle("frame", BATCH) == ("frame", BATCH)


def test_the_key_of_a_batch_names_the_stream_and_the_number() -> None:
    assert BATCH.key == "query/3"


def nothing() -> None:
    """Takes no frame."""


def three(frame: Any, batch: Any, more: Any) -> None:
    """Takes too much."""


@pytest.mark.parametrize("wrong", [nothing, three])
def test_a_function_of_anything_else_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="'count' takes"):
        on_batch(Placed, name="count")(wrong)


def test_something_that_is_no_message_class_is_refused() -> None:
    given: Any = nothing

    with pytest.raises(ConfigurationError, match=r"@pipeline\.on_batch\(OrderPlaced\)"):
        on_batch(given)
