"""Mistakes that type checkers must find."""

from uuid import UUID, uuid4

from msgbus import Command, Context, Event, MessageBus, per_message


class PlaceOrder(Command[UUID]):
    sku: str


class CancelOrder(Command):
    sku: str


class OrderPlaced(Event):
    order_id: UUID


class OrderCancelled(Event):
    order_id: UUID


bus = MessageBus()


@bus.handles(PlaceOrder)  # expect: mypy[arg-type] pyright[reportCallIssue, reportArgumentType, reportUntypedFunctionDecorator]
async def wrong_reply(command: PlaceOrder) -> int:
    return 1


@bus.handles(PlaceOrder)  # expect: mypy[arg-type] pyright[reportCallIssue, reportArgumentType, reportUntypedFunctionDecorator]
async def wrong_command(command: CancelOrder) -> UUID:
    return uuid4()


async def cancel(command: CancelOrder) -> None: ...


async def number(command: PlaceOrder) -> int:
    return 1


bus.register_command_handler(PlaceOrder, cancel)  # expect: mypy[arg-type] pyright[reportArgumentType]
bus.register_command_handler(PlaceOrder, number)  # expect: mypy[arg-type] pyright[reportArgumentType]


@bus.on(OrderPlaced, OrderCancelled)  # expect: mypy[arg-type] pyright[reportCallIssue, reportArgumentType, reportUntypedFunctionDecorator]
async def one_of_two(event: OrderPlaced) -> None: ...


@bus.on(OrderPlaced)  # expect: mypy[arg-type] pyright[reportCallIssue, reportArgumentType, reportUntypedFunctionDecorator]
async def wrong_event(event: OrderCancelled) -> None: ...


@bus.handles(PlaceOrder)  # expect: mypy[arg-type] pyright[reportCallIssue, reportArgumentType, reportUntypedClassDecorator]
class WrongReply:
    async def handle(self, command: PlaceOrder, context: Context) -> int:
        return 1


@bus.handles(PlaceOrder)  # expect: mypy[arg-type] pyright[reportCallIssue, reportArgumentType, reportUntypedClassDecorator]
class WrongCommand:
    def __init__(self, sku: str) -> None: ...

    async def handle(self, command: CancelOrder) -> UUID:
        return uuid4()


@bus.handles(PlaceOrder)  # expect: mypy[arg-type] pyright[reportCallIssue, reportArgumentType, reportUntypedClassDecorator]
class NoMethod:
    pass


@bus.on(OrderPlaced)  # expect: mypy[arg-type] pyright[reportCallIssue, reportArgumentType, reportUntypedClassDecorator]
class WrongEvent:
    def __call__(self, event: OrderCancelled) -> None: ...


@bus.on(OrderPlaced, batch=True)  # expect: mypy[arg-type] pyright[reportCallIssue, reportArgumentType, reportUntypedClassDecorator]
class NoList:
    async def handle(self, event: OrderPlaced) -> None: ...


bus.register_command_handler(PlaceOrder, WrongReply)  # expect: mypy[arg-type] pyright[reportArgumentType]
bus.register_command_handler(PlaceOrder, WrongReply())  # expect: mypy[arg-type] pyright[reportArgumentType]
bus.register_command_handler(PlaceOrder, per_message(WrongCommand))  # expect: mypy[arg-type] pyright[reportArgumentType]
bus.subscribe(OrderPlaced, WrongEvent)  # expect: mypy[arg-type] pyright[reportCallIssue, reportArgumentType]
bus.subscribe(OrderPlaced, per_message(WrongEvent))  # expect: mypy[arg-type] pyright[reportCallIssue, reportArgumentType]
bus.subscribe(OrderPlaced, NoList, batch=True)  # expect: mypy[call-overload] pyright[reportCallIssue, reportArgumentType]


bus.on(OrderPlaced, max_ahaed=500)  # expect: mypy[call-overload, call-overload] pyright[reportCallIssue]


async def cancelled(event: OrderCancelled) -> None: ...


bus.subscribe(OrderPlaced, cancelled)  # expect: mypy[arg-type] pyright[reportCallIssue, reportArgumentType]


async def placed(command: PlaceOrder) -> None: ...


@bus.on("shop.*")  # expect: mypy[type-var] pyright[reportCallIssue, reportArgumentType, reportUntypedFunctionDecorator]
async def wrong_for_topics(command: PlaceOrder) -> None: ...


bus.subscribe("shop.*", placed)  # expect: mypy[type-var] pyright[reportCallIssue, reportArgumentType]


async def main() -> None:
    number: int = await bus.call(PlaceOrder(sku="tea"))  # expect: mypy[arg-type] pyright[reportAssignmentType]
    await bus.execute(OrderPlaced(order_id=uuid4()))  # expect: mypy[arg-type] pyright[reportArgumentType]
    async with bus.session() as session:
        await session.execute(OrderPlaced(order_id=uuid4()))  # expect: mypy[arg-type] pyright[reportArgumentType]
        await session.publish(OrderPlaced(order_id=uuid4()), delay="soon")  # expect: mypy[arg-type] pyright[reportArgumentType]
    bus.portal().publish(PlaceOrder(sku="tea"))  # expect: mypy[arg-type] pyright[reportArgumentType]
    bus.portal().call(PlaceOrder(sku="tea"), header={})  # expect: mypy[call-arg] pyright[reportCallIssue]
    await bus.publish(PlaceOrder(sku="tea"))  # expect: mypy[arg-type] pyright[reportArgumentType]
    PlaceOrder(sku=number)  # expect: mypy[arg-type] pyright[reportArgumentType]
    (await bus.execute(PlaceOrder(sku="tea"))).success = False  # expect: mypy[misc] pyright[reportAttributeAccessIssue]
