"""`on_batch`: functions that get new events as a DataFrame, batch by batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from msgbus.errors import ConfigurationError
from msgbus.messages.message import Message

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

F = TypeVar("F", bound=Callable[..., Any])


@final
@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Identifies a batch. After a crash the same batch comes again, unchanged."""

    id: int
    """Its number, from 0 for each checkpoint."""
    query: str
    """The id of the stream; it lives as long as its checkpoint."""

    @property
    def key(self) -> str:
        """Unique among all batches, to do a thing once per batch."""
        return f"{self.query}/{self.id}"


@final
class BatchHandler(Generic[F]):
    """A function decorated with `@on_batch`; can be called as before."""

    def __init__(
        self,
        function: F,
        message_type: type[Message],
        *,
        name: str,
        returns: type[Message] | None,
    ) -> None:
        self.function = function
        self.message_type = message_type
        self.name = name
        """The name of its checkpoint and of its cursor in the journal."""
        self.returns = returns
        """The class of the rows that it returns, which are written back."""
        self._takes_batch = _takes_batch(function, name)

    def __repr__(self) -> str:
        return f"<BatchHandler {self.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)

    def handle(self, frame: DataFrame, batch: MicroBatch) -> DataFrame | None:
        """Call the function for a batch."""
        given = (frame, batch) if self._takes_batch else (frame,)
        found: DataFrame | None = self.function(*given)
        return found


def on_batch(
    message_type: type[Message], *, name: str | None = None, returns: type[Message] | None = None
) -> Callable[[F], BatchHandler[F]]:
    """Decorate a function of a DataFrame, or of a DataFrame and a `MicroBatch`.

    It gets the events of the class and its subclasses in batches, in the order of the journal,
    with the columns of `Pipeline.events`. `Pipeline.run` starts it. An interrupted batch comes
    again with the same `batch.key` and the same rows.

    If it returns a frame, the rows are written to the journal as messages, once per batch, of the
    class `returns`, unless the frame has a column `name`.

    Args:
        message_type: The class of the events.
        name: The name of its checkpoint; by default the function's name.
        returns: The class of the messages that are written back.

    Raises:
        ConfigurationError: `message_type` is no message class, or the function takes other
            arguments.
    """
    if not _is_message_class(message_type):
        message = f"Say which events: @pipeline.on_batch(OrderPlaced), not {message_type!r:.60}."
        raise ConfigurationError(message)

    def decorate(function: F) -> BatchHandler[F]:
        own = name or str(getattr(function, "__name__", type(function).__name__))
        return BatchHandler(function, message_type, name=own, returns=returns)

    return decorate


def _is_message_class(given: object) -> bool:
    return isinstance(given, type) and issubclass(given, Message)


def _takes_batch(function: Callable[..., Any], name: str) -> bool:
    parameters = [
        one
        for one in inspect.signature(function).parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) and one.default is one.empty
    ]
    if len(parameters) not in (1, 2):
        message = (
            f"The batch handler {name!r} takes {len(parameters)} arguments. Let it take a "
            f"DataFrame, or a DataFrame and a MicroBatch."
        )
        raise ConfigurationError(message)
    return len(parameters) == 2
