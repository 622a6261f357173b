"""Clock, event loop, threads, timeouts, token bucket, resources and argument checks.

Knows nothing of messages. Imports `msgbus.errors` only; everything above may import it.
"""
