"""A bus in a FastAPI application: started, given to requests and stopped with it."""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.testclient import TestClient

from msgbus import Command, Context, Event, MessageBus, Refusal


class PlaceOrder(Command[str]):
    """Place an order; the reply is its number."""

    sku: str


class OrderPlaced(Event):
    """An order was accepted."""


class OutOfStock(Refusal):
    """An expected answer, not a breakdown."""


bus = MessageBus()


@bus.handles(PlaceOrder)
async def place_order(command: PlaceOrder, context: Context) -> str:
    if command.sku != "tea":
        raise OutOfStock(f"no {command.sku} left")
    context.emit(OrderPlaced())
    return "tea-1"


app = FastAPI(lifespan=bus.lifespan)


@app.post("/orders")
async def post_order(command: PlaceOrder, request: Request) -> str:
    shop: MessageBus = request.state.bus
    return await shop.call(command)


@app.exception_handler(OutOfStock)
async def say_no(_: Request, refusal: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(refusal)}, status_code=409)


with TestClient(app) as client:  # in earnest: uvicorn shop:app
    for body in ({"sku": "tea"}, {"sku": "gold"}, {"colour": "red"}):
        answer = client.post("/orders", json=body)
        print(answer.status_code, answer.text[:28])
print("events:", bus.stats().events["OrderPlaced"].published)

# Output:
# > 200 "tea-1"
# > 409 {"detail":"no gold left"}
# > 422 {"detail":[{"type":"missing"
# > events: 1
