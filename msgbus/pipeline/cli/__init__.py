"""The command line of the pipeline: `python -m msgbus.pipeline`.

Imported by `__main__` alone; imports pyspark only when a command needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from msgbus.pipeline.cli.faults import explain
from msgbus.pipeline.cli.options import parse

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code."""
    options = parse(arguments)
    try:
        code: int = options.run(options)
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        return 130
    except Exception as error:  # users get one text, not a traceback
        failure = explain(error)
        sys.stderr.write(f"{failure.text}\n")
        return failure.code
    return code
