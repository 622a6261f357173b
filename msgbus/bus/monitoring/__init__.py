"""Monitoring: counters, registered handlers, a blocked event loop, endless causation.

Part of `msgbus.bus`, which alone imports it.
"""
