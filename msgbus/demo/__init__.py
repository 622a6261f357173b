"""A small shop at load in the terminal: `python -m msgbus.demo`."""
