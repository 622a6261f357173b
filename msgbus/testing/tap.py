"""How a recorder sees into a bus: through methods replaced on that one object, for a while.

A bus that nobody records runs its own methods, so all this costs it nothing. Middleware
would not do: it stands inside the middleware added before it, is refused once the bus
runs, and cannot see a handler's own filter fail, nor an event it emitted being refused.

Replaced on the bus are `publish` and `execute`, through which sessions, contexts and
portals go too, and `assemble`, which gives each handler all that belongs around it; on its
core `event_failed`, where every failure of an event handler ends up.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, cast, final

from msgbus.context import current_frame
from msgbus.errors import WrongMessageTypeError
from msgbus.queue import Gated
from msgbus.results import FailedResult

if TYPE_CHECKING:
    from datetime import datetime

    from msgbus.bus import MessageBus
    from msgbus.core import BusCore
    from msgbus.injection import Call
    from msgbus.lanes import Lane
    from msgbus.messages import Command, Event, Message, R
    from msgbus.receipts import PublishReceipt
    from msgbus.registrations import Registration
    from msgbus.results import CommandResult
    from msgbus.session import BusSession
    from msgbus.testing.history import History, Run

_KEY: Final = "_msgbus_tap"


@final
class _Execution:
    """A command on its way from `execute` to its handler."""

    __slots__ = ("command", "runs")

    def __init__(self, command: Command[Any]) -> None:
        self.command = command
        self.runs: list[Run] = []


_execution: Final[ContextVar[_Execution | None]] = ContextVar("msgbus_execution", default=None)


@final
class _Observed:
    """A handler, with everything around it, that tells of each call."""

    __slots__ = ("_handler", "_tap", "call")

    def __init__(self, tap: Tap, handler: str, call: Call) -> None:
        self._tap = tap
        self._handler = handler
        self.call = call

    async def __call__(self, message: Any) -> Any:
        messages = cast("Sequence[Message]", message if isinstance(message, list) else [message])
        frame = current_frame.get()
        owner, attempt = (None, 1) if frame is None else (frame.owner, frame.attempt)
        runs = [
            history.begin(self._handler, owner, messages, attempt)
            for history in self._tap.histories
        ]
        execution = _execution.get()
        if execution is not None and execution.command is message:
            execution.runs = runs
        try:
            value = await self.call(message)
        except BaseException as error:
            for run in runs:
                run.raised(error)
            raise
        for run in runs:
            run.returned()
        return value


@final
class Tap:
    """The replaced methods of one bus, and who listens to them."""

    def __init__(self, bus: MessageBus) -> None:
        core = core_of(bus)
        self._bus = bus
        self._core = core
        self._replaced: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.histories: list[History] = []
        self._publish = bus.publish
        self._execute = bus.execute
        self._assemble = bus.assemble
        self._event_failed = core.event_failed

    def open(self) -> None:
        """Take the places of the methods."""
        mine = {"publish": self.publish, "execute": self.execute, "assemble": self.assemble}
        self._replace(self._bus, {**mine, _KEY: self})
        self._replace(self._core, {"event_failed": self.event_failed})
        for lane in self._core.lanes.values():
            if lane.invoke is not None:
                lane.invoke = _Observed(self, lane.name, lane.invoke)
        self._core.refresh()

    def _replace(self, owner: object, mine: dict[str, Any]) -> None:
        attributes = vars(owner)
        self._replaced.append((attributes, {name: attributes.get(name) for name in mine}))
        attributes.update(mine)

    def close(self) -> None:
        """Give the places back, to a fake of the test's own if there was one."""
        for attributes, before in self._replaced:
            for name, value in before.items():
                attributes.pop(name, None)
                if value is not None:
                    attributes[name] = value
        for lane in self._core.lanes.values():
            if isinstance(lane.invoke, _Observed):
                lane.invoke = lane.invoke.call
        self._core.refresh()

    def queued(self) -> list[Event]:
        """The events that wait for a handler now."""
        return [
            item.event if isinstance(item, Gated) else item
            for lane in self._core.lanes.values()
            for item in lane.queue.items
        ]

    # -- in the places of the bus's own ----------------------------------------------------------

    async def publish(
        self,
        event: Event,
        *,
        headers: Mapping[str, str] | None = None,
        topic: str | None = None,
        delay: float | None = None,
        at: datetime | None = None,
    ) -> PublishReceipt:
        """`MessageBus.publish`, told of."""
        told = [(history, history.publishing(event)) for history in self.histories]
        try:
            receipt = await self._publish(event, headers=headers, topic=topic, delay=delay, at=at)
        except BaseException as error:
            for history, publishing in told:
                if isinstance(error, Exception) and not isinstance(error, WrongMessageTypeError):
                    history.refused(publishing, error)
                else:
                    history.withdrawn(publishing)
            raise
        due: float | None = None
        if receipt.cancel is not None:
            clock = self._bus.clock
            wait = at.timestamp() - clock.time() if at is not None else delay or 0.0
            due = clock.now() + wait
        for history, publishing in told:
            receipt = history.published(publishing, receipt, due)
        return receipt

    async def execute(
        self,
        command: Command[R],
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> CommandResult[R]:
        """`MessageBus.execute`, told of."""
        execution = _Execution(command)
        token = _execution.set(execution)
        try:
            result = await self._execute(command, timeout=timeout, headers=headers)
        except BaseException as error:
            for run in execution.runs:
                run.raised(error)
            raise
        finally:
            _execution.reset(token)
        if isinstance(result, FailedResult):
            # Not by the property, which would count as somebody having looked.
            reason = result.peek_exception()
            for run in execution.runs:
                run.failed(reason)
        return result

    def assemble(
        self, registration: Registration, call: Call, session: BusSession | None = None
    ) -> Call:
        """`MessageBus.assemble`, with the observation outside of all."""
        return _Observed(self, registration.name, self._assemble(registration, call, session))

    def event_failed(self, lane: Lane, message: Any, error: BaseException) -> None:
        """`BusCore.event_failed`, told of."""
        for history in self.histories:
            history.event_failed(lane.name, lane, message, error)
        self._event_failed(lane, message, error)


def core_of(bus: MessageBus) -> BusCore:
    """The inside of a bus."""
    return bus._core  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


@contextmanager
def listening(bus: MessageBus, history: History) -> Generator[None]:
    """Tell `history` of everything that goes through `bus`. Several may listen at once."""
    tap: Tap | None = vars(bus).get(_KEY)
    if tap is None:
        tap = Tap(bus)
        tap.open()
    history.skip(tap.queued())
    tap.histories.append(history)
    try:
        yield
    finally:
        tap.histories.remove(history)
        history.end()
        if not tap.histories:
            tap.close()


async def workers_at_rest(bus: MessageBus) -> None:
    """Wait until no worker of a running bus is in the middle of a turn.

    A worker keeps the handler it began its turn with, and would tell nobody of the events
    that are still to come in it. Where somebody listens already there is nothing to wait for.

    Raises:
        InsideHandlerError: Called by a handler, which would wait for itself.
    """
    if _KEY in vars(bus):
        return
    core = core_of(bus)
    core.refuse_inside_handler("record(bus)")

    def in_turn() -> list[Lane]:
        return [
            lane for lane in core.lanes.values() if len(lane.queue.sleepers) < len(lane.workers)
        ]

    await core.settle(in_turn, None, commands=False)
