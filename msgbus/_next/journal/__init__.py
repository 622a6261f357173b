"""The journal: a log of messages, and what each subscription has done with them.

`ports` has the protocols that an engine implements, `records` and `operations` the values they
exchange. Imported by subscriptions, the bus and the pipeline; knows none of them.
"""
