"""Resilience: retry, circuit breaker, dead letters and the bus that assembles them."""
