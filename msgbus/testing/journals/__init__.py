"""The parts of the conformance suite of journals; `msgbus.testing.conformance.journal` puts them together."""
