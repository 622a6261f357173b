"""`on_batch`: functions that get the new events of a journal as a DataFrame, batch by batch."""

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
    """Which batch a handler is given. After a crash the same batch comes again, unchanged."""

    id: int
    """Its number: 0, 1, 2, and so on for one checkpoint."""

    query: str
    """The id of the stream, which lives as long as its checkpoint."""

    @property
    def key(self) -> str:
        """Names this batch among all others, to do a thing once for it."""
        return f"{self.query}/{self.id}"


@final
class BatchHandler(Generic[F]):
    """A function for batches of events, made by `@on_batch`; to be called as before."""

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
        """Names its checkpoint and its cursor in the journal."""
        self.returns = returns
        """What the rows that it returns are, if they are to be written back."""
        self._takes_batch = _takes_batch(function, name)

    def __repr__(self) -> str:
        return f"<BatchHandler {self.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function gives."""
        return self.function(*args, **kwargs)

    def handle(self, frame: DataFrame, batch: MicroBatch) -> DataFrame | None:
        """Call the function with what it takes."""
        given = (frame, batch) if self._takes_batch else (frame,)
        found: DataFrame | None = self.function(*given)
        return found


def on_batch(
    message_type: type[Message], *, name: str | None = None, returns: type[Message] | None = None
) -> Callable[[F], BatchHandler[F]]:
    """Decorate a function of a DataFrame, or of a DataFrame and a `MicroBatch`.

    It gets each event of the class, and of its subclasses, once: as `Pipeline.events` has
    them, in batches, in the order of the journal. `Pipeline.run` starts it. A batch that was
    interrupted comes again with the same `batch.key` and the same rows.

    If it returns a frame, the rows are written to the journal as messages, once for each batch;
    `returns` says of which class, unless the frame has a column `name`.

    Args:
        message_type: What to listen to.
        name: Names its checkpoint; the function's own name if not given.
        returns: The class of the messages that are written back.

    Raises:
        ConfigurationError: The class is none, or the function takes something else.
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
