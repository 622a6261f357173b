"""Conformance suites: tests that every journal and every dead-letter store must pass.

Imported by tests only.
"""
