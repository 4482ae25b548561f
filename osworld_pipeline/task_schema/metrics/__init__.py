"""Metrics: comparisons of the actual state with the expected state (`evaluator.func`). Names, defaults and scores are
OSWorld's; a file or a value that does not exist (None) scores 0."""

from collections.abc import Mapping

from osworld_pipeline.task_schema.metrics import desktop, files, texts, windows
from osworld_pipeline.task_schema.spec import Metric, collect

METRICS: Mapping[str, Metric] = collect(Metric, *map(vars, (desktop, files, texts, windows)))
