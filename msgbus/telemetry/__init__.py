"""Counters, metrics, logs and tracebacks, with secrets removed.

Knows nothing of messages or buses. Imports `runtime` and `errors`; everything above may import it.
"""
