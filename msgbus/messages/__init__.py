"""Messages: classes, metadata, topics, results, receipts, upcasters, system events.

May import `telemetry`, `runtime` and `errors`; everything above may import it.
"""
