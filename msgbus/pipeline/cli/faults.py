"""Errors as a text with the fix, and an exit code."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from msgbus.errors import (
    ConfigurationError,
    JavaNotFoundError,
    JournalError,
    MissingExtraError,
    MsgBusError,
    PipelineOptionError,
    ProjectionError,
)
from msgbus.pipeline.tracebacks import what_happened

FAILED: Final = 1
USAGE: Final = 2
JAVA: Final = 3
EXTRA: Final = 4
JOURNAL: Final = 5
WORKER: Final = 6
MASTER: Final = 7

CODES: Final = """\
exit codes:
  0  done
  1  the work failed; the text says why
  2  wrong usage: an option, a projection, a handler
  3  no Java that Spark can run on
  4  a package is missing: pip install "msgbus[spark]"
  5  the journal cannot be read: not found, no journal, or of another version
  6  a worker cannot import msgbus, or a module of yours
  7  the master cannot be reached"""


class CommandFailure(NamedTuple):
    """The text and exit code of an error."""

    code: int
    text: str


def explain(error: BaseException) -> CommandFailure:
    """The text to print, and the exit code."""
    if isinstance(error, MsgBusError):
        return CommandFailure(_code(error), str(error))
    text = str(error)
    missing = re.findall(r"ModuleNotFoundError: No module named '([^']+)'", text)
    if missing:
        return CommandFailure(WORKER, _cannot_import(missing[-1]))
    if "JAVA_GATEWAY_EXITED" in text:
        return CommandFailure(
            JAVA, f"Java did not start. {what_happened(text)} See what `doctor` says."
        )
    if re.search(r"[Mm]asters are unresponsive|Could not parse Master URL|Failed to connect", text):
        return CommandFailure(
            MASTER,
            f"Spark's master cannot be reached. {what_happened(text)} Check --master, that it "
            f"runs, and that it has the same version of Spark as pyspark here.",
        )
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("pyspark"):
        return CommandFailure(EXTRA, str(MissingExtraError("pyspark", extra="spark")))
    found = what_happened(text)
    # An error of a worker has a name; that of Spark's error around it says nothing.
    is_named = "Traceback (most recent call last)" in text
    return CommandFailure(FAILED, found if is_named else f"{type(error).__name__}: {found}")


def _code(error: MsgBusError) -> int:
    for kind, code in _KINDS.items():
        if isinstance(error, kind):
            return code
    return FAILED


_KINDS: Final[dict[type[MsgBusError], int]] = {
    JavaNotFoundError: JAVA,
    MissingExtraError: EXTRA,
    JournalError: JOURNAL,
    PipelineOptionError: USAGE,
    ProjectionError: USAGE,
    ConfigurationError: USAGE,
}


def _cannot_import(module: str) -> str:
    if module.partition(".")[0] == "msgbus":
        return (
            "A worker cannot import msgbus. Install it where the workers run, with the same "
            'version of Python: pip install "msgbus[spark]"; or point PYSPARK_PYTHON to a Python '
            "that has it."
        )
    return (
        f"A worker cannot import {module!r}. Modules of yours must be installed where the workers "
        f"run, or be sent along: --conf spark.submit.pyFiles=shop.py, or run from the folder that "
        f"they are in."
    )
