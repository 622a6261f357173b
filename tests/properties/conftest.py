"""The properties of the core hold on a plain bus and on a resilient one."""

from __future__ import annotations

from tests.unit.conftest import kind_of_bus, pytest_generate_tests

__all__ = ["kind_of_bus", "pytest_generate_tests"]
