"""The command line of the pipeline. Nothing here imports pyspark before a command needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from msgbus.pipeline.cli.faults import explain
from msgbus.pipeline.cli.options import parse

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code says how it went."""
    options = parse(arguments)
    try:
        code: int = options.run(options)
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        return 130
    except Exception as error:  # the border: whatever it is, people get one clear text
        fault = explain(error)
        sys.stderr.write(f"{fault.text}\n")
        return fault.code
    return code
