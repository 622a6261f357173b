"""`open_journal`: from a URL to an open journal."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from msgbus.errors import JournalOpenError
from msgbus.journal.memory import MemoryJournal
from msgbus.journal.options import parse_options, seconds
from msgbus.journal.ports import Journal
from msgbus.journal.sqlite.journal import SqliteJournal

if TYPE_CHECKING:
    from msgbus.journal.codec import PayloadCodec
    from msgbus.runtime.clock import Clock


def open_journal(
    url: str, *, clock: Clock | None = None, codec: PayloadCodec | None = None
) -> Journal:
    """Open the journal that a URL names: `sqlite:///shop.db`, `sqlite:///:memory:` or `memory:`.

    Options may follow, as in `sqlite:///shop.db?max_age=86400` or `memory:?member_ttl=2`.

    Args:
        url: Where it is.
        clock: Time for waiting, and the age of messages.
        codec: Encrypts or signs what is stored; a journal in memory needs none.

    Raises:
        JournalOpenError: There is no such journal, or it cannot be opened.
    """
    if url.startswith("sqlite:"):
        return SqliteJournal(url, clock=clock, codec=codec)
    place, _, query = url.partition("?")
    if place.rstrip("/") == "memory:":
        options = parse_options(dict(parse_qsl(query)), {"member_ttl": seconds}, url)
        return MemoryJournal(clock=clock, **options)
    message = (
        f"{url!r} is no journal that msgbus knows. Write sqlite:///shop.db for a file, "
        f"or memory: for one that ends with the process."
    )
    raise JournalOpenError(message)
