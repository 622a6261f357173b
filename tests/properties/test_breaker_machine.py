"""A circuit breaker against a simple model of it, in any order of events."""

from __future__ import annotations

import math

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from msgbus import Refusal
from msgbus.resilience import (
    CircuitBreaker,
    CircuitBreakerConfig,
    CircuitOpenError,
    CircuitState,
    Permit,
)
from msgbus.runtime.clock import VirtualClock

THRESHOLD, RECOVERY, GROWTH, LONGEST = 3, 10.0, 2.0, 60.0
PERMITS, LEASE = 2, 7.0


class HandClock(VirtualClock):
    """Time that a rule moves; nothing here sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


class Model:
    """What a breaker should be, written down as plainly as possible."""

    def __init__(self) -> None:
        self.state = "closed"
        self.era = 0
        """Grows with every change of state: a call speaks only of its own era."""
        self.row = 0
        self.opened_by = 0
        """Failures that opened it."""
        self.growths = 0
        self.probe: str | None = None
        """The last message that failed as a probe, and may go on with its retries."""
        self.probes = 0
        self.until = 0.0
        self.successes = 0
        self.leases: dict[int, float] = {}

    def change(self, state: str) -> None:
        self.state = state
        self.era += 1
        self.row = self.successes = 0
        self.leases = {}

    def open(self, now: float) -> None:
        self.change("open")
        self.until = now + min(RECOVERY * GROWTH**self.growths, LONGEST)

    def close(self) -> None:
        self.growths = self.probes = 0
        self.probe = None
        self.change("closed")

    @property
    def failures(self) -> int:
        return self.row if self.state == "closed" else self.opened_by

    def lets_in(self, now: float, message: str | None) -> bool:
        if self.state == "closed":
            return True
        if self.state == "open" and now >= self.until:
            self.change("half_open")
        if self.state == "open" and (message is None or message != self.probe):
            return False
        if len(self.leases) < PERMITS:
            return True
        self.leases = {call: end for call, end in self.leases.items() if end > now}
        return len(self.leases) < PERMITS

    def succeeded(self) -> None:
        if self.state == "closed":
            self.row = 0
            return
        self.successes += 1
        if self.successes == PERMITS:
            self.close()

    def failed(self, now: float, message: str | None) -> None:
        if self.state == "half_open":
            if message is None:
                self.growths += 1
            elif message != self.probe:
                self.probes += 1
                self.growths += self.probes > THRESHOLD
            self.probe = message
            self.open(now)
        elif self.state == "closed":
            self.row += 1
            if self.row == THRESHOLD:
                self.opened_by = self.row
                self.open(now)


class BreakerMachine(RuleBasedStateMachine):
    """Begins and ends calls in any order, and moves time in between."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = HandClock()
        self.model = Model()
        self.breaker = CircuitBreaker(
            CircuitBreakerConfig(
                failure_threshold=THRESHOLD,
                recovery_time=RECOVERY,
                recovery_growth=GROWTH,
                max_recovery_time=LONGEST,
                half_open_max=PERMITS,
                permit_timeout=LEASE,
                jitter=0,
                ignore=(KeyError,),
            ),
            clock=self.clock,
        )
        self.calls: dict[int, tuple[Permit, int]] = {}
        self.begun = 0

    @rule(message=st.sampled_from([None, "a", "b", "c"]))
    def begin(self, message: str | None) -> None:
        expected = self.model.lets_in(self.clock.now(), message)
        try:
            permit = self.breaker.acquire(message)
        except CircuitOpenError:
            assert not expected
            assert self.breaker.retry_after > 0
            return
        assert expected
        self.begun += 1
        self.calls[self.begun] = (permit, self.model.era)
        if self.model.state != "closed":
            self.model.leases[self.begun] = self.clock.now() + LEASE

    def end(self, data: st.DataObject) -> tuple[Permit, bool]:
        """Take one of the calls under way; whether the model still listens to it."""
        call = data.draw(st.sampled_from(sorted(self.calls)))
        permit, era = self.calls.pop(call)
        self.model.leases.pop(call, None)
        return permit, era == self.model.era

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def succeed(self, data: st.DataObject) -> None:
        permit, is_heard = self.end(data)
        permit.success()
        if is_heard:
            self.model.succeeded()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        permit, is_heard = self.end(data)
        permit.failure(ConnectionError("down"))
        if is_heard:
            self.model.failed(self.clock.now(), permit.message_id)

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), error=st.sampled_from([KeyError("k"), Refusal("no")]))
    def be_answered(self, data: st.DataObject, error: Exception) -> None:
        permit, is_heard = self.end(data)
        permit.failure(error)
        if is_heard:
            self.model.succeeded()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def be_cancelled(self, data: st.DataObject) -> None:
        permit, _ = self.end(data)
        permit.release()
        permit.failure(ValueError("a second ending"))

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def be_lost(self, data: st.DataObject) -> None:
        """Never ends: its permit must expire by itself."""
        self.calls.pop(data.draw(st.sampled_from(sorted(self.calls))))

    @rule(seconds=st.sampled_from([0.5, 3.0, LEASE, RECOVERY, LONGEST]))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.seconds += seconds

    @rule()
    def force(self) -> None:
        self.breaker.force_open()
        self.model.opened_by = self.model.failures
        self.model.probe = None
        self.model.change("open")
        self.model.until = math.inf

    @rule()
    def reset(self) -> None:
        self.breaker.reset()
        if self.model.state != "closed":
            self.model.close()
        self.model.row = 0

    @invariant()
    def the_state_is_what_the_model_says(self) -> None:
        now = self.clock.now()
        due = self.model.state == "open" and now >= self.model.until
        assert self.breaker.state is CircuitState("half_open" if due else self.model.state)
        assert self.breaker.is_closed == (self.model.state == "closed")
        assert self.breaker.failures == self.model.failures

    @invariant()
    def never_more_permits_than_allowed_and_none_for_good(self) -> None:
        assert len(self.breaker._permits) <= PERMITS  # pyright: ignore[reportPrivateUsage]
        if self.breaker.state is CircuitState.HALF_OPEN:
            assert self.breaker.retry_after <= LEASE

    def teardown(self) -> None:
        """However it was left: in the end it can always be closed again."""
        if self.breaker.retry_after == math.inf:
            self.breaker.reset()
        self.clock.seconds += LONGEST
        for _ in range(PERMITS):
            self.breaker.acquire().success()
        assert self.breaker.state is CircuitState.CLOSED


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(max_examples=150, stateful_step_count=60)
