"""`record(bus)`: every message of a bus with its outcome, for assertions in tests.

Imported through `msgbus.testing`.
"""
