"""`python -m msgbus.demo`."""

from __future__ import annotations

import sys

from msgbus.demo.app import main
from msgbus.errors import MissingExtraError

if __name__ == "__main__":
    try:
        sys.exit(main())
    except MissingExtraError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
