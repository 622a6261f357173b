"""Export and import of dead letters: JSON lines, one letter a line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any, Final, TextIO, TypeAlias, cast, final

import anyio.to_thread

from msgbus.errors import DeadLetterError
from msgbus.resilience.dead_letters.entry import DeadLetterEntry, LetterStatus, from_data
from msgbus.resilience.dead_letters.filters import LetterFilter
from msgbus.resilience.dead_letters.store import DeadLetterStore
from msgbus.runtime.private_files import open_private, permissions_of
from msgbus.telemetry.redaction import redact_exception

Destination: TypeAlias = "str | os.PathLike[str] | TextIO"

_PAGE: Final = 500


@final
@dataclass(frozen=True, slots=True)
class ImportReport:
    """Result of an import."""

    imported: int
    known: int
    """Letters that were there already, and were left as they are."""


async def write_letters(
    store: DeadLetterStore, which: LetterFilter, destination: Destination
) -> int:
    """Write all letters that fit; return how many.

    A path gets its file only once that is complete: what was there before stays till then. It has
    the permissions of that, or of the file that the letters are in.
    """
    if not isinstance(destination, (str, os.PathLike)):
        return await _write(store, which, destination)
    path = Path(destination)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        permissions = permissions_of(path, getattr(store, "file", None))
        part.unlink(missing_ok=True)
        file = await anyio.to_thread.run_sync(
            partial(open_private, part, "x", permissions, encoding="utf-8")
        )
    except OSError as error:
        raise DeadLetterError(f"{path} cannot be written: {error.strerror}.") from error
    try:
        with file:
            number = await _write(store, which, file)
        await anyio.to_thread.run_sync(part.replace, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return number


async def _write(store: DeadLetterStore, which: LetterFilter, file: IO[str]) -> int:
    number, cursor = 0, None
    # A letter of a durable handler moves to the end when it is dealt with.
    which = replace(which, upto=await store.head())
    while True:
        page = (await store.page(which, after=cursor, limit=_PAGE)).whole()
        lines = [json.dumps(letter.data(), ensure_ascii=False) + "\n" for letter in page.letters]
        await anyio.to_thread.run_sync(file.writelines, lines)
        number += len(lines)
        cursor = page.cursor
        if cursor is None:
            return number


async def read_letters(store: DeadLetterStore, source: Destination) -> ImportReport:
    """Add all letters of a file whose ids are new, or none if a line cannot be read."""
    letters = await anyio.to_thread.run_sync(_read, source)
    imported = await store.put(letters)
    return ImportReport(imported=imported, known=len(letters) - imported)


def _read(source: Destination) -> Sequence[DeadLetterEntry]:
    if not isinstance(source, (str, os.PathLike)):
        return _parsed(source, str(getattr(source, "name", "the file")))
    path = Path(source)
    try:
        with path.open("rb") as file:
            return _parsed(file, str(path))
    except OSError as error:
        raise DeadLetterError(f"{path} cannot be read: {error.strerror}.") from error


def _parsed(lines: Iterable[str | bytes], name: str) -> list[DeadLetterEntry]:
    """Return all letters; each is checked before any is taken."""
    letters: dict[str, DeadLetterEntry] = {}
    rest = iter(lines)
    for number in count(1):
        try:
            line = next(rest, None)
            if line is None:
                break
            letter = _letter(line if isinstance(line, str) else line.decode())
        except (ValueError, RecursionError, DeadLetterError) as error:
            problem = _reason(error).rstrip(".")
            raise DeadLetterError(
                f"Line {number} of {name} is no dead letter: {problem}. Nothing was imported."
            ) from error
        if letter is None:
            continue
        if letter.status is LetterStatus.REPLAYING:
            # Whoever replays it there does not do so here.
            letter = replace(letter, status=LetterStatus.DEAD)
        letters[letter.letter_id] = letter
    return list(letters.values())


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, DeadLetterError) else redact_exception(error)


def _letter(line: str) -> DeadLetterEntry | None:
    if not line.strip():
        return None
    data: object = json.loads(line)
    if not isinstance(data, dict):
        raise DeadLetterError("A letter is a JSON object.")
    return from_data(cast("dict[str, Any]", data))
