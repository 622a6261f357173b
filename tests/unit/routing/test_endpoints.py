"""Endpoints: registration, balancing, failover and retries."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import anyio
import pytest

from msgbus import Event, Refusal
from msgbus.errors import (
    ConfigurationError,
    DuplicateHandlerError,
    EndpointFailedError,
    MessageTooLargeError,
    MissingEndpointError,
    NoHealthyEndpointError,
)
from msgbus.resilience import CircuitBreakerConfig
from msgbus.routing import Endpoint, EndpointRegistry, EventEnvelope
from msgbus.routing.endpoints.balancing import BALANCERS, make_balancer
from msgbus.routing.endpoints.delivery import EndpointPool, size_of
from msgbus.runtime.clock import VirtualClock
from tests.counts import REGISTRY_TURNS
from tests.evidence import Evidence
from tests.fakes import let_others_run
from tests.unit.routing.workers import Crew, Worker


class Deposit(Event, key="account"):
    account: str


async def nowhere(envelope: EventEnvelope[Any]) -> None:
    pass


def endpoint(name: str, **options: Any) -> Endpoint:
    return Endpoint(name, nowhere, **options)


# -- the registry --------------------------------------------------------------------------


def test_endpoints_come_and_go_at_any_time() -> None:
    registry = EndpointRegistry()
    first = registry.register(endpoint("a", group="g"))
    second = registry.register(endpoint("b", group="g"))

    assert registry.members("g") == (first, second)
    assert registry.members("a") == (first,)
    assert (registry.get("b"), len(registry), "b" in registry) == (second, 2, True)
    assert registry.unregister("a")
    assert not registry.unregister("a")
    assert registry.members("g") == (second,)
    assert registry.members("a") == ()
    assert list(registry) == [second]


def test_a_name_means_one_thing() -> None:
    registry = EndpointRegistry()
    registry.register(endpoint("a", group="g"))

    with pytest.raises(DuplicateHandlerError):
        registry.register(endpoint("a"))
    with pytest.raises(DuplicateHandlerError):
        registry.register(endpoint("g"))
    with pytest.raises(ConfigurationError, match="Rename one"):
        registry.register(endpoint("b", group="a"))


def test_endpoints_are_found_by_pattern_tag_and_topic() -> None:
    registry = EndpointRegistry()
    north = registry.register(
        endpoint("shop.billing.1", tags={"zone": "north"}, topics=["shop.billing.*"])
    )
    south = registry.register(
        endpoint("shop.billing.2", tags={"zone": "south", "big": "yes"}, topics=["shop.**"])
    )
    other = registry.register(endpoint("mail"))

    assert registry.discover("shop.billing.*") == [north, south]
    assert registry.discover(tags={"zone": "south"}) == [south]
    assert registry.discover("mail", tags={"zone": "south"}) == []
    assert registry.discover() == [north, south, other]
    assert registry.serving("shop.billing.total") == [north, south]
    assert registry.serving("shop.mail", tags={"big": "yes"}) == [south]


def test_a_weight_is_at_least_one() -> None:
    with pytest.raises(ConfigurationError, match="weight=0"):
        endpoint("a", weight=0)


@pytest.mark.stress("routing")
def test_readers_in_other_threads_see_a_whole_registry(evidence: Evidence) -> None:
    registry = EndpointRegistry()
    wrong: list[object] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            members = registry.members("crew")
            if len(members) > 10 or list(members) != sorted(members, key=lambda one: one.weight):
                wrong.append(members)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for turn in range(REGISTRY_TURNS):
        registry.register(endpoint(str(turn), group="crew", weight=turn + 1))
        registry.unregister(str(turn - 9))
    is_over.set()
    for reader in readers:
        reader.join()

    assert wrong == []
    assert len(registry) == 9
    evidence("endpoints registered while 4 threads read", changes=2 * REGISTRY_TURNS)


# -- balancing -----------------------------------------------------------------------------


async def test_round_robin_gives_to_one_after_the_other() -> None:
    crew = Crew()

    answers = await crew.send(1, 2, 3, 4)

    assert answers == ["w0 did 1", "w1 did 2", "w2 did 3", "w0 did 4"]


async def test_least_in_flight_gives_to_the_idlest() -> None:
    crew = Crew(balancing="least_in_flight")
    crew.workers[0].is_hanging = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(crew.send, "slow")
        await let_others_run()
        assert crew.workers[0].endpoint.in_flight == 1
        await crew.send(*range(10))
        crew.workers[0].release.set()

    assert crew.counts == [1, 5, 5]


async def test_weights_share_the_work_in_proportion_and_without_bursts() -> None:
    crew = Crew(weights=(5, 1, 1), balancing="weighted")

    answers = await crew.send(*range(14))

    assert crew.counts == [10, 2, 2]
    order = "".join(answer[1] for answer in answers)
    assert order == "00102000010200"


async def test_a_key_always_goes_to_the_same_endpoint() -> None:
    crew = Crew(balancing="by_key")
    again = Crew(balancing="by_key")
    deposits = [Deposit(account=str(number)) for number in range(300)]

    await crew.send(*deposits, *deposits)
    await again.send(*deposits)

    for one, other in zip(crew.workers, again.workers, strict=True):
        assert {event.account for event in one.got} == {event.account for event in other.got}
    assert min(crew.counts) > 150
    assert sum(crew.counts) == 600


def test_only_the_keys_of_a_lost_endpoint_move() -> None:
    endpoints = [endpoint(name) for name in "abcde"]
    keys = [str(number) for number in range(1000)]
    balancer = make_balancer("by_key")

    before = {key: balancer.order(endpoints, key)[0].endpoint_id for key in keys}
    after = {key: balancer.order(endpoints[1:], key)[0].endpoint_id for key in keys}

    moved = {key for key in keys if before[key] != after[key]}
    assert moved == {key for key in keys if before[key] == "a"}
    assert len(set(Counter(after[key] for key in moved))) == 4  # spread over all that are left


def test_the_stable_hash_is_written_down() -> None:
    endpoints = [endpoint(name) for name in "abc"]

    order = make_balancer("by_key").order(endpoints, "account-1")

    # Another order would send every key of a running system elsewhere.
    assert [one.endpoint_id for one in order] == ["c", "a", "b"]


@pytest.mark.parametrize("name", BALANCERS)
def test_every_balancer_gives_all_endpoints_once(name: str) -> None:
    endpoints = [endpoint(letter, weight=2) for letter in "abcd"]
    balancer = make_balancer(name)

    for key in (None, "k", None):
        assert sorted(balancer.order(endpoints, key), key=id) == sorted(endpoints, key=id)
    assert list(balancer.order(endpoints[:1], None)) == endpoints[:1]


def test_an_unknown_balancer_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match="round_robin, least_in_flight"):
        make_balancer("random")


# -- failover ------------------------------------------------------------------------------


async def test_a_lost_worker_loses_no_message() -> None:
    crew = Crew()
    crew.workers[1].error = ConnectionError("gone")

    answers = await crew.send(*range(90))

    assert len(answers) == 90
    assert crew.counts[1] == 0
    assert sum(crew.counts) == 90
    # After five failures it is left alone, rather than tried for every third message.
    assert crew.workers[1].endpoint.failed == 5


@pytest.mark.parametrize("balancing", ["round_robin", "least_in_flight", "weighted"])
async def test_the_share_of_a_lost_worker_is_spread_over_all_others(balancing: str) -> None:
    crew = Crew(weights=(1, 1, 1, 1), balancing=balancing)
    crew.workers[1].error = ConnectionError("gone")

    await crew.send(*range(300))

    assert crew.counts[1] == 0
    assert max(crew.counts) - min(crew.counts[0], *crew.counts[2:]) <= 5


async def test_a_weighted_worker_that_is_back_does_not_get_everything() -> None:
    clock = VirtualClock()
    crew = Crew(weights=(1, 1, 1), balancing="weighted", clock=clock)
    crew.workers[0].error = ConnectionError("gone")
    await crew.send(*range(300))
    crew.workers[0].error = None
    await clock.advance(30)

    await crew.send(*range(30))

    assert 9 <= crew.counts[0] <= 12


async def test_a_worker_that_is_back_gets_work_again() -> None:
    clock = VirtualClock()
    crew = Crew(clock=clock)
    crew.workers[1].error = ConnectionError("gone")
    await crew.send(*range(30))

    crew.workers[1].error = None
    await crew.send(*range(30))
    assert crew.counts[1] == 0
    await clock.advance(30)
    await crew.send(*range(30))

    assert crew.counts[1] == 10
    assert [type(event).__name__ for event in crew.events] == [
        "EndpointUnhealthyEvent",
        "EndpointRecoveredEvent",
    ]


async def test_an_answer_that_is_an_error_is_no_reason_to_ask_another() -> None:
    crew = Crew()
    crew.workers[0].error = LookupError("no such order")

    with pytest.raises(LookupError, match="no such order"):
        await crew.send(1)

    assert crew.counts == [0, 0, 0]


async def test_a_refusal_says_nothing_against_the_endpoint() -> None:
    crew = Crew()
    crew.workers[0].error = Refusal("sold out")

    for _ in range(30):
        with pytest.raises(Refusal):
            await crew.pool.deliver("w0", EventEnvelope(1))

    assert crew.monitor.is_healthy("w0")


async def test_a_worker_that_hangs_is_passed_by_after_its_time() -> None:
    clock = VirtualClock()
    crew = Crew(clock=clock, timeout=2)
    crew.workers[0].is_hanging = True
    answers: list[Any] = []

    async def send() -> None:
        answers.extend(await crew.send("job"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        await clock.advance(2)

    assert answers == ["w1 did job"]
    assert crew.workers[0].endpoint.in_flight == 0


async def test_when_all_are_lost_the_error_says_what_each_did() -> None:
    crew = Crew()
    for worker in crew.workers:
        worker.error = ConnectionError("amqp://bob:hunter2@host is gone")

    with pytest.raises(EndpointFailedError) as caught:
        await crew.send(1)

    assert [name for name, _ in caught.value.attempts] == ["w0", "w1", "w2"]
    assert "hunter2" not in str(caught.value)
    assert isinstance(caught.value.__cause__, ConnectionError)


async def test_when_all_are_out_of_order_nothing_is_sent() -> None:
    crew = Crew(monitor={"breaker": CircuitBreakerConfig(failure_threshold=1, jitter=0)})
    for worker in crew.workers:
        worker.error = ConnectionError("gone")
    with pytest.raises(EndpointFailedError):
        await crew.send(1)

    with pytest.raises(NoHealthyEndpointError) as caught:
        await crew.send(2)

    assert caught.value.reasons == dict.fromkeys(("w0", "w1", "w2"), "its circuit is open")
    assert 0 < caught.value.retry_after <= 30
    assert [worker.endpoint.failed for worker in crew.workers] == [1, 1, 1]


async def test_a_name_that_nobody_has_is_said() -> None:
    with pytest.raises(MissingEndpointError, match="'nobody'"):
        await Crew().pool.deliver("nobody", EventEnvelope(1))


async def test_a_cancelled_delivery_says_nothing_against_the_endpoint() -> None:
    crew = Crew()
    crew.workers[0].is_hanging = True

    for _ in range(10):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(crew.pool.deliver, "w0", EventEnvelope(1))
                await let_others_run()
                scope.cancel()

    one = crew.workers[0].endpoint
    assert (one.in_flight, one.failed, one.delivered) == (0, 0, 0)
    assert crew.events == []


# -- bounds --------------------------------------------------------------------------------


async def test_deliveries_under_way_are_really_bounded() -> None:
    running = most = done = 0
    go = anyio.Event()

    async def send(envelope: EventEnvelope[Any]) -> None:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        await go.wait()
        running -= 1
        done += 1

    endpoints = EndpointRegistry()
    endpoints.register(Endpoint("one", send))
    pool = EndpointPool(endpoints, max_deliveries=7)
    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(pool.deliver, "one", EventEnvelope(number))
        await let_others_run()
        assert running == 7
        go.set()

    assert (most, done) == (7, 50)


def test_the_defaults_are_those_that_are_written_down() -> None:
    pool = EndpointPool(EndpointRegistry())

    assert (pool.max_deliveries, pool.max_message_size) == (1000, 1024 * 1024)
    with pytest.raises(ConfigurationError, match="max_deliveries"):
        EndpointPool(EndpointRegistry(), max_deliveries=0)


@pytest.mark.parametrize(
    ("payload", "size"),
    [(b"abc", 3), ("äb", 3), (Deposit(account="x"), 15), ({"a": 1}, 7), (object(), None)],
)
def test_a_payload_is_measured_as_it_travels(payload: object, size: int | None) -> None:
    assert size_of(payload) == size or size is None


async def test_a_message_that_is_too_large_reaches_nobody() -> None:
    crew = Crew()
    largest = "x" * (1024 * 1024)

    await crew.send(largest)
    with pytest.raises(MessageTooLargeError, match="has 1,048,577 bytes; at most 1,048,576") as e:
        await crew.send(largest + "x")

    assert (e.value.size, e.value.max_size) == (1_048_577, 1_048_576)
    assert crew.counts == [1, 0, 0]


async def test_a_single_endpoint_may_have_no_group() -> None:
    endpoints = EndpointRegistry()
    worker = Worker("alone")
    endpoints.register(worker.endpoint)

    assert await EndpointPool(endpoints, timeout=None).deliver("alone", EventEnvelope(1)) == (
        "alone did 1"
    )
