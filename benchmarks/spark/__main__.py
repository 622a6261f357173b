"""`python -m benchmarks.spark`."""

from __future__ import annotations

import sys

from benchmarks.spark.runner import main

if __name__ == "__main__":
    sys.exit(main())
