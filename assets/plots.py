"""Plots in the Dagster metadata of an asset."""

import base64

import dagster as dg

from osworld_pipeline.domain.checkpoint import Ancestor, Checkpoint
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TrackingError
from osworld_pipeline.evaluation.training_record import MetricPoint
from osworld_pipeline.web.charts.metrics import stage_charts
from osworld_pipeline.web.charts.picture import draw_picture
from resources.tracking import TrackingResource

SHOWN = (
    "success_rate",
    "task_reward",
    "loss",
    "kl",
    "trainer_sampler_logprob_diff",
    "entropy",
    "clipped_share",
    "grad_norm",
    "environments_busy",
)


def training_curves(
    context: dg.AssetExecutionContext, tracking: TrackingResource, state: StateDir, checkpoint: Checkpoint
) -> dict[str, dg.MetadataValue]:
    """The training curves of the stage that made a checkpoint, over all its attempts; empty if MLflow has none. If
    MLflow does not respond, the plot is omitted and the asset still succeeds."""
    stage = Ancestor.parse(checkpoint.checkpoint_id).stage_key
    try:
        history = tracking.history_of(state, stage, SHOWN)
    except TrackingError as error:
        context.log.warning(f"no curves are shown: {error}")
        return {}
    points = [
        MetricPoint(stage=str(checkpoint.stage), update=update, name=name, value=value)
        for name, update, value in history
    ]
    charts = [chart for _, found in stage_charts(points) for chart in found]
    return {"curves": dg.MetadataValue.md(inline_picture("curves", draw_picture(charts)))} if charts else {}


def inline_picture(name: str, svg: str) -> str:
    """Markdown with the image inline."""
    return f"![{name}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"
