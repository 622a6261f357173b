"""Projections: read models as pure folds over events by key, without Spark.

A replay sees the journal: each message once, in the order of offsets. An event that was published
twice under one id is there once, and dead letters are there too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from types import UnionType
from typing import (
    Any,
    ClassVar,
    Final,
    Generic,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    final,
    get_args,
    get_origin,
)

from pydantic import BaseModel

from msgbus.errors import JournalCorruptError, ProjectionError, StoredMessageError
from msgbus.journal.codec import MessageCodec
from msgbus.journal.ports import Log, Scan
from msgbus.journal.records import Kind, Record, Selection
from msgbus.messages.message import Message
from msgbus.messages.upcasting import Upcaster, restore_upcasters, upcasters_of

S = TypeVar("S")
E_contra = TypeVar("E_contra", bound=Message, contravariant=True)

Key: TypeAlias = str | Callable[[Any], Any]
"""The name of a field, or a function of an event, which may return `None` to leave it out."""

_PAGE: Final = 1000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Projection(ABC, Generic[S, E_contra]):
    """A read model: the state of each key after all its events.

    `class Totals(Projection[Total, OrderPlaced | OrderCancelled])` folds these events and their
    subclasses into one `Total` per key. If the state is a pydantic model, it is the row; else
    `row` is the model and `result` makes it.

    `apply` must depend on its arguments alone: it runs in other processes, and again if one is
    lost.
    """

    events: ClassVar[tuple[type[Message], ...]] = ()
    """The events, if they are not in the brackets after `Projection`."""

    row: ClassVar[type[BaseModel] | None] = None
    """The model of a row, if it is not the state."""

    # Any, and not ClassVar: a subclass may define a string or a method.
    key: Any = None
    """A field, or a method `key(self, event)`; by default the key of the message."""

    @abstractmethod
    def initial(self, key: str) -> S:
        """The state before the first event of a key."""

    @abstractmethod
    def apply(self, state: S, event: E_contra) -> S:
        """The state after an event."""

    def result(self, key: str, state: S) -> BaseModel | None:  # noqa: ARG002 (for overriding)
        """The row of a key, by default its state; `None` for no row."""
        return cast("BaseModel", state)


# -- checking --------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Fold:
    """A checked projection, with its event classes and their upcasters; sent to the workers."""

    projection: Projection[Any, Any]
    row: type[BaseModel]
    types: tuple[type[Message], ...]
    key: Key | None
    upcasters: Mapping[type[Message], Mapping[int, Upcaster]]
    skip_corrupt: bool = False

    @property
    def names(self) -> list[str]:
        """The wire names of its events."""
        return sorted({one.__wire__.name for one in self.types})

    def codec(self) -> MessageCodec:
        """A codec of this process for its events."""
        for message_type, functions in self.upcasters.items():
            restore_upcasters(message_type, functions)
        return MessageCodec(self.types)

    def event(self, codec: MessageCodec, record: Record) -> Message | None:
        """The event of a record; `None` if it is corrupt and `skip_corrupt` is set."""
        try:
            return codec.decode(record)
        except StoredMessageError as error:
            if self.skip_corrupt:
                return None
            error.add_note(f"At offset {record.offset}. skip_corrupt=True leaves such events out.")
            raise

    def decoder(self) -> Callable[[Record], Message | None]:
        """`event`, with a codec of this process."""
        return partial(self.event, self.codec())

    def key_of(self, event: Message, message_key: str | None) -> str | None:
        """The key of an event; `None` leaves it out."""
        if self.key is None:
            return message_key
        found = getattr(event, self.key) if isinstance(self.key, str) else self.key(event)
        return None if found is None else str(found)

    def finish(self, key: str, state: Any) -> BaseModel | None:
        """The row of a key."""
        found = self.projection.result(key, state)
        if found is not None and not isinstance(found, self.row):
            message = (
                f"{type(self.projection).__name__}.result returned {type(found).__name__}, not "
                f"{self.row.__name__}, its row."
            )
            raise ProjectionError(message)
        return found


def plan(
    projection: type[Projection[Any, Any]] | Projection[Any, Any],
    *,
    key: Key | None = None,
    skip_corrupt: bool = False,
) -> Fold:
    """Check a projection, given as a class or an instance.

    Raises:
        ProjectionError: Its events, its row or its key are unknown.
        ConfigurationError: Two of its events have one wire name.
    """
    made = projection() if isinstance(projection, type) else projection
    state, events = _arguments(type(made))
    types = _with_subclasses(made.events or events)
    if not types:
        message = (
            f"The events of {type(made).__name__} are not known. Write them after Projection, "
            f"as Projection[Total, OrderPlaced | OrderCancelled], or as `events = (OrderPlaced,)`."
        )
        raise ProjectionError(message)
    row = made.row or state
    if not (isinstance(row, type) and issubclass(row, BaseModel)):
        message = (
            f"The rows of {type(made).__name__} have no model. Let the state be a pydantic "
            f"model, or set `row` to one and make it in `result`."
        )
        raise ProjectionError(message)
    chosen = cast("Key | None", key if key is not None else made.key)
    if isinstance(chosen, str):
        _check_field(chosen, types, type(made).__name__)
    MessageCodec(types)  # fails here, not on a worker, if two of them have one name
    upcasters = {one: found for one in types if (found := upcasters_of(one))}
    return Fold(made, row, types, chosen, upcasters, skip_corrupt)


def _arguments(kind: type) -> tuple[Any, tuple[Any, ...]]:
    """State and events, from the brackets after `Projection`."""
    for cls in kind.__mro__:
        for base in getattr(cls, "__orig_bases__", ()):
            if get_origin(base) is Projection:
                state, events = get_args(base)
                union = get_origin(events) in (Union, UnionType)
                return state, get_args(events) if union else (events,)
    return None, ()


def _with_subclasses(events: Iterable[Any]) -> tuple[type[Message], ...]:
    """The classes and, as for handlers of a bus, their subclasses."""
    found: dict[type[Message], None] = {}
    waiting = [one for one in events if isinstance(one, type) and issubclass(one, Message)]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found[one] = None
            waiting += one.__subclasses__()
    # A class that was defined again under the same name, as in a notebook, replaces the first.
    latest = {(one.__module__, one.__qualname__, one.__wire__.name): one for one in found}
    return tuple(latest.values())


def _check_field(key: str, types: Iterable[type[Message]], projection: str) -> None:
    lacking = [
        one.__name__ for one in types if not hasattr(one, key) and key not in one.model_fields
    ]
    if lacking:
        message = (
            f"The key of {projection} is the field {key!r}, which {', '.join(sorted(lacking))} "
            f"does not have. Give a function of the event."
        )
        raise ProjectionError(message)


# -- folding ---------------------------------------------------------------------------------


_NEW: Final = object()


@final
class States:
    """The state of each key, folded from events in the order of their offsets."""

    def __init__(self, fold: Fold) -> None:
        self._fold = fold
        self._states: dict[str, Any] = {}

    def advance(self, events: Iterable[tuple[str | None, Message | None, int]]) -> None:
        """Apply events, each with its key and offset; those without a key are left out."""
        # Local names and one look-up: this is the hot loop of a replay.
        states, projection = self._states, self._fold.projection
        initial, apply = projection.initial, projection.apply
        for key, event, offset in events:
            if key is None or event is None:
                continue
            state = states.get(key, _NEW)
            try:
                after = apply(initial(key) if state is _NEW else state, event)
            except Exception as error:
                error.add_note(_at(event, offset))
                raise
            if after is None:
                raise _not_returned(projection, event, offset)
            states[key] = after

    def rows(self) -> Iterator[BaseModel]:
        """The rows, sorted by key."""
        for key in sorted(self._states):
            row = self._fold.finish(key, self._states[key])
            if row is not None:
                yield row


def _not_returned(projection: Projection[Any, Any], event: Message, offset: int) -> ProjectionError:
    return ProjectionError(
        f"{type(projection).__name__}.apply returned None. Return the state, changed or not; for "
        f"a key without a row, return None from `result`. {_at(event, offset)}"
    )


def _at(event: Message, offset: int) -> str:
    return f"At offset {offset}: {type(event).__wire__.name} {event.message_id}."


def fold_records(fold: Fold, records: Iterable[Record]) -> list[BaseModel]:
    """The rows of records in the order of their offsets, sorted by key."""
    states = States(fold)
    states.advance(_with_keys(fold, fold.codec(), records))
    return list(states.rows())


def _with_keys(
    fold: Fold, codec: MessageCodec, records: Iterable[Record]
) -> Iterator[tuple[str | None, Message | None, int]]:
    for record in records:
        event = fold.event(codec, record)
        key = None if event is None else fold.key_of(event, record.key)
        yield key, event, record.offset


async def fold(
    journal: Log,
    projection: type[Projection[Any, Any]] | Projection[Any, Any],
    *,
    key: Key | None = None,
    since: int | datetime | None = None,
    until: int | datetime | None = None,
    skip_corrupt: bool = False,
) -> list[Any]:
    """Fold a journal into the rows of a projection, sorted by key, in this process.

    For small journals: all states are in memory. `Pipeline.replay` returns the same rows.

    Raises:
        ProjectionError: The projection cannot be used.
        StoredMessageError: An event does not decode, and `skip_corrupt` is not set.
        JournalCorruptError: A record is damaged or missing, and `skip_corrupt` is not set.
    """
    checked = plan(projection, key=key, skip_corrupt=skip_corrupt)
    codec, states = checked.codec(), States(checked)
    start = max(await journal.first(), since if isinstance(since, int) else 0)
    end = await journal.head() + 1
    if isinstance(until, int):
        end = min(end, until)
    async with aclosing(_pages(journal, checked.names, start - 1, end - 1)) as pages:
        async for page in pages:
            found = [one for one in page if isinstance(one, Record)]
            if len(found) < len(page) and not skip_corrupt:
                raise damaged_record(next(one for one in page if isinstance(one, int)))
            wanted = [record for record in found if _is_between(record, since, until)]
            states.advance(_with_keys(checked, codec, wanted))
    return list(states.rows())


async def _pages(
    journal: Log, names: list[str], after: int, last: int
) -> AsyncGenerator[list[Record | int], None]:
    """Read messages of any kind behind `after` and up to `last`, in order."""
    kinds = [Selection(names=names, kind=kind) for kind in (Kind.EVENT, Kind.COMMAND)]
    scans = [Scan((), after) for _ in kinds]
    while after < last:
        for index, selection in enumerate(kinds):
            if scans[index].upto <= after:
                scans[index] = await journal.read(after, _PAGE, selection)
        upto = min(last, *(scan.upto for scan in scans))
        # A damaged record comes with every kind: it is one message all the same.
        found = {_offset(one): one for scan in scans for one in scan.records}
        yield [found[offset] for offset in sorted(found) if after < offset <= upto]
        after = upto


def _offset(record: Record | int) -> int:
    return record if isinstance(record, int) else record.offset


def damaged_record(offset: int) -> JournalCorruptError:
    """The error for a record that is damaged or missing."""
    return JournalCorruptError(
        f"Message {offset} of the journal is damaged or missing. Restore a backup; "
        f"skip_corrupt=True leaves such messages out, and journal.verify() lists all of them."
    )


def _is_between(record: Record, since: int | datetime | None, until: int | datetime | None) -> bool:
    # In microseconds, as in Spark.
    time = math.floor(record.time * 1_000_000 + 0.5)
    if isinstance(since, datetime) and time < _microseconds(since):
        return False
    return not (isinstance(until, datetime) and time >= _microseconds(until))


def _microseconds(moment: datetime) -> int:
    aware = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    found = aware - _EPOCH
    return (found.days * 86_400 + found.seconds) * 1_000_000 + found.microseconds


def in_chunks(rows: Iterable[BaseModel], size: int) -> Generator[list[BaseModel], None, None]:
    """Rows in lists of at most `size`."""
    left = iter(rows)
    while chunk := list(islice(left, size)):
        yield chunk
