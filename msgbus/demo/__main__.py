"""`python -m msgbus.demo`."""

from __future__ import annotations

import sys

from msgbus.demo.app import main
from msgbus.demo.durable.folder import DemoError
from msgbus.errors import MsgBusError

if __name__ == "__main__":
    try:
        sys.exit(main())
    except (DemoError, MsgBusError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
