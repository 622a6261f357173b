"""The tests of msgbus."""
