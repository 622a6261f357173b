"""Options that are written in two places: the two say the same, name by name and type by type.

Annotations are compared as they are written, so that none has to be imported for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from msgbus import BusSession, Context, HandlerRegistry, IMessageBus, MessageBus
from msgbus.handlers.registration_methods import CommandOptions, EventOptions
from msgbus.resilience import LetterFilter, Policy
from msgbus.resilience.bus import BusOptions
from msgbus.resilience.dead_letters.filters import LetterFilters, ReplayFilters
from msgbus.resilience.policy import PolicyOptions
from msgbus.subscriptions import SubscriptionConfig

Types = dict[str, str]


def fields(cls: type[Any]) -> Types:
    """The fields of a model, dataclass or TypedDict."""
    return {
        name: str(getattr(written, "__forward_arg__", written))
        for name, written in cls.__annotations__.items()
        if name != "model_config"
    }


def keywords(function: Callable[..., Any]) -> Types:
    """The keyword-only parameters of a function, without `**`."""
    return {
        name: str(parameter.annotation)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def without(types: Types, *names: str) -> Types:
    assert set(names) <= set(types)
    return {name: written for name, written in types.items() if name not in names}


def test_event_handlers_take_their_own_options_and_those_of_subscriptions() -> None:
    own = without(keywords(HandlerRegistry.register_event_handler), "batch")
    subscription = fields(SubscriptionConfig)
    # Given as a number or a time, it is made a `StartAt` by the config.
    subscription["start"] = "StartAt | int | datetime"
    # Handlers know no journal and no subscription: these are said by protocols and bases.
    subscription |= {
        "key": "Callable[[Any], str | None] | None",
        "retry": "RetryPolicy",
    }

    assert fields(EventOptions) == own | subscription
    assert own.keys().isdisjoint(subscription)


def test_command_handlers_take_the_options_that_type_checkers_know() -> None:
    assert fields(CommandOptions) == keywords(HandlerRegistry.register_command_handler)


def test_a_resilient_bus_takes_the_options_of_every_bus() -> None:
    assert fields(BusOptions) == keywords(MessageBus.__init__)


def test_every_part_of_a_policy_may_be_changed() -> None:
    assert fields(PolicyOptions) == fields(Policy)


def test_letters_are_asked_for_by_everything_that_a_store_can_look_for() -> None:
    assert fields(LetterFilters) == without(fields(LetterFilter), "message_types", "upto")
    assert fields(ReplayFilters) == without(fields(LetterFilters), "status", "answered")


@pytest.mark.parametrize("name", ["call", "execute", "publish"])
@pytest.mark.parametrize("other", [BusSession, Context, IMessageBus])
def test_messages_are_sent_with_the_same_options_everywhere(other: type[Any], name: str) -> None:
    assert keywords(getattr(other, name)) == keywords(getattr(MessageBus, name))
