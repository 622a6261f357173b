"""Middleware: what wraps every handler call, one class per file."""
