"""Helpers for testing code that uses a bus."""
