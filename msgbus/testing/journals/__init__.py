"""The parts of the conformance suite of journals; `msgbus.testing.journal` puts them together."""
