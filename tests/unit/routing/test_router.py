"""PatternRouter: priority across all kinds of routes, snapshots, caches, many threads."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from msgbus import ConfigurationError
from msgbus.errors import InvalidTopicError
from msgbus.messages.topics.cache import RecentCache
from msgbus.routing import PatternRouter, Route, TopicPattern


def endpoints(router: PatternRouter, topic: str) -> list[str]:
    return [route.endpoint_id for route in router.find_all_routes(topic)]


# -- which routes, in which order --------------------------------------------------------------


def test_exact_routes_patterns_and_expressions_are_all_found() -> None:
    router = PatternRouter()
    for number, pattern in enumerate(
        ["shop.orders", "shop.*", "shop.**", "**", "*.orders", "shop.ord*", "re:shop\\..*", "other"]
    ):
        router.register_route(pattern, str(number))

    assert endpoints(router, "shop.orders") == ["0", "1", "2", "3", "4", "5", "6"]
    assert endpoints(router, "shop") == ["2", "3"]
    assert endpoints(router, "other") == ["3", "7"]


def test_higher_priority_comes_first_across_all_kinds_then_registration_order() -> None:
    router = PatternRouter()
    router.register_route("shop.orders", "exact", priority=1)
    router.register_route("shop.*", "pattern", priority=5)
    router.register_route("re:shop.*", "expression", priority=9)
    router.register_route("shop.**", "also 5", priority=5)
    router.register_route("shop.orders", "negative", priority=-1)
    router.register_route("shop.orders", "exact again", priority=1)

    assert endpoints(router, "shop.orders") == [
        "expression",
        "pattern",
        "also 5",
        "exact",
        "exact again",
        "negative",
    ]


@pytest.mark.parametrize("first", ["exact", "pattern"])
def test_an_exact_route_never_beats_a_pattern_of_higher_priority(first: str) -> None:
    router = PatternRouter()
    routes = {"exact": ("shop.orders", 0), "pattern": ("shop.*", 1)}
    for name in sorted(routes, reverse=first == "pattern"):
        pattern, priority = routes[name]
        router.register_route(pattern, name, priority)

    found = router.find_route("shop.orders")

    assert found is not None
    assert found.endpoint_id == "pattern"


def test_find_route_is_the_first_of_all_routes_or_nothing() -> None:
    router = PatternRouter()
    router.register_route("shop.**", "audit")
    router.register_route("shop.orders.*", "orders")

    found = router.find_route("shop.orders.placed")

    assert found is router.find_all_routes("shop.orders.placed")[0]
    assert router.find_route("elsewhere") is None
    assert router.find_all_routes("elsewhere") == []


def test_a_route_says_what_it_is() -> None:
    route = PatternRouter().register_route("shop.*", "orders", 3)

    assert (route.pattern, route.endpoint_id, route.priority) == ("shop.*", "orders", 3)
    assert route.matches("shop.x")
    assert not route.matches("shop")
    assert route.kind.value == "wildcard"


def test_text_that_is_no_topic_has_no_route() -> None:
    router = PatternRouter()
    router.register_route("**", "everything")
    router.register_route("re:(?s).*", "expression")

    for text in ("", "a..b", "a\n", ".", "a."):
        assert router.find_route(text) is None
        assert router.find_all_routes(text) == []


def test_case_is_the_routers_choice() -> None:
    ignoring, minding = PatternRouter(), PatternRouter(case_sensitive=True)
    for router in (ignoring, minding):
        for pattern in ("shop.orders", "shop.*", "shop.o?ders", "re:shop\\.orders"):
            router.register_route(pattern, pattern)

    assert len(ignoring.find_all_routes("SHOP.Orders")) == 4
    assert minding.find_all_routes("SHOP.Orders") == []
    assert len(minding.find_all_routes("shop.orders")) == 4


def test_a_ready_pattern_is_taken_if_it_treats_case_alike() -> None:
    router = PatternRouter()

    assert router.register_route(TopicPattern("a.*"), "x").pattern == "a.*"
    with pytest.raises(ConfigurationError, match="case_sensitive"):
        router.register_route(TopicPattern("a.*", case_sensitive=True), "x")


def test_a_bad_pattern_is_refused_and_leaves_nothing_behind() -> None:
    router = PatternRouter()

    with pytest.raises(InvalidTopicError) as caught:
        router.register_route("shop.[", "x")

    assert caught.value.position == 5
    assert len(router) == 0
    assert router.routes == ()


# -- no stale answers --------------------------------------------------------------------------


def test_asking_for_one_route_does_not_shrink_the_answer_for_all() -> None:
    router = PatternRouter()
    router.register_route("shop.*", "one")
    router.register_route("shop.**", "two")

    for _ in range(2):
        assert router.find_route("shop.orders") is not None
        assert endpoints(router, "shop.orders") == ["one", "two"]
        assert router.find_route("shop.orders") is not None


def test_a_change_is_seen_at_once_by_both_questions() -> None:
    router = PatternRouter()
    low = router.register_route("shop.*", "low")
    assert router.find_route("shop.a") is low
    assert router.find_route("other.a") is None

    high = router.register_route("**", "high", 1)
    assert router.find_route("shop.a") is high
    assert router.find_route("other.a") is high
    assert router.find_all_routes("shop.a") == [high, low]

    assert router.unregister(high)
    assert router.find_route("shop.a") is low
    assert router.find_route("other.a") is None
    assert router.find_all_routes("shop.a") == [low]


def test_a_caller_may_change_the_list_it_was_given() -> None:
    router = PatternRouter()
    router.register_route("**", "one")

    router.find_all_routes("a").clear()

    assert endpoints(router, "a") == ["one"]


def test_a_route_is_unregistered_once() -> None:
    router = PatternRouter()
    route = router.register_route("a", "x")
    same = router.register_route("a", "x")

    assert router.unregister(route)
    assert not router.unregister(route)
    assert router.find_all_routes("a") == [same]
    assert not PatternRouter().unregister(same)


def test_all_routes_of_an_endpoint_go_at_once() -> None:
    router = PatternRouter()
    for pattern in ("a", "a.*", "re:a.*"):
        router.register_route(pattern, "gone")
    kept = router.register_route("**", "kept")

    assert router.unregister_endpoint("gone") == 3
    assert router.unregister_endpoint("gone") == 0
    assert router.find_all_routes("a") == [kept]
    assert router.routes == (kept,)


def test_routes_that_come_and_go_leave_nothing_behind() -> None:
    router = PatternRouter()
    kept = router.register_route("kept.**", "kept")
    sizes: list[int] = []

    for number in range(2_000):
        route = router.register_route(f"job.{number}.*", "job")
        assert router.find_route(f"job.{number}.x") is route
        router.unregister(route)
        if number % 200 == 199:
            sizes.append(nodes(router))

    assert router.find_route("kept.x") is kept
    assert max(sizes) < 300
    assert len(router) == 1


def test_making_room_again_happens_only_now_and_then() -> None:
    router = PatternRouter()
    made: list[object] = []

    for number in range(2_000):
        router.unregister(router.register_route(f"job.{number}", "job"))
        index = router._snapshot.index  # pyright: ignore[reportPrivateUsage]
        if not made or made[-1] is not index:
            made.append(index)

    assert 2 <= len(made) <= 2_000 / 60


def nodes(router: PatternRouter) -> int:
    """How many places the trie has, by walking all of it."""
    pending = [router._snapshot.index._root]  # pyright: ignore[reportPrivateUsage]
    found = 0
    while pending:
        node = pending.pop()
        found += 1
        pending += [one for one in (node.one, node.many, *node.texts.values()) if one is not None]
    return found


# -- bounds ------------------------------------------------------------------------------------


def test_the_caches_are_bounded() -> None:
    router = PatternRouter(cache_size=100)
    router.register_route("**", "x")

    for number in range(5_000):
        router.find_route(f"a.{number}")
        router.find_all_routes(f"a.{number}")

    snapshot = router._snapshot  # pyright: ignore[reportPrivateUsage]
    assert len(snapshot.first) <= 100
    assert len(snapshot.every) <= 100


def test_a_cache_keeps_what_is_in_use_through_a_flood() -> None:
    cache: RecentCache[str, int] = RecentCache(20)
    cache.put("used", 1)

    for number in range(1_000):
        cache.put(f"once.{number}", number)
        assert cache.get("used") == 1
        assert len(cache) <= 20
    assert cache.get("once.0") is None


def test_a_cache_without_room_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cache_size"):
        PatternRouter(cache_size=1)


def seconds_to_register(number: int) -> float:
    router = PatternRouter()
    began = time.process_time()
    for index in range(number):
        router.register_route(f"shop.{index}.*", "x")
        router.find_route("shop.1.x")
    return time.process_time() - began


def test_registering_is_not_quadratic_even_with_questions_in_between() -> None:
    few, many = (min(seconds_to_register(number) for _ in range(5)) for number in (500, 5_000))

    # 10 times as many: 10 if linear, 100 if each registration copied what is there.
    assert many / few < 40


# -- threads -------------------------------------------------------------------------------------


class Reader(threading.Thread):
    """Asks without pause, and notes the first answer that cannot be right."""

    def __init__(self, router: PatternRouter, base: Route) -> None:
        super().__init__(daemon=True)
        self.router = router
        self.base = base
        self.stopping = threading.Event()
        self.has_read = threading.Event()
        self.fault = ""

    def run(self) -> None:
        reads = 0
        while not self.stopping.is_set() and not self.fault:
            self.fault = self.ask(f"shop.{reads % 97}.x")
            reads += 1
            if reads == 50 or self.fault:
                self.has_read.set()

    def ask(self, topic: str) -> str:
        first, every = self.router.find_route(topic), self.router.find_all_routes(topic)
        if first is not self.base or self.base not in every:
            return f"{topic}: lost the route that is always there: {first} {every}"
        if not all(route.matches(topic) for route in every):
            return f"{topic}: a route that does not match: {every}"
        keys = [(-route.priority, route.order) for route in every]
        return "" if keys == sorted(keys) else f"{topic}: out of order: {every}"


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Threads take turns far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("busy_threads")
def test_many_threads_read_while_another_registers() -> None:
    router = PatternRouter(cache_size=64)
    base = router.register_route("shop.**", "base", priority=100)
    readers = [Reader(router, base) for _ in range(6)]
    for reader in readers:
        reader.start()

    added = [
        router.register_route(pattern, "more", priority=number % 7)
        for number in range(300)
        for pattern in (f"shop.{number % 97}.*", f"shop.*.x{number}", f"shop.{number}*.?")
    ]
    for route in added[::2]:
        assert router.unregister(route)
    expected = [
        [route for route in router.routes if route.matches(f"shop.{number}.x")]
        for number in range(97)
    ]
    for reader in readers:
        assert reader.has_read.wait(30)
        reader.stopping.set()
        reader.join()

    assert [reader.fault for reader in readers] == [""] * len(readers)
    for number, routes in enumerate(expected):
        assert set(router.find_all_routes(f"shop.{number}.x")) == set(routes)
    assert len(router) == 1 + len(added) // 2


def test_several_threads_register_and_nothing_is_lost() -> None:
    router = PatternRouter()
    made: list[list[object]] = [[] for _ in range(8)]

    def register(writer: int) -> None:
        for number in range(200):
            made[writer].append(router.register_route(f"w{writer}.{number}.*", "x"))

    threads = [threading.Thread(target=register, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(router) == 1_600
    assert len({route.order for route in router.routes}) == 1_600
    for writer in range(8):
        for number, route in enumerate(made[writer]):
            assert router.find_all_routes(f"w{writer}.{number}.x") == [route]


# -- readable ------------------------------------------------------------------------------------


def test_a_router_shows_how_many_routes_it_has() -> None:
    router = PatternRouter()
    router.register_route("a", "x")

    assert repr(router) == "<PatternRouter of 1 routes>"


def test_a_route_knows_when_it_was_registered() -> None:
    """Point 13."""
    before = datetime.now(UTC)

    route = PatternRouter().register_route("shop.**", "stock")

    assert before <= route.created_at <= datetime.now(UTC)
    assert route.created_at.tzinfo is UTC
