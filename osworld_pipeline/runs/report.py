"""Gathers what the HTML report shows: scores and filmstrips from the tables, curves from MLflow."""

from collections.abc import Collection
from pathlib import Path

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.curves import MetricPoint
from osworld_pipeline.evaluation.report import write_report
from osworld_pipeline.lineage.tracking import metric_history
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.runs.evaluation_plan import plan_evaluation
from osworld_pipeline.runs.stages import recipe_suite
from osworld_pipeline.tables.checkpoints import read_checkpoints

CURVES = ("loss", "kl", "trainer_sampler_logprob_diff")


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
