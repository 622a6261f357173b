"""Simulated runs of durable subscriptions: crashes, lost leases and failures, from a seed.

Imported by tests only.
"""
