"""Durable subscriptions: named places in a journal, with who is given what, and what was done.

`DurableSubscription` is the whole; `SubscriptionEngine` and `Dispatcher` are its two halves.
Nothing here knows of buses or message classes: records go in, acks come out.
"""

from msgbus.bus.subscription import Subscription
from msgbus.handlers.delivery import Delivery, Mode, Poison, StartAt
from msgbus.subscriptions.config import RetryTiers, SubscriptionConfig
from msgbus.subscriptions.dispatcher import Consumer, Deliver, Dispatcher
from msgbus.subscriptions.engine import SubscriptionEngine
from msgbus.subscriptions.progress import Counts, Progress, Standing
from msgbus.subscriptions.subscription import DurableSubscription
from msgbus.subscriptions.tiers import tiers_of

__all__ = [
    "Consumer",
    "Counts",
    "Deliver",
    "Delivery",
    "Dispatcher",
    "DurableSubscription",
    "Mode",
    "Poison",
    "Progress",
    "RetryTiers",
    "Standing",
    "StartAt",
    "Subscription",
    "SubscriptionConfig",
    "SubscriptionEngine",
    "tiers_of",
]
