"""Durable subscriptions: deliver the messages of a journal, and write how that ended.

A state (`PartitionedState`, `SharedState`) decides what to hand out and what to write, a
`SubscriptionLoop` runs the deliveries, and a `Membership` shares the work with other processes.
Records go in; message classes and the bus are not known here.
"""
