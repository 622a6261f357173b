"""Endpoints, their health, balancing and delivery, and requests with replies.

Public through `msgbus.routing`.
"""
