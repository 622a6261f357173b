"""Options of the data source, parsed and checked before anything is read or written."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote

from msgbus.errors import PipelineOptionError
from msgbus.journal.codec import PayloadCodec
from msgbus.journal.sqlite.files import MEMORY, parse_url
from msgbus.pipeline.import_string import import_string
from msgbus.pipeline.source.tables import MESSAGES, Table, table_of

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)

# Spark passes its own options along.
SPARKS_OWN: Final = frozenset({"checkpointlocation", "path", "queryname", "outputmode"})


def microseconds(moment: datetime) -> int:
    """Microseconds since the epoch; a time without a zone counts as UTC."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // _MICROSECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options of a batch or stream read."""

    path: str
    """Absolute path of the journal's file."""
    table: Table = MESSAGES
    start: int | None = None
    """The first offset, or the first id of a delivery."""
    end: int | None = None
    """The offset or id to end before."""
    sealed: int | None = None
    """The last offset that a lake holds: it is an error if the journal was trimmed beyond it."""
    since: int | None = None
    """The first time, in microseconds since the epoch."""
    until: int | None = None
    """The time to end before."""
    where: Mapping[str, Any] | None = None
    """Values that columns must have, as JSON: `{"name": ["shop.OrderPlaced"]}`."""
    partitions: int | None = None
    """Into how many ranges to split a read; by default by the number of rows."""
    batch_rows: int | None = None
    """Rows per Arrow batch; by default by their size."""
    codec: str | None = None
    """Where the codec of the payloads is: `module:name`."""
    engine: str = "auto"
    """What reads the file: "adbc", "sqlite3", or "auto" for the faster one installed."""
    starting_offsets: str | int = "earliest"
    """Where a new stream begins: "earliest", "latest" or an offset."""
    max_rows: int | None = None
    """Rows per micro-batch of a stream, at most."""
    fail_on_data_loss: bool = True
    """Whether a stream fails if messages were trimmed before it read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options of a write."""

    path: str
    """Absolute path of the journal's file; created if missing."""
    name: str | None = None
    """Wire name of rows that have no column `name`."""
    job: str | None = None
    """Name of a batch write: a second one of the same name writes nothing."""
    staging: str = ""
    """Folder for staged rows; by default beside the journal."""
    codec: str | None = None
    """Where the codec of the journal's payloads is: `module:name`."""
    checkpoint: str | None = None
    """Checkpoint of the stream; the id of its query is read from there."""


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """Parse the options of a read.

    Raises:
        PipelineOptionError: One is unknown, missing or wrong.
    """
    return ReadOptions(**_parsed(options, _READ))


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Parse the options of a write.

    Raises:
        PipelineOptionError: One is unknown, missing or wrong.
    """
    values = _parsed(options, _WRITE)
    values["checkpoint"] = options.get("checkpointLocation")
    values["staging"] = values.get("staging") or f"{values['path']}.staging"
    return WriteOptions(**values)


def journal_path(url: str) -> str:
    """The absolute path of the file that a URL names.

    Raises:
        PipelineOptionError: It names no SQLite file.
        JournalOpenError: It is no URL of a journal.
    """
    scheme, colon, rest = url.partition(":")
    if colon and rest.startswith("/") and scheme != "sqlite":
        message = f"The pipeline reads SQLite journals, not {url!r}. Write sqlite:///shop.db."
        raise PipelineOptionError(message, option="url")
    path, _ = parse_url(url)
    if path == MEMORY or url.rstrip("/") == "memory:":
        message = (
            f"{url!r} is in the memory of one process, and Spark runs in others. "
            f"Keep the journal in a file: sqlite:///shop.db."
        )
        raise PipelineOptionError(message, option="url")
    return str(Path(path).absolute())


def payload_codec(codec: str | None) -> PayloadCodec | None:
    """Import a payload codec from `module:name`.

    Raises:
        PipelineOptionError: There is none.
    """
    if codec is None:
        return None
    found = import_string(codec, option="codec")
    if not (hasattr(found, "encode") and hasattr(found, "decode")) or isinstance(found, type):
        message = f"{codec} is no codec: name an object with encode and decode, as module:name."
        raise PipelineOptionError(message, option="codec")
    return cast("PayloadCodec", found)


def file_uri(path: str) -> str:
    """The URI that SQLite opens read-only."""
    return f"file:{quote(path)}?mode=ro"


def _parsed(options: Mapping[str, str], known: Mapping[str, _Option]) -> dict[str, Any]:
    given = {key.lower(): str(value) for key, value in options.items()}
    _check_names(given, known)
    url = given.get("url") or given.get("path")
    if not url:
        message = "Say which journal: .option('url', 'sqlite:///shop.db')."
        raise PipelineOptionError(message, option="url")
    values: dict[str, Any] = {"path": journal_path(url)}
    for name, (field, parse) in known.items():
        text = given.get(name.lower())
        if text is not None and field:
            values[field] = parse(name, text)
    return values


def _check_names(given: Mapping[str, str], known: Mapping[str, _Option]) -> None:
    names = {name.lower(): name for name in known}
    for option in given:
        if option in names or option in SPARKS_OWN:
            continue
        close = difflib.get_close_matches(option, names, 1)
        hint = f" Do you mean {names[close[0]]!r}?" if close else ""
        message = (
            f"The data source 'msgbus' has no option {option!r}.{hint} "
            f"It has: {', '.join(sorted(known))}."
        )
        raise PipelineOptionError(message, option=option)


# -- values --------------------------------------------------------------------------------


def _wrong(name: str, text: str, wanted: str) -> PipelineOptionError:
    return PipelineOptionError(f"The option {name!r} is {text!r}; write {wanted}.", option=name)


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _wrong(name, text, "a whole number") from None


def _count(name: str, text: str) -> int:
    number = _number(name, text)
    if number < 1:
        raise _wrong(name, text, "a whole number of at least 1")
    return number


def _moment(name: str, text: str) -> int:
    try:
        return (
            int(text) if text.lstrip("-").isdigit() else microseconds(datetime.fromisoformat(text))
        )
    except ValueError:
        wanted = "a time such as 2026-01-31T12:00:00Z, or microseconds since the epoch"
        raise _wrong(name, text, wanted) from None


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise _wrong(name, text, "true or false")
    return text.lower() == "true"


def _where(name: str, text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _wrong(name, text, """JSON such as {"name": ["shop.OrderPlaced"]}""")
    return cast("dict[str, Any]", found)


def _choice(*choices: str) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text.lower() not in choices:
            raise _wrong(name, text, " or ".join(choices))
        return text.lower()

    return parse


def _starting(name: str, text: str) -> str | int:
    if text.lower() in ("earliest", "latest"):
        return text.lower()
    try:
        return int(text)
    except ValueError:
        raise _wrong(name, text, "earliest, latest or an offset") from None


def _text(_: str, text: str) -> str:
    return text


def _folder(_: str, text: str) -> str:
    return os.path.abspath(text.removeprefix("file://"))  # noqa: PTH100 (may not exist yet)


def _table(_: str, text: str) -> Table:
    return table_of(text)


_Option = tuple[str, Callable[[str, str], Any]]

_READ: Final[Mapping[str, _Option]] = {
    "url": ("", _text),
    "table": ("table", _table),
    "start": ("start", _number),
    "end": ("end", _number),
    "sealed": ("sealed", _number),
    "since": ("since", _moment),
    "until": ("until", _moment),
    "where": ("where", _where),
    "partitions": ("partitions", _count),
    "batchRows": ("batch_rows", _count),
    "codec": ("codec", _text),
    "engine": ("engine", _choice("auto", "adbc", "sqlite3")),
    "startingOffsets": ("starting_offsets", _starting),
    "maxRowsPerBatch": ("max_rows", _count),
    "failOnDataLoss": ("fail_on_data_loss", _flag),
}

_WRITE: Final[Mapping[str, _Option]] = {
    "url": ("", _text),
    "name": ("name", _text),
    "job": ("job", _text),
    "staging": ("staging", _folder),
    "codec": ("codec", _text),
}
