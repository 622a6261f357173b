"""What type checkers must understand of the public API, with no plugin."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, assert_type
from uuid import UUID, uuid4

from msgbus import (
    BusSession,
    CallNext,
    Command,
    CommandResult,
    Context,
    CreateCommand,
    DeleteCommand,
    Event,
    HandlerInfo,
    HandlerRegistry,
    IMessageBus,
    MessageBus,
    PublishReceipt,
    PublishSummary,
    Query,
    Registration,
    Subscription,
    SystemEvent,
    TypeFilter,
    per_message,
    topic_of,
)
from msgbus.bus.durable import Ticket
from msgbus.handlers.decorators import HandlesDecorator
from msgbus.resilience import DeadLetterQueue, ResilientMessageBus
from msgbus.subscriptions import Delivery, Mode, SubscriptionTuning


class PlaceOrder(Command[UUID]):
    sku: str
    quantity: int = 1


class CancelOrder(Command):
    order_id: UUID


class OpenShop(CreateCommand[UUID]):
    pass


class CloseShop(DeleteCommand):
    pass


class CountOrders(Query[int]):
    pass


class OrderPlaced(Event, name="shop.OrderPlaced", version=2, topic="shop.orders", key="order_id"):
    order_id: UUID


class Database:
    pass


bus = MessageBus()
handlers = HandlerRegistry()


@handlers.handles(PlaceOrder)
async def place_order(command: PlaceOrder, context: Context) -> UUID:
    order_id = uuid4()
    context.emit(OrderPlaced(order_id=order_id))
    return order_id


@bus.handles(CancelOrder)
async def cancel_order(command: CancelOrder, database: Database) -> None:
    assert_type(command.order_id, UUID)


@bus.handles(CountOrders, timeout=2.0)
def count_orders(query: CountOrders) -> int:
    return 0


def is_large(event: Event) -> bool:
    return isinstance(event, OrderPlaced)


@bus.on(OrderPlaced, priority=10, filter=TypeFilter(OrderPlaced) & is_large)
async def send_receipt(event: OrderPlaced, context: Context) -> None:
    assert_type(await context.call(CountOrders(), headers={"tenant": "x"}), int)
    assert_type(await context.request(PlaceOrder(sku="tea")), UUID)
    assert_type(await context.enqueue(PlaceOrder(sku="tea"), 5), Ticket[UUID])
    assert_type(await context.execute(CancelOrder(order_id=uuid4())), CommandResult[None])


@bus.on(OrderPlaced, batch=True)
async def insert_all(events: list[OrderPlaced]) -> None:
    assert_type(events[0].order_id, UUID)


@bus.on(
    OrderPlaced,
    name="stock",
    delivery=Delivery.AT_MOST_ONCE,
    tuning=SubscriptionTuning(buffer=10),
)
async def count_stock(event: OrderPlaced) -> None:
    assert_type(event.order_id, UUID)


async def audit(event: Event) -> None: ...


assert_type(bus.subscribe(OrderPlaced, audit), Subscription)
assert_type(bus.subscribe(OrderPlaced, insert_all, batch=True, name="again"), Subscription)


@bus.on("shop.**", priority=10)
async def audit_topics(event: Event, context: Context) -> None:
    assert_type(context.topic, str)


@bus.on("shop.**", batch=True)
async def audit_lists(events: list[Event]) -> None:
    assert_type(topic_of(events[0]), str)


@bus.on("shop.**")
async def audit_orders(event: OrderPlaced) -> None:
    assert_type(event.order_id, UUID)


assert_type(bus.subscribe("shop.*", audit), Subscription)
assert_type(bus.subscribe("shop.*", audit_orders), Subscription)
assert_type(bus.subscribe("shop.*", audit_topics, timeout=1.0), Subscription)
assert_type(bus.subscribe("shop.*", audit_lists, batch=True), Subscription)
bus.subscribe("shop.*", lambda event: print(event.message_id), inline=True)


class OrderPaid(Event):
    cents: int


class OrderShipped(Event):
    parcel: str


@bus.on(OrderPlaced, OrderPaid)
async def two(event: OrderPlaced | OrderPaid) -> None:
    assert_type(event, OrderPlaced | OrderPaid)


@bus.on(OrderPlaced, OrderPaid, OrderShipped, name="three")
async def three(event: OrderPlaced | OrderPaid | OrderShipped, context: Context) -> None:
    assert_type(context.bus, MessageBus)


@bus.on(OrderPlaced, OrderPaid, batch=True)
async def two_in_lists(events: list[OrderPlaced | OrderPaid]) -> None: ...


@bus.on(OrderPlaced | OrderPaid, priority=3)
async def union(event: OrderPlaced | OrderPaid) -> None: ...


@bus.on(OrderPlaced, OrderPaid, OrderShipped, SystemEvent)
async def four(event: Event) -> None: ...


assert_type(bus.subscribe(OrderPlaced | OrderPaid, two, name="again"), Subscription)
assert_type(handlers.subscribe(OrderPlaced | OrderPaid, two), Registration)


@bus.on(OrderPlaced)
async def on_resilient(event: OrderPlaced, context: Context[ResilientMessageBus]) -> None:
    assert_type(context.bus, ResilientMessageBus)
    assert_type(context.bus.dead_letters, DeadLetterQueue)


async def place_again(command: PlaceOrder) -> UUID:
    return uuid4()


async def any_command(command: Command[Any]) -> None: ...


bus.register_command_handler(PlaceOrder, place_again, replace=True)
bus.register_command_handler(CancelOrder, any_command, replace=True)
bus.register_command_handler(CountOrders, lambda query: 0, replace=True, inline=True)
assert_type(handlers.handles(OpenShop), HandlesDecorator[OpenShop, UUID])


@bus.handles(CountOrders, replace=True)
class CountHandler:
    def __init__(self, database: Database) -> None:
        self.database = database

    def handle(self, query: CountOrders, context: Context, *, limit: int = 3) -> int:
        return 0


@handlers.handles(PlaceOrder, replace=True)
@dataclass
class PlaceHandler:
    database: Database

    async def __call__(self, command: PlaceOrder) -> UUID:
        return uuid4()


@bus.on(OrderPlaced)
class Receipts:
    def __init__(self, *args: Any) -> None: ...

    async def handle(self, event: OrderPlaced) -> None: ...


@bus.on(OrderPlaced, OrderPaid, batch=True)
class Lists:
    async def handle(self, events: list[OrderPlaced | OrderPaid], context: Context) -> None: ...


@bus.on("shop.*")
class Topics:
    def handle(self, event: OrderPlaced) -> None: ...


assert_type(CountHandler, type[CountHandler])
assert_type(CountHandler(Database()).database, Database)
assert_type(PlaceHandler(Database()).database, Database)
assert_type(Receipts(), Receipts)
assert_type(Lists(), Lists)
assert_type(Topics(), Topics)
bus.register_command_handler(CountOrders, CountHandler, replace=True)
bus.register_command_handler(CountOrders, CountHandler(Database()), replace=True)
bus.register_command_handler(CountOrders, per_message(CountHandler), replace=True)
bus.register_command_handler(PlaceOrder, PlaceHandler, replace=True)
bus.register_command_handler(PlaceOrder, per_message(PlaceHandler), replace=True)
assert_type(bus.subscribe(OrderPlaced, per_message(Receipts), name="each"), Subscription)
assert_type(bus.subscribe(OrderPlaced, Receipts(), name="object"), Subscription)
assert_type(bus.subscribe("shop.*", Lists, batch=True, name="lists"), Subscription)
assert_type(bus.subscribe("shop.*", Topics(), name="topics"), Subscription)
assert_type(bus.handlers(), tuple[HandlerInfo, ...])
assert_type(bus.handlers()[0].mode, Mode | None)


async def timing(message: Any, call_next: CallNext) -> Any:
    return await call_next(message)


async def begin(context: Context) -> AsyncIterator[Database]:
    yield Database()


async def main(given: IMessageBus) -> None:
    assert_type(given.handlers(), Sequence[HandlerInfo])
    assert_type(await bus.execute(PlaceOrder(sku="tea")), CommandResult[UUID])
    assert_type(await bus.call(PlaceOrder(sku="tea")), UUID)
    assert_type((await bus.execute(CountOrders())).value, int | None)
    assert_type((await bus.execute(CountOrders())).unwrap(), int)
    assert_type(await given.call(CountOrders()), int)
    assert_type(await given.request(CountOrders()), int)
    assert_type(await given.call(OpenShop()), UUID)
    assert_type(await given.execute(CloseShop()), CommandResult[None])
    assert_type(given.session("job"), BusSession)
    given.add_filter(is_large)
    given.add_middleware(timing, types=PlaceOrder, per="message")
    assert_type(await bus.publish(OrderPlaced(order_id=uuid4())), PublishReceipt)
    async with bus.session("job") as session:
        assert_type(session, BusSession)
        assert_type(await session.call(CountOrders(), headers={"tenant": "x"}), int)
        assert_type(await session.request(CountOrders()), int)
        assert_type(await session.enqueue(CancelOrder(order_id=uuid4())), Ticket[None])
        assert_type(await session.publish_many([OrderPlaced(order_id=uuid4())]), PublishSummary)
        async with session.stream(OrderPlaced) as own:
            assert_type(await anext(own), OrderPlaced)
    async with bus.stream(OrderPlaced) as events:
        async for event in events:
            assert_type(event, OrderPlaced)
    async with bus.stream("shop.**") as anything:
        async for one in anything:
            assert_type(one, Event)
    portal = bus.portal()
    assert_type(portal.publish(OrderPlaced(order_id=uuid4()), delay=1.0), PublishReceipt)
    assert_type(portal.execute(PlaceOrder(sku="tea")), CommandResult[UUID])
    assert_type(portal.call(CountOrders(), headers={"tenant": "x"}), int)
    assert_type(portal.request(CountOrders(), timeout=2), int)
    assert_type(portal.enqueue(PlaceOrder(sku="tea"), 5), Ticket[UUID])
    with portal.stream(OrderPlaced) as blocking:
        assert_type(next(blocking), OrderPlaced)
    with portal.stream("shop.**") as any_event:
        assert_type(next(any_event), Event)


configured: IMessageBus = MessageBus(
    registries=[handlers], middleware=[timing], provide={Database: per_message(begin)}
)
