"""`python -m msgbus.pipeline`: reports, exports, replays and streams from the command line."""

from __future__ import annotations

import sys

from msgbus.pipeline.cli import main

if __name__ == "__main__":
    sys.exit(main())
