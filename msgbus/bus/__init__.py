"""The bus: commands, events, sessions, and the life of a process that uses them.

May import everything below `testing`; `testing`, `pipeline` and the tools above may import it.
"""
