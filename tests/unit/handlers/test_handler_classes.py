"""Handlers that are classes, or objects with a method `handle` (19d)."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
from pydantic import BaseModel, ConfigDict

from msgbus import (
    Command,
    ConfigurationError,
    Context,
    DuplicateHandlerError,
    Event,
    HandlerRegistry,
    HandlerSignatureError,
    MessageBus,
    per_message,
    per_session,
)
from msgbus.errors import BusNotStartedError, MissingProviderError
from msgbus.handlers.injection import Providers, bind
from msgbus.handlers.registration import make_registration
from msgbus.resilience import ResilientMessageBus, RetryConfig
from msgbus.runtime.threads import ThreadPool
from msgbus.subscriptions import StartAt


class Database:
    def __init__(self, name: str = "db") -> None:
        self.name = name


class Transaction:
    """Lives for one message."""


class Ask(Command[str]):
    pass


class Tell(Command[str]):
    pass


class Happened(Event):
    number: int = 0


class Ended(Event):
    pass


class Asking:
    """Counts its objects."""

    made = 0

    def __init__(self, database: Database) -> None:
        type(self).made += 1
        self.database = database

    async def handle(self, command: Ask | Tell, context: Context) -> str:
        return f"{self.database.name} {context.handler} {id(self)}"


def new_asking() -> type[Asking]:
    """A class of its own, so that no test sees what another has made."""

    class Own(Asking):
        made = 0

    return Own


class TestObjects:
    async def test_an_object_with_handle_is_a_handler_by_the_name_of_its_class(self) -> None:
        bus = MessageBus()
        bus.register_command_handler(Ask, Asking(Database("mine")))

        async with bus:
            assert (await bus.call(Ask())).startswith("mine Asking ")

    async def test_a_sync_handle_runs_in_a_thread_unless_inline(self) -> None:
        class Sync:
            def handle(self, command: Ask | Tell) -> str:
                return threading.current_thread().name

        bus = MessageBus()
        bus.register_command_handler(Ask, Sync())
        bus.register_command_handler(Tell, Sync(), inline=True)

        async with bus:
            assert await bus.call(Ask()) != threading.current_thread().name
            assert await bus.call(Tell()) == threading.current_thread().name

    async def test_an_object_that_can_be_called_is_called_and_its_handle_is_its_own_affair(
        self,
    ) -> None:
        class Both:
            async def __call__(self, command: Ask) -> str:
                return f"called, {await self.handle(command)}"

            async def handle(self, command: Ask) -> str:
                return "handled"

        bus = MessageBus()
        bus.register_command_handler(Ask, Both())
        async with bus:
            assert await bus.call(Ask()) == "called, handled"
            bus.register_command_handler(Ask, Both, replace=True)
            assert await bus.call(Ask()) == "called, handled"
            bus.register_command_handler(Ask, Both().handle, replace=True)
            assert await bus.call(Ask()) == "handled"

    def test_an_object_with_neither_is_refused(self) -> None:
        with pytest.raises(HandlerSignatureError, match="no method `handle`"):
            MessageBus().register_command_handler(Ask, Database())  # type: ignore[arg-type]


class TestMadeOnce:
    async def test_a_class_is_made_at_start_from_what_the_bus_provides(self) -> None:
        log: list[str] = []

        @asynccontextmanager
        async def open_database() -> AsyncGenerator[Database]:
            log.append("open")
            yield Database("opened")
            log.append("close")

        bus = MessageBus(provide={Database: open_database})

        @bus.handles(Ask)
        class Handler:
            def __init__(self, database: Database) -> None:
                log.append(f"made with {database.name}")
                self.database = database

            async def handle(self, command: Ask) -> str:
                return self.database.name

        assert log == []
        async with bus:
            assert log == ["open", "made with opened"]
            assert await bus.call(Ask()) == "opened"
            assert await bus.call(Ask()) == "opened"
        assert log == ["open", "made with opened", "close"]

    async def test_the_same_object_serves_all_messages_and_survives_later_registrations(
        self,
    ) -> None:
        own = new_asking()
        bus = MessageBus(provide={Database: Database()})
        bus.register_command_handler(Ask, own)

        async with bus:
            first = await bus.call(Ask())
            bus.subscribe(Happened, lambda event: None, inline=True)
            assert await bus.call(Ask()) == first
        assert own.made == 1

    async def test_one_object_serves_all_types_that_a_class_is_registered_for(self) -> None:
        own = new_asking()
        bus = MessageBus(provide={Database: Database()})
        assert bus.handles(Ask)(bus.handles(Tell)(own)) is own

        async with bus:
            assert await bus.call(Ask()) == await bus.call(Tell())
        assert own.made == 1

    def test_the_call_is_the_bound_method_itself(self) -> None:
        class Plain:
            async def handle(self, command: Ask) -> str:
                return ""

        registration = make_registration(Ask, Plain)
        call: Any = bind(
            registration.handler,
            registration.signature,
            Providers(None),
            source=registration.source,
            name="plain",
            inline=False,
            is_wrapped=False,
            threads=ThreadPool(1),
        )

        assert call.__func__ is Plain.handle

    async def test_methods_ask_for_dependencies_too(self) -> None:
        bus = MessageBus(provide={Database: Database("a"), Transaction: per_message(Transaction)})

        @bus.handles(Ask)
        class Handler:
            async def handle(
                self, command: Ask, *, database: Database, transaction: Transaction
            ) -> str:
                return f"{database.name} {type(transaction).__name__}"

        async with bus:
            assert await bus.call(Ask()) == "a Transaction"

    async def test_events_lists_and_topics_are_handled_by_classes(self) -> None:
        seen: list[str] = []
        bus = MessageBus(provide={Database: Database()})

        @bus.on(Happened)
        class Single:
            def __init__(self, database: Database) -> None:
                self.database = database

            async def handle(self, event: Happened) -> None:
                seen.append(f"single {self.database.name}")

        @bus.on(Happened, batch=True)
        class Lists:
            async def __call__(self, events: list[Happened]) -> None:
                seen.append(f"list of {len(events)}")

        @bus.on("**", inline=True)
        class Topics:
            def handle(self, event: Ended) -> None:
                seen.append("topic")

        async with bus:
            await bus.publish_many([Happened(), Ended()])
            await bus.settled()
        assert sorted(seen) == ["list of 1", "single db", "topic"]

    async def test_a_constructor_that_fails_fails_the_start_and_closes_what_was_opened(
        self,
    ) -> None:
        log: list[str] = []

        async def open_database() -> AsyncIterator[Database]:
            yield Database()
            log.append("closed")

        bus = MessageBus(provide={Database: open_database})

        @bus.handles(Ask)
        class Fails:
            def __init__(self, database: Database) -> None:
                if not log:
                    raise LookupError("no such table")

            async def handle(self, command: Ask) -> str:
                return "ok"

        with pytest.raises(LookupError, match="no such table"):
            await bus.start()
        assert log == ["closed"]
        async with bus:
            assert await bus.call(Ask()) == "ok"

    async def test_one_that_needs_an_open_resource_needs_a_started_bus(self) -> None:
        bus = MessageBus(provide={Database: Database})
        bus.register_command_handler(Ask, new_asking())

        with pytest.raises(BusNotStartedError, match="Start the bus first"):
            await bus.execute(Ask())

    async def test_a_class_registered_while_the_bus_runs_is_made_at_once(self) -> None:
        own = new_asking()

        class Fails:
            def __init__(self) -> None:
                raise LookupError("no")

            async def handle(self, command: Tell) -> str:
                return ""

        async with MessageBus(provide={Database: Database()}) as bus:
            bus.register_command_handler(Ask, own)
            assert own.made == 1
            with pytest.raises(LookupError):
                bus.register_command_handler(Tell, Fails)
            assert bus.check() == []
            assert bus.unregister_command_handler(Tell) is False

    async def test_a_class_that_is_no_longer_registered_is_let_go(self) -> None:
        own = new_asking()
        bus = MessageBus(provide={Database: Database()})
        async with bus:
            bus.register_command_handler(Ask, own)
            kept = weakref.ref(own)
            bus.unregister_command_handler(Ask)
            del own
            gc.collect()
            assert kept() is None

    async def test_defaults_and_none_stand_in_for_what_nobody_provides(self) -> None:
        bus = MessageBus()

        @bus.handles(Ask)
        class Handler:
            def __init__(self, database: Database | None, retries: int = 3) -> None:
                self.text = f"{database} {retries}"

            async def handle(self, command: Ask) -> str:
                return self.text

        async with bus:
            assert await bus.call(Ask()) == "None 3"


class TestPerMessage:
    async def test_a_class_inside_per_message_is_made_for_each_message(self) -> None:
        own = new_asking()
        bus = MessageBus(provide={Database: Database()})
        bus.register_command_handler(Ask, per_message(own))

        async with bus:
            assert own.made == 0
            assert (await bus.call(Ask())).startswith("db Own ")
            await bus.call(Ask())
        assert own.made == 2

    async def test_a_class_that_asks_for_something_per_message_is_made_for_each_message(
        self,
    ) -> None:
        log: list[str] = []

        async def begin() -> AsyncIterator[Transaction]:
            try:
                yield Transaction()
            except ValueError:
                log.append("rolled back")
                raise
            log.append("committed")

        bus = MessageBus(provide={Transaction: per_message(begin)})

        @bus.on(Happened, concurrency=1)
        class Handler:
            def __init__(self, transaction: Transaction, context: Context) -> None:
                self.first = transaction
                assert isinstance(context.message, Happened)
                log.append(f"made for {context.message.number}")

            async def handle(self, event: Happened, again: Transaction) -> None:
                assert again is self.first
                if event.number:
                    raise ValueError

        async with bus:
            await bus.publish(Happened())
            await bus.publish(Happened(number=1))
            await bus.settled()
        assert log[:4] == ["made for 0", "committed", "made for 1", "rolled back"]

    async def test_a_sync_class_per_message_runs_in_a_thread(self) -> None:
        class Sync:
            def handle(self, command: Ask) -> str:
                return threading.current_thread().name

        bus = MessageBus()
        bus.register_command_handler(Ask, per_message(Sync))
        async with bus:
            assert await bus.call(Ask()) != threading.current_thread().name

    async def test_per_session_dependencies_are_those_of_the_message(self) -> None:
        bus = MessageBus(provide={Database: per_session(Database)})
        bus.register_command_handler(Ask, new_asking())

        @bus.handles(Tell)
        class Identity:
            def __init__(self, database: Database) -> None:
                self.database = database

            async def handle(self, command: Tell) -> str:
                return str(id(self.database))

        async with bus, bus.session() as one, bus.session() as other:
            assert await one.call(Tell()) == await one.call(Tell())
            assert await one.call(Tell()) != await other.call(Tell())
            result = await bus.execute(Ask())
            assert "no live session" in str(result.error)

    async def test_a_container_makes_what_a_constructor_asks_for(self) -> None:
        scopes: list[str] = []

        class Container:
            def provides(self, wanted: type) -> bool:
                return wanted is Database

            @asynccontextmanager
            async def open(self, context: Context) -> AsyncGenerator[Any]:
                async def get(wanted: type) -> Any:
                    return wanted("from container")

                scopes.append(f"open {context.handler}")
                yield get
                scopes.append("close")

        bus = MessageBus(resolver=Container())

        @bus.handles(Ask)
        class Handler:
            def __init__(self, database: Database) -> None:
                self.database = database

            async def handle(self, command: Ask, database: Database) -> str:
                return self.database.name

        async with bus:
            assert await bus.call(Ask()) == "from container"
        assert scopes == ["open Handler", "close"]

    def test_a_function_inside_per_message_is_refused(self) -> None:
        async def ask(command: Ask) -> str:
            return ""

        with pytest.raises(HandlerSignatureError, match=r"per_message\(.*ask\).*not a class"):
            MessageBus().register_command_handler(Ask, per_message(ask))  # type: ignore[arg-type]


class TestOneForEachHandling:
    async def test_something_per_message_is_made_once_for_all_who_ask_for_it(self) -> None:
        class Repository:
            def __init__(self, transaction: Transaction) -> None:
                self.transaction = transaction

        bus = MessageBus(
            provide={Transaction: per_message(Transaction), Repository: per_message(Repository)}
        )

        @bus.handles(Ask)
        async def ask(command: Ask, repository: Repository, transaction: Transaction) -> str:
            assert repository.transaction is transaction
            return str(id(transaction))

        async with bus:
            assert (await bus.execute(Ask())).success


class TestFaults:
    async def test_all_that_constructors_ask_for_and_nobody_provides_is_listed(self) -> None:
        bus = MessageBus()

        @bus.handles(Ask)
        class First:
            def __init__(self, database: Database, transaction: Transaction) -> None: ...

            async def handle(self, command: Ask, database: Database) -> str:
                return ""

        with pytest.raises(MissingProviderError, match="First asks for database: Database"):
            await bus.execute(Ask())
        problems = [f"{fault.subject} {fault.problem}" for fault in bus.check()]
        assert len(problems) == 3
        assert all(problem.startswith("First asks for ") for problem in problems)
        assert "transaction: Transaction" in problems[2]
        with pytest.raises(ConfigurationError) as caught:
            await bus.start()
        assert len(caught.value.faults) == 3

    async def test_a_running_bus_refuses_a_class_that_asks_for_too_much(self) -> None:
        async with MessageBus() as bus:
            with pytest.raises(ConfigurationError, match=r"Asking.*database: Database"):
                bus.register_command_handler(Ask, Asking)

    def test_a_parameter_without_annotation_names_class_parameter_and_fix(self) -> None:
        class Handler:
            def __init__(self, database) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType]

            async def handle(self, command: Ask) -> str:
                return ""

        with pytest.raises(HandlerSignatureError, match=r"Handler.__init__ .*'database'.*provide"):
            MessageBus().register_command_handler(Ask, Handler)

    def test_a_class_without_a_method_to_call_is_refused(self) -> None:
        with pytest.raises(HandlerSignatureError, match=r"Write: async def handle\(self, message"):
            MessageBus().register_command_handler(Ask, Database)  # type: ignore[arg-type]

    def test_a_method_without_self_is_refused(self) -> None:
        class Handler:
            def handle(command: Ask) -> str:  # type: ignore[misc]  # noqa: N805  # pyright: ignore[reportSelfClsParameterName]
                return ""

        with pytest.raises(HandlerSignatureError, match=r"def handle\(self, message: Ask\)"):
            MessageBus().register_command_handler(Ask, Handler)  # type: ignore[arg-type]

    def test_a_wrong_annotation_names_class_and_method(self) -> None:
        class Handler:
            async def handle(self, command: Tell) -> str:
                return ""

        with pytest.raises(HandlerSignatureError, match=r"Handler\.handle is registered for Ask"):
            MessageBus().register_command_handler(Ask, Handler)  # type: ignore[arg-type]
        with pytest.raises(HandlerSignatureError, match=r"Handler\.handle is registered for Ask"):
            MessageBus().register_command_handler(Ask, Handler())  # type: ignore[arg-type]

    def test_an_async_constructor_is_refused_with_the_way_to_do_it(self) -> None:
        class Handler:
            async def __init__(self) -> None: ...  # type: ignore[misc]

            async def handle(self, command: Ask) -> str:
                return ""

        with pytest.raises(HandlerSignatureError, match=r"__init__ is async.*provide="):
            MessageBus().register_command_handler(Ask, Handler)

    def test_abstract_classes_and_protocols_are_refused(self) -> None:
        class Base(ABC):
            @abstractmethod
            async def handle(self, command: Ask) -> str: ...

        class Handles(Protocol):
            async def handle(self, command: Ask) -> str: ...

        classes: tuple[Any, ...] = (Base, Handles)
        for cls in classes:
            with pytest.raises(HandlerSignatureError, match="is abstract"):
                MessageBus().register_command_handler(Ask, cls)


class TestKindsOfClasses:
    async def test_dataclasses_whichever_decorator_comes_first(self) -> None:
        bus = MessageBus(provide={Database: Database("data")})

        @bus.handles(Ask)
        @dataclass(slots=True)
        class Inside:
            database: Database

            async def handle(self, command: Ask) -> str:
                return self.database.name

        @dataclass
        @bus.handles(Tell)
        class Outside:
            database: Database

            async def handle(self, command: Tell) -> str:
                return self.database.name

        async with bus:
            assert await bus.call(Ask()) == await bus.call(Tell()) == "data"

    async def test_pydantic_models(self) -> None:
        class Model(BaseModel):
            model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True)

            database: Database
            suffix: str = "!"

            async def handle(self, command: Ask | Tell) -> str:
                return self.database.name + self.suffix

        bus = MessageBus(provide={Database: Database("model")})
        bus.register_command_handler(Ask, Model)
        bus.register_command_handler(Tell, Model(database=Database("own")))

        async with bus:
            assert await bus.call(Ask()) == "model!"
            assert await bus.call(Tell()) == "own!"

    async def test_static_methods_inherited_methods_and_wrapped_methods(self) -> None:
        class Static:
            @staticmethod
            async def handle(command: Ask) -> str:
                return "static"

        class Below(Asking):
            pass

        def loud(method: Any) -> Any:
            @functools.wraps(method)
            async def wrapper(*args: Any, **kwargs: Any) -> str:
                return str(await method(*args, **kwargs)).upper()

            return wrapper

        class Wrapped:
            @loud
            async def handle(self, command: Ask, context: Context) -> str:
                return context.handler

        for cls, reply in ((Static, "static"), (Below, "db Below "), (Wrapped, "WRAPPED")):
            bus = MessageBus(provide={Database: Database()})
            bus.register_command_handler(Ask, cls)
            async with bus:
                assert (await bus.call(Ask())).startswith(reply)


class TestScopesAndNames:
    async def test_a_registry_is_included_in_several_buses_with_an_object_for_each(self) -> None:
        own = new_asking()
        registry = HandlerRegistry()
        assert registry.handles(Ask)(own) is own
        buses = [
            MessageBus(registries=[registry], provide={Database: Database(name)}) for name in "ab"
        ]

        async with buses[0], buses[1]:
            replies = [await bus.call(Ask()) for bus in buses]
        assert [reply[:5] for reply in replies] == ["a Own", "b Own"]
        assert own.made == 2

    async def test_a_session_makes_its_own_from_what_it_provides(self) -> None:
        own = new_asking()
        bus = MessageBus(provide={Database: Database("bus")})
        bus.register_command_handler(Ask, own)

        async with bus, bus.session(provide={Database: Database("session")}) as session:
            assert (await session.call(Ask())).startswith("bus ")
            session.handles(Ask)(own)
            assert own.made == 2
            assert (await session.call(Ask())).startswith("session ")
            assert (await bus.call(Ask())).startswith("bus ")

    async def test_replace_puts_a_class_in_the_place_of_another(self) -> None:
        bus = MessageBus(provide={Database: Database()})
        bus.register_command_handler(Ask, Asking)
        with pytest.raises(DuplicateHandlerError, match="already handled by Asking"):
            bus.register_command_handler(Ask, new_asking())
        bus.register_command_handler(Ask, new_asking(), replace=True)
        async with bus:
            assert (await bus.call(Ask())).startswith("db Own ")

    def test_a_class_is_registered_for_an_event_once_and_names_must_differ(self) -> None:
        class Handler:
            async def handle(self, event: Event) -> None: ...

        def another() -> type[Handler]:
            class Handler:
                async def handle(self, event: Event) -> None: ...

            return Handler  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

        bus = MessageBus()
        one, other = Handler, another()
        bus.subscribe(Happened, one)
        with pytest.raises(DuplicateHandlerError, match="already handles Happened"):
            bus.subscribe(Happened, one)
        with pytest.raises(DuplicateHandlerError, match=r"named 'Handler'.*line \d+.*line \d+"):
            bus.subscribe(Ended, other)
        bus.subscribe(Ended, other, name="other")

    async def test_class_and_objects_share_one_circuit_and_take_a_policy(self) -> None:
        bus = ResilientMessageBus(retry=RetryConfig(max_retries=0))

        class Handler:
            async def handle(self, command: Ask | Tell) -> str:
                raise OSError("down")

        bus.register_command_handler(Ask, Handler)
        bus.register_command_handler(Tell, Handler())
        bus.policy(Handler, fallback="none")
        async with bus:
            assert await bus.call(Ask()) == "none"
            assert not (await bus.execute(Tell())).success
            assert list(bus.circuits) == ["Handler"]
            assert bus.circuits["Handler"].failures == 2
            (letter,) = (await bus.dead_letters.page()).letters
            assert (letter.handler, letter.target) == ("Handler", Tell.__wire__.name)

    async def test_a_class_is_durable_under_its_name_and_replayed_to(self) -> None:
        seen: list[str] = []

        class Shown:
            def __init__(self, database: Database) -> None:
                self.database = database

            async def handle(self, event: Happened) -> None:
                seen.append(f"{self.database.name} {event.number}")

        bus = MessageBus(journal="memory:", provide={Database: Database()})
        bus.subscribe(Happened, Shown)
        async with bus:
            await bus.publish(Happened(number=7))
            await bus.settled()
            assert list(bus.stats().subscriptions) == ["Shown:Happened"]
            assert seen == ["db 7"]
            await bus.replay(StartAt.EARLIEST, "Shown")
            await bus.replay(StartAt.EARLIEST, Shown)
        assert seen == ["db 7"] * 3
