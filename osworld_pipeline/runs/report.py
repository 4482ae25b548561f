"""Gathers what the HTML report shows: scores and filmstrips from the tables, curves from MLflow."""

from collections.abc import Collection, Sequence
from pathlib import Path

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.evaluation.curves import MetricPoint
from osworld_pipeline.evaluation.report import write_report
from osworld_pipeline.evaluation.scores import read_evals
from osworld_pipeline.lineage.tracking import metric_history
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.runs.evaluation_plan import plan_evaluation
from osworld_pipeline.runs.registered import all_checkpoints, register_checkpoint
from osworld_pipeline.runs.stages import recipe_suite
from osworld_pipeline.tables.checkpoints import read_checkpoints

CURVES = ("loss", "kl", "trainer_sampler_logprob_diff")


def reported_checkpoints(state: StateDir, recipe: Recipe, named: Sequence[str]) -> list[str]:
    """Those of `named`, or of all where none is, that were evaluated on the recipe's held-out tasks.

    Raises:
        TableError: one is not there, or none was evaluated so.
    """
    ids = [register_checkpoint(state, name).checkpoint_id for name in named]
    ids = ids or [checkpoint.checkpoint_id for checkpoint in all_checkpoints(state)]
    keys = {plan_evaluation(recipe, checkpoint_id).stage_key: checkpoint_id for checkpoint_id in ids}
    evaluated = {row.stage_key for row in read_evals(state, stage_keys=keys)}
    found = [checkpoint_id for key, checkpoint_id in keys.items() if key in evaluated]
    if not found:
        raise TableError(
            f"no checkpoint of {state.root} was evaluated on the held-out tasks of recipe {recipe.name} with these "
            "settings: run osworld-pipeline evaluate, or name the recipe that it was run with"
        )
    return found


def make_report(state: StateDir, recipe: Recipe, *, checkpoint_ids: Collection[str], tracking_uri: str) -> Path:
    """Writes `reports/report.html` of these checkpoints; returns its path."""
    metrics = [
        MetricPoint(stage=str(checkpoint.stage), name=name, update=update, value=value)
        for checkpoint in read_checkpoints(state)
        if checkpoint.checkpoint_id in checkpoint_ids
        for name, update, value in metric_history(tracking_uri, checkpoint.checkpoint_id, CURVES)
    ]
    return write_report(
        state,
        metrics=metrics,
        suite_digest=recipe_suite(recipe).digest,
        recipe_name=recipe.name,
        confidence=recipe.evaluation.confidence,
        stage_keys=[plan_evaluation(recipe, checkpoint_id).stage_key for checkpoint_id in checkpoint_ids],
    )
