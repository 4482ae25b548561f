"""The asset that writes the reports: they cover this state folder alone, even if the instance has other checkpoints."""

from pathlib import Path

import dagster as dg
from episode_samples import make_episode

from assets.evaluations import evaluation_report
from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.evaluate.plan import plan_evaluation
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.checkpoints import upsert_checkpoint
from resources.state import RecipeResource, StateResource
from resources.tracking import TrackingResource


def test_reports_are_written_if_the_instance_also_has_checkpoints_of_another_state(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    here, elsewhere = "sft-000000000001", "base-0123456789ab"
    upsert_checkpoint(state, Checkpoint(
        checkpoint_id=here, stage=Stage.SFT, parent_id=None, path=here, num_updates=1, recipe_digest="",
        data_digest="", weights_digest="",
    ))  # fmt: skip
    for part, (task, plan) in plan_evaluation(load_recipe("smoke"), here).episodes.items():
        episode = make_episode(plan.episode_id, task_id=task.task_id, checkpoint_id=here, stage_key=plan.stage_key)
        TrajectoryStore(state).write_episodes(part, [episode])
    with dg.DagsterInstance.ephemeral() as instance:
        for asset, checkpoint_id in (("base_checkpoint", elsewhere), ("sft_checkpoint", here)):
            reported = dg.AssetMaterialization(asset_key=asset, metadata={"checkpoint_id": checkpoint_id})
            instance.report_runless_asset_event(reported)
        result = dg.materialize(
            [evaluation_report],
            instance=instance,
            resources={
                "state": StateResource(path=str(tmp_path)),
                "recipe": RecipeResource(name="smoke"),
                "tracking": TrackingResource(),
            },
        )
    assert result.success
    pages = {path.name.partition("-")[0] for path in state.reports.glob("*.html")}
    assert pages == {"report.html", "suite", "training", "index.html"}
    assert here in (state.reports / "report.html").read_text()
