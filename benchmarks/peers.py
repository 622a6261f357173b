"""Other libraries on the same work, if they are installed (the `bench` dependency group).

They are imported by name at run time, and set up as their documentation shows, in the way
that is fastest for them: handler objects are made once, and nothing is logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import make_dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from benchmarks import commands, events, subjects
from benchmarks.rows import Row
from benchmarks.timing import Build, Effort, Handler, Measurement, Run, Side, compare

PACKAGES: Final = ("aiopubsub", "mediatorx", "pydiator-core", "pyee")
"""As they are called when installing."""


async def add_method(self: object, message: Any) -> int:
    """The handler as the body of a method, for libraries that take handler objects."""
    del self
    total: int = message.left
    return total


async def note_keyed(key: object, event: Any) -> None:
    """The handler as aiopubsub calls it."""
    del key, event


def message_type(base: Any) -> Any:
    """A message of two fields below the library's own base class."""
    fields = [("left", int), ("right", int)]
    return make_dataclass("Add", fields, bases=(base,), frozen=True)


def build_of(base: Callable[[], Any]) -> Build:
    def build(number: int) -> Sequence[Any]:
        made = base()
        return [made(left=index, right=1) for index in range(number)]

    return build


# -- mediatorx -----------------------------------------------------------------------------


@cache
def mediatorx_message() -> Any:
    return message_type(import_module("mediatorx").IRequest)


@asynccontextmanager
async def mediatorx(handler: Handler, *, middleware: int) -> AsyncGenerator[Run]:
    library = import_module("mediatorx")
    resolver = library.DictResolver()
    mediator = library.Mediator(resolver)
    handler_type = type("AddHandler", (), {"handle": handler})
    resolver.add_instance(handler_type, handler_type())
    mediator.register(mediatorx_message(), handler_type)
    for _ in range(middleware):

        async def handle(self: object, message: object, call_next: Any) -> Any:
            del self, message
            return await call_next()

        behavior_type = type("Behavior", (), {"handle": handle})
        resolver.add_instance(behavior_type, behavior_type())
        mediator.add_behavior(behavior_type)
    send = mediator.send

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            await send(message)

    yield run


# -- pydiator-core ---------------------------------------------------------------------------


@cache
def pydiator_message() -> Any:
    return message_type(import_module("pydiator_core.interfaces").BaseRequest)


@asynccontextmanager
async def pydiator(handler: Handler, *, middleware: int) -> AsyncGenerator[Run]:
    interfaces = import_module("pydiator_core.interfaces")
    container = import_module("pydiator_core.mediatr_container").MediatrContainer()
    handler_type = type("AddHandler", (interfaces.BaseHandler,), {"handle": handler})
    container.register_request(pydiator_message(), handler_type())
    for _ in range(middleware):

        async def handle(self: Any, req: Any, **kwargs: Any) -> Any:
            return await self.next().handle(req, **kwargs)

        pipeline_type = type("Pipeline", (interfaces.BasePipeline,), {"handle": handle})
        container.register_pipeline(pipeline_type())
    mediator = import_module("pydiator_core.mediatr").Mediatr()
    mediator.ready(container)
    send = mediator.send

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            await send(message)

    yield run


# -- pyee ------------------------------------------------------------------------------------


@asynccontextmanager
async def pyee(handler: Handler, *, handlers: int) -> AsyncGenerator[Run]:
    emitter = import_module("pyee.asyncio").AsyncIOEventEmitter()
    for each in subjects.copies(handler, handlers):
        emitter.on("added", each)

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            emitter.emit("added", message)
        await emitter.wait_for_complete()

    yield run


# -- aiopubsub -------------------------------------------------------------------------------


@asynccontextmanager
async def aiopubsub(handler: Handler, *, handlers: int) -> AsyncGenerator[Run]:
    library = import_module("aiopubsub")
    hub = library.Hub()
    publisher = library.Publisher(hub, prefix=library.Key("shop"))
    key = library.Key("added")
    full_key = library.Key("shop", "added")
    subscribers: list[Any] = []
    for number, each in enumerate(subjects.copies(handler, handlers)):
        subscriber = library.Subscriber(hub, f"subscriber-{number}")
        subscriber.add_async_listener(full_key, each)
        subscribers.append(subscriber)

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            publisher.publish(key, message)
        while any(hub.get_subscriber_queue_sizes(full_key)):  # noqa: ASYNC110 (no event to wait for)
            await asyncio.sleep(0)

    await asyncio.sleep(0)
    yield run
    for subscriber in subscribers:
        await subscriber.remove_all_listeners()


# -- rows --------------------------------------------------------------------------------------


def row(name: str, title: str, module: str, plain: Side, candidate: Side) -> Row:
    async def measure(effort: Effort) -> Measurement | None:
        if find_spec(module) is None:
            return None
        return await compare(plain, candidate, effort)

    area, shown = (
        ("commands", commands.BARE) if plain is commands.BASELINE else ("events", events.QUEUE)
    )
    return Row(name=f"{area}.peer.{name}", title=title, baseline=shown, measure=measure)


def mediator_rows(
    name: str, module: str, opened: Callable[..., Any], build: Build
) -> tuple[Row, Row]:
    def side(middleware: int) -> Side:
        return Side(open=partial(opened, middleware=middleware), build=build, handler=add_method)

    short = name.partition("-")[0]
    return (
        row(short, name, module, commands.BASELINE, side(0)),
        row(f"{short}3", f"{name}, 3 middleware", module, commands.BASELINE, side(3)),
    )


def emitter_rows(name: str, opened: Callable[..., Any], handler: Handler) -> tuple[Row, Row]:
    def side(handlers: int) -> Side:
        return Side(
            open=partial(opened, handlers=handlers),
            build=subjects.events,
            handler=handler,
            calls=handlers,
        )

    return (
        row(name, f"{name}, 1 handler", name, events.BASELINE, side(1)),
        row(f"{name}10", f"{name}, 10 handlers", name, events.BASELINE, side(10)),
    )


COMMAND_ROWS: Final = (
    *mediator_rows("mediatorx", "mediatorx", mediatorx, build_of(mediatorx_message)),
    *mediator_rows("pydiator-core", "pydiator_core", pydiator, build_of(pydiator_message)),
)
EVENT_ROWS: Final = (
    *emitter_rows("pyee", pyee, subjects.note),
    *emitter_rows("aiopubsub", aiopubsub, note_keyed),
)
