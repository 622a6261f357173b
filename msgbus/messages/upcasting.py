"""Upcasters: functions that convert old payloads to the current version of a class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from msgbus.errors import ConfigurationError
from msgbus.messages.message import Message

Upcaster: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
F = TypeVar("F", bound=Upcaster)

_upcasters: Final[WeakKeyDictionary[type[Message], dict[int, Upcaster]]] = WeakKeyDictionary()


def upcasts(message_type: type[Message], *, from_version: int) -> Callable[[F], F]:
    """Register a function that converts fields of `from_version` to the next version.

    It takes and returns plain JSON data. Upcasters are chained: a message of version 1 read
    by a class of version 3 passes through those of 1 and of 2.

    Raises:
        ConfigurationError: There is one already, or the class has no later version.
    """
    wire = message_type.__wire__
    known = _upcasters.setdefault(message_type, {})
    if not 1 <= from_version < wire.version:
        message = (
            f"{message_type.__name__} is at version {wire.version}, so an upcaster from version "
            f"{from_version} would never run. Raise version= on the class first."
        )
        raise ConfigurationError(message)
    if from_version in known:
        message = (
            f"{message_type.__name__} already has an upcaster from version {from_version}: "
            f"{getattr(known[from_version], '__qualname__', known[from_version])}. Remove one."
        )
        raise ConfigurationError(message)

    def register(function: F) -> F:
        known[from_version] = function
        return function

    return register


def missing_upcasters(message_type: type[Message], version: int) -> list[int]:
    """List the versions from `version` to the current one that have no upcaster."""
    known = _upcasters.get(message_type, {})
    return [step for step in range(version, message_type.__wire__.version) if step not in known]


def upcast(message_type: type[Message], data: dict[str, Any], version: int) -> dict[str, Any]:
    """Convert `data` from `version` to the current version; all upcasters must exist."""
    known = _upcasters.get(message_type, {})
    for step in range(version, message_type.__wire__.version):
        data = known[step](data)
    return data


def upcasters_of(message_type: type[Message]) -> dict[int, Upcaster]:
    """Return the upcasters of a class by the version they convert from."""
    return dict(_upcasters.get(message_type, {}))


def restore_upcasters(message_type: type[Message], known: Mapping[int, Upcaster]) -> None:
    """Register upcasters that `upcasters_of` returned in another process."""
    own = _upcasters.setdefault(message_type, {})
    for version, function in known.items():
        own.setdefault(version, function)
