"""Simulated runs of durable subscriptions: crashes, ended members and failures, from a seed.

Imported by tests only.
"""
