"""Conformance suite of the journal ports: tests that every engine must pass.

`engine.EngineConformance` is all of it; `damage` has what an engine with files must pass too.
Imported by tests only; needs no test framework.
"""
