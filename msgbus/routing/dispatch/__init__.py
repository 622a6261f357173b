"""The dispatch engine: route envelopes by topic, category and type to dispatchers.

Public through `msgbus.routing`.
"""
