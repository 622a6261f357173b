"""`python -m benchmarks`."""

from __future__ import annotations

import logging
import sys

from benchmarks.runner import main

if __name__ == "__main__":
    # Some handlers fail on purpose, and are tried again: that is measured, not looked at.
    logging.getLogger("msgbus").setLevel(logging.ERROR)
    sys.exit(main())
