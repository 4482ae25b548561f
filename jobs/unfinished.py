"""Queued and running runs, however they were started: a materialization or backfill from the UI does not use our
jobs."""

import dagster as dg

from assets.evaluations import CHECKPOINT_ASSETS
from assets.keys import key_of

EVALUATIONS = key_of("evaluations")
CHECKPOINTS = frozenset(key_of(name) for name in CHECKPOINT_ASSETS)
UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
EVALUATING, TRAINING = ("evaluate",), ("retrain", "train", "run_flywheel")
"""Jobs."""


def num_evaluating(instance: dg.DagsterInstance) -> int:
    """Queued and running runs that evaluate checkpoints."""
    return _count(instance, EVALUATING, frozenset({EVALUATIONS}))


def num_training(instance: dg.DagsterInstance) -> int:
    """Queued and running runs that make checkpoints."""
    return _count(instance, TRAINING, CHECKPOINTS)


def _count(instance: dg.DagsterInstance, jobs: tuple[str, ...], assets: frozenset[dg.AssetKey]) -> int:
    runs = instance.get_runs(dg.RunsFilter(statuses=UNFINISHED))
    return sum(run.job_name in jobs or bool(assets & (run.asset_selection or frozenset())) for run in runs)
