"""What a bus is to those who only use one, and whether an object has what a protocol asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from typing_extensions import get_protocol_members

from msgbus.bus.protocols import SendingMethods
from msgbus.errors import ConfigurationError

if TYPE_CHECKING:
    from msgbus.bus.monitoring.handler_info import HandlerInfo
    from msgbus.bus.session import BusSession
    from msgbus.handlers.filters import FilterLike
    from msgbus.handlers.registry import HandlerRegistry
    from msgbus.messages.message import Message
    from msgbus.messages.receipts import DrainReport
    from msgbus.middleware.chain import Middleware, Per
    from msgbus.telemetry.stats import BusStats


_NAMED: Final = 5
"""Missing members that an error names; the rest is counted."""


def missing_members(given: object, protocol: type) -> list[str]:
    """The members of a protocol that an object lacks, in the order of the alphabet.

    Unlike `isinstance`, this finds what a proxy passes on by `__getattr__`. Methods for `with`
    and the like are left out: Python looks for them on the class, and msgbus calls none of them.
    """
    members = sorted(get_protocol_members(protocol))
    return [name for name in members if name[:2] != "__" and not hasattr(given, name)]


def require_members(given: object, protocol: type, name: str, fix: str) -> None:
    """Raise unless an object, given as `name`, has all members of a protocol.

    Raises:
        ConfigurationError: It lacks some; they are named, and `fix` follows.
    """
    missing = missing_members(given, protocol)
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        message = f"{name} is {given!r:.60}, which lacks {', '.join(missing[:_NAMED])}{more}. {fix}"
        raise ConfigurationError(message)


class IMessageBus(SendingMethods, Protocol):
    """The calls that application code makes. `MessageBus` satisfies it."""

    async def start(self) -> None:
        """Begin to deliver."""
        ...

    async def stop(self, timeout: float | None = 30.0) -> DrainReport:
        """Finish what is queued and stop."""
        ...

    def register_command_handler(self, command_type: Any, handler: Any) -> None:
        """Make `handler` the one handler of a command."""
        ...

    def register_event_handler(self, event_type: Any, handler: Any) -> Any:
        """Have `handler` called for every such event."""
        ...

    def handlers(self) -> Sequence[HandlerInfo]:
        """All handlers of the bus, then those of each live session."""
        ...

    @property
    def sessions(self) -> Mapping[str, BusSession]:
        """The live sessions, by id."""
        ...

    def session(
        self,
        session_id: str | None = None,
        *,
        registries: Sequence[HandlerRegistry] = (),
        provide: Mapping[Any, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> BusSession:
        """A scope for one job: `async with bus.session("job-1") as session:`."""
        ...

    def add_filter(self, filter: FilterLike) -> None:
        """Let only events through that pass this filter too."""
        ...

    def add_middleware(
        self,
        middleware: Middleware,
        *,
        types: type[Message] | Sequence[type[Message]] | None = None,
        per: Per = "attempt",
    ) -> None:
        """Put `middleware` around every handler, inside of those added before."""
        ...

    async def settled(self, timeout: float | None = None) -> None:
        """Wait until nothing is left to do."""
        ...

    def stats(self) -> BusStats:
        """All counters at this moment."""
        ...
