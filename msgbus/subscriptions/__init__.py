"""Durable subscriptions: deliver the messages of a journal, and write how that ended.

A state (`PartitionedState`, `SharedState`) decides what to hand out and what to write, a
`SubscriptionLoop` runs the deliveries, and a `Membership` shares the work with other processes.
Records go in; message classes and the bus are not known here.
"""

from msgbus.bus.subscription import Subscription
from msgbus.handlers.delivery import Delivery, Mode, Poison, StartAt, SubscriptionTuning
from msgbus.subscriptions.config import SubscriptionConfig
from msgbus.subscriptions.dispatcher import Consume, Consumer, Dispatcher
from msgbus.subscriptions.engine import DurableSubscription, SubscriptionEngine
from msgbus.subscriptions.progress import Progress, Standing
from msgbus.subscriptions.state import DeliveryCounts

__all__ = [
    "Consume",
    "Consumer",
    "Delivery",
    "DeliveryCounts",
    "Dispatcher",
    "DurableSubscription",
    "Mode",
    "Poison",
    "Progress",
    "Standing",
    "StartAt",
    "Subscription",
    "SubscriptionConfig",
    "SubscriptionEngine",
    "SubscriptionTuning",
]
