"""What the checks of dead-letter stores are made of."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from msgbus.messages.message import Event, set_meta
from msgbus.messages.metadata import Metadata
from msgbus.resilience.claims import Claim
from msgbus.resilience.letters import DeadLetterEntry, letter_about
from msgbus.resilience.stores import ANY, DeadLetterStore, LetterFilter, Record, claimed

E = TypeVar("E", bound=BaseException)


class MakeStore(Protocol):
    """Makes a new store with no letters in it."""

    def __call__(self, **options: Any) -> DeadLetterStore:
        """With `max_size` and `overflow`, if given."""
        ...


Check: TypeAlias = Callable[[MakeStore], Awaitable[None]]

MONDAY: Final = datetime(2026, 3, 2, 9, tzinfo=UTC)


class Checked(Event, name="msgbus.testing.Checked", version=3):
    """What the letters of the checks are about."""

    number: int = 0


class AlsoChecked(Event, name="msgbus.testing.AlsoChecked"):
    """Another type."""


def letter(
    number: int = 0,
    *,
    message: Event | None = None,
    handler: str = "handler",
    error: Exception | None = None,
    attempts: int = 3,
    minute: int = 0,
    answered: bool = False,
    session_id: str | None = None,
    scope: str | None = None,
    target: str = "msgbus.testing.Checked",
) -> DeadLetterEntry:
    """A new letter about a new message, unless one is given."""
    if message is None:
        message = Checked(number=number)
    meta = Metadata(session_id=session_id, headers={"tenant": "acme"}, topic="a.topic")
    if message.headers != {"tenant": "acme"}:
        set_meta(message, meta)
    died = MONDAY + timedelta(minutes=minute, microseconds=123_457)
    return letter_about(
        message,
        handler=handler,
        error=ConnectionError("down") if error is None else error,
        attempts=attempts,
        first_attempt=died - timedelta(seconds=30),
        last_attempt=died,
        reason="retries exhausted",
        answered=answered,
        scope=scope,
        target=target,
    )


@asynccontextmanager
async def opened(make: MakeStore, **options: Any) -> AsyncGenerator[DeadLetterStore]:
    """A new store, closed at the end."""
    store = make(**options)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def add(store: DeadLetterStore, *letters: DeadLetterEntry) -> None:
    """Add letters, and wait until they are kept."""
    for one in letters:
        assert store.add(one) is None
    await store.flush()


async def everything(
    store: DeadLetterStore, which: LetterFilter = ANY, limit: int = 2
) -> list[DeadLetterEntry]:
    """All letters that fit, fetched by pages of `limit`."""
    found: list[DeadLetterEntry] = []
    cursor: str | None = None
    while True:
        page = await store.page(which, after=cursor, limit=limit)
        assert len(page.letters) <= limit
        found += page.letters
        cursor = page.cursor
        if cursor is None:
            return found


def claim(entry: DeadLetterEntry, owner: str, now: float = 0.0) -> Callable[[Record], Record]:
    """The step by which an owner claims a letter."""
    return lambda record: claimed(record, Claim(entry.letter_id, owner, now))


ELSEWHERE: Final = "another machine|1|1|x"
"""An owner that cannot be looked at: its claims hold for as long as their lease."""


async def raises(kind: type[E], work: Awaitable[object]) -> E:
    """The error of this kind that `work` must raise."""
    try:
        await work
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")
