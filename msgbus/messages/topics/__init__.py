"""Topic patterns, matching, and the router that finds the routes of a topic.

Public through `msgbus.routing`. May import `msgbus.errors` and `msgbus.runtime` only.
"""
