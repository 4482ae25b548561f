"""The built-in task suites: seeded instances of small families, each with an oracle that solves it."""

from osworld_pipeline.evaluation.suites.family import Family, OracleStep, Screen
from osworld_pipeline.evaluation.suites.suite import FAMILIES, SUITES, Suite, SuiteTask, build_suite, needs_wine

__all__ = ["FAMILIES", "SUITES", "Family", "OracleStep", "Screen", "Suite", "SuiteTask", "build_suite", "needs_wine"]
