"""Refuse a new, unnamed durable handler where it may be a renamed one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgbus.errors import ConfigurationError, Fault
from msgbus.subscriptions.members import is_gone, this_process

if TYPE_CHECKING:
    from msgbus.bus.durable.handlers import DurableHandler
    from msgbus.journal.ports import Journal


async def refuse_renamed(journal: Journal, handlers: Iterable[DurableHandler]) -> None:
    """Raise if a handler would repeat the history of a subscription that nobody attends.

    Raises:
        ConfigurationError: One is new, has no name and no start of its own, and the journal has a
            subscription for the same messages without a handler here or in another process.
    """
    asked = {handler.name: handler.registration for handler in handlers}
    stored = {cursor.name: cursor.selection for cursor in await journal.cursors()}
    new = {
        name: registration
        for name, registration in asked.items()
        if name not in stored
        and not isinstance(registration.durable, str)
        and "start" not in (registration.subscription or {})
    }
    if not new:
        return
    here, attended = this_process(), set(asked)
    for member in await journal.members():
        if not is_gone(member.process, here):
            attended.update(member.serves)
    faults: list[Fault] = []
    for name, registration in new.items():
        for other, selection in stored.items():
            _, _, target = selection.partition(" ")  # behind the mode
            if other not in attended and target == registration.target_key:
                faults.append(_fault(name, other))
    if faults:
        raise ConfigurationError(faults=faults)


def _fault(name: str, other: str) -> Fault:
    problem = (
        f"is new in the journal and would get its whole history, while nobody attends {other!r}, "
        f"which is for the same messages. Was the handler renamed?"
    )
    fix = (
        f"If so, continue with durable={other!r}. If not, say where the new one begins, such as "
        f"start=StartAt.LATEST. Or remove the old one: await journal.commit([Remove({other!r})])."
    )
    return Fault(name, problem, fix)
