"""Handlers: registration, lookup, signatures, filters and dependency injection.

May import `messages` and what is below it; everything above may import it.
"""
