"""What differs between a value and the one that was read back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple, cast, final
from uuid import UUID

from pydantic import BaseModel

_MISSING: Final = object()

_SCALARS: Final = frozenset({str, int, bool, bytes, type(None), UUID, date, timedelta})
"""Types whose values are equal if `==` says so."""


@final
class Difference(NamedTuple):
    """The first one that was found."""

    path: str
    """Where it is, as `order.lines[2].price`."""

    sent: object
    read: object

    @property
    def field(self) -> str:
        """The path without the dot before it."""
        return self.path.removeprefix(".")


def difference(sent: Any, read: Any) -> Difference | None:
    """Compare field by field, whatever `==` of the classes says; return what differs, if anything.

    Models and dataclasses have to be of the same class. Of all else the type may be another one
    if the values are equal, as a whole number in a field for floats.
    """
    kind = cast("type[object]", type(sent))
    if kind is not type(read):
        is_equal = not _has_fields(kind) and _is_equal(sent, read)
    elif kind in _SCALARS:
        is_equal = sent == read
    else:
        return _comparison(kind)(sent, read)
    return None if is_equal else Difference("", sent, read)


def _comparison(kind: type[object]) -> Callable[[Any, Any], Difference | None]:
    if issubclass(kind, BaseModel):
        return _of_models
    if is_dataclass(kind):
        return _of_fields
    for base, compare in _CONTAINERS:
        if issubclass(kind, base):
            return compare
    return _of_others


def _has_fields(kind: type[object]) -> bool:
    return issubclass(kind, BaseModel) or is_dataclass(kind)


def _of_models(sent: BaseModel, read: Any) -> Difference | None:
    found = _of_parts(sent, read, type(sent).__pydantic_fields__)
    extra: Any = sent.__pydantic_extra__
    if found is None and extra != read.__pydantic_extra__:
        found = _of_named(extra or {}, read.__pydantic_extra__ or {})
    private = sent.__pydantic_private__
    if found is None and private:
        found = _of_private(private, read.__pydantic_private__ or {})
    return found


def _of_private(sent: dict[str, Any], read: dict[str, Any]) -> Difference | None:
    """Compare private attributes, except for those that equal nothing but themselves, as locks."""
    for name, value in sent.items():
        other = read.get(name, _MISSING)
        if type(value) is type(other) and _has_no_equal(type(value)):
            continue
        found = difference(value, other)
        if found is not None:
            return found._replace(path=f".{name}{found.path}")
    return None


def _has_no_equal(kind: Any) -> bool:
    return kind.__eq__ is object.__eq__


def _of_fields(sent: Any, read: Any) -> Difference | None:
    return _of_parts(sent, read, [one.name for one in fields(sent)])


def _of_parts(sent: Any, read: Any, names: Iterable[str]) -> Difference | None:
    for name in names:
        found = difference(getattr(sent, name, _MISSING), getattr(read, name, _MISSING))
        if found is not None:
            return found._replace(path=f".{name}{found.path}")
    return None


def _of_named(sent: Mapping[str, Any], read: Mapping[str, Any]) -> Difference | None:
    for name in [*sent, *(name for name in read if name not in sent)]:
        found = difference(sent.get(name, _MISSING), read.get(name, _MISSING))
        if found is not None:
            return found._replace(path=f".{name}{found.path}")
    return None


def _of_mappings(sent: Mapping[Any, Any], read: Mapping[Any, Any]) -> Difference | None:
    for key, value in sent.items():
        found = difference(value, read.get(key, _MISSING))
        if found is not None:
            return found._replace(path=f"[{key!r}]{found.path}")
    return None if len(sent) == len(read) else Difference("", sent, read)


def _of_sequences(sent: Iterable[Any], read: Iterable[Any]) -> Difference | None:
    first, second = list(sent), list(read)
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        found = difference(one, other)
        if found is not None:
            return found._replace(path=f"[{index}]{found.path}")
    return None if len(first) == len(second) else Difference("", sent, read)


def _of_sets(sent: Iterable[Any], read: Iterable[Any]) -> Difference | None:
    first, second = list(sent), list(read)
    others = {_as_key(one): one for one in second}
    for one in first:
        found = difference(one, others.get(_as_key(one), _MISSING))
        if found is not None:
            return found
    return None if len(first) == len(second) else Difference("", sent, read)


def _as_key(value: Any) -> Any:
    """Return what finds an equal value again; not a number equals nothing, so its text does."""
    is_number = isinstance(value, (float, Decimal))
    return str(value) if is_number and value != value else value  # noqa: PLR0124


def _of_others(sent: Any, read: Any) -> Difference | None:
    return None if _is_equal(sent, read) else Difference("", sent, read)


_CONTAINERS: Final[Sequence[tuple[Any, Callable[[Any, Any], Difference | None]]]] = (
    (Mapping, _of_mappings),
    ((list, tuple, deque), _of_sequences),
    ((set, frozenset), _of_sets),
)


def _is_equal(sent: Any, read: Any) -> bool:
    try:
        if sent == read:
            return not isinstance(sent, (datetime, time)) or _has_zone(sent) == _has_zone(read)
        if isinstance(sent, datetime) and isinstance(read, datetime):
            # An hour that comes twice equals nothing in another zone, also at the same moment.
            return _moment(sent) == _moment(read)
    except Exception:  # the border to user code: the user's `==`
        return False
    # Not a number, which equals nothing.
    return (
        type(sent) is type(read) and isinstance(sent, (float, Decimal)) and str(sent) == str(read)
    )


def _has_zone(moment: Any) -> bool:
    return moment.tzinfo is not None


def _moment(moment: datetime) -> tuple[datetime, timedelta | None]:
    return moment.replace(tzinfo=None, fold=0), moment.utcoffset()
