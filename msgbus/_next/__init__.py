"""The durable part, rewritten: a log, subscriptions, members, one table of pending messages.

It grows here beside the old one and takes the place of `msgbus.journal`, `msgbus.subscriptions`
and `msgbus.durability` in one step, when it passes their tests. Nothing imports it before.
"""
