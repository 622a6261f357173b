"""Lanes: a bounded queue and its workers, for each event handler.

Part of `msgbus.bus`, which alone imports it.
"""
