"""The built-in task suite `desktop-basics`: seeded instances of small families, each with an oracle that solves it."""

from osworld_pipeline.evaluation.suites.family import Family, OracleStep, Screen
from osworld_pipeline.evaluation.suites.suite import FAMILIES, Suite, SuiteTask, build_suite

__all__ = ["FAMILIES", "Family", "OracleStep", "Screen", "Suite", "SuiteTask", "build_suite"]
