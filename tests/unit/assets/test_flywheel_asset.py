"""The flywheel as an asset: the checkpoint it gives without a round, and what it shows of the rounds that were run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest

from assets.checkpoints import flywheel_checkpoint, flywheel_result
from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.runs.checkpoints.ids import CARD, checkpoint_card
from osworld_pipeline.runs.flywheel.plan import FlywheelResult, Measurement, Round
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.tables.checkpoints import upsert_checkpoint
from osworld_pipeline.tables.owned import write_table
from resources.desktops import DesktopsResource
from resources.engine import EngineResource
from resources.launcher import Launcher
from resources.progress import ProgressResource
from resources.start import StartResource
from resources.state import RecipeResource, StateResource
from resources.tracking import TrackingResource

SFT = Checkpoint(
    checkpoint_id="sft-1",
    stage=Stage.SFT,
    parent_id="base-1",
    path="checkpoints/sft-1",
    num_updates=4,
    recipe_digest="r",
    data_digest="d",
    weights_digest="weights-of-sft",
)


class NoDesktops(DesktopsResource):
    @contextmanager
    def serve(self, state: StateDir, recipe: Recipe, *, run_id: str) -> Iterator[EnvServers]:
        raise AssertionError("a desktop was asked for")
        yield


def test_without_a_round_the_flywheel_gives_the_sft_checkpoint_and_needs_no_desktop(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    (state.root / SFT.path).mkdir(parents=True)
    (state.root / SFT.path / CARD).write_text(json.dumps(checkpoint_card(SFT)))
    upsert_checkpoint(state, SFT)
    write_table(state, "train_tasks", [{"task_id": "t", "domain": "os", "task_config": "{}"}])
    with dg.DagsterInstance.ephemeral() as instance:
        instance.report_runless_asset_event(
            dg.AssetMaterialization("sft_checkpoint", metadata={"checkpoint_id": SFT.checkpoint_id})
        )
        result = dg.materialize(
            [flywheel_checkpoint],
            instance=instance,
            resources={
                "state": StateResource(path=str(state.root)),
                "recipe": RecipeResource(name="smoke"),
                "desktops": NoDesktops(),
                "engine": EngineResource(),
                "launcher": Launcher(),
                "tracking": TrackingResource(),
                "progress": ProgressResource(),
                "start": StartResource(),
            },
        )
    (event,) = result.get_asset_materialization_events()
    shown = event.step_materialization_data.materialization
    assert shown.metadata["checkpoint_id"].value == "sft-1"
    assert shown.metadata["stopped"].value == "the recipe has no round"
    assert (shown.tags or {})["dagster/data_version"] == "weights-of-sft"
    assert [path.name for path in state.checkpoints.iterdir() if path.is_dir()] == ["sft-1"], "nothing was copied"


def test_rounds_are_shown_with_what_they_measured_and_made(tmp_path: Path) -> None:
    made = replace(SFT, checkpoint_id="flywheel-1", stage=Stage.FLYWHEEL, parent_id="sft-1", weights_digest="w1")
    first = Round(
        number=1,
        round_id="flywheel-1",
        parent=SFT,
        measured=Measurement(num_valid=4, num_kept=1, num_episodes=5),
        checkpoint=made,
    )
    second = Round(
        number=2, round_id="flywheel-2", parent=made, measured=Measurement(num_valid=4, num_kept=0, num_episodes=4)
    )
    shown = flywheel_result(
        FlywheelResult(checkpoint=SFT, rounds=(first, second), stopped="round 2 was the last"),
        StateDir(tmp_path),
        num_run=1,
    )
    assert shown.metadata is not None
    table = shown.metadata["by round"].value
    assert "| 1 | sft-1 | 25.0% | 1 | 4 | flywheel-1 |" in table
    assert "| 2 | flywheel-1 | 0.0% | 0 | 4 | none |" in table
    assert (shown.metadata["rounds"], shown.metadata["rounds run now"]) == (2, 1)


def test_desktops_come_from_the_resource_or_else_the_recipe() -> None:
    recipe = load_recipe("smoke", environ={"OSWORLD_SERVER_URL": "http://a:1,http://b:2"})
    with DesktopsResource().serve(StateDir(Path("nowhere")), recipe, run_id="r") as servers:
        assert servers.urls == ("http://a:1", "http://b:2")
    with DesktopsResource(urls=["http://c:3"]).serve(StateDir(Path("nowhere")), recipe, run_id="r") as servers:
        assert servers.urls == ("http://c:3",)
    assert DesktopsResource().identity(recipe) is None, "remote desktops must be asked"


@pytest.mark.parametrize("environment", [{}, {"OSWORLD_MAX_TURNS": "6"}])
def test_the_recipe_resource_applies_its_settings_and_environment(environment: dict[str, str]) -> None:
    source = RecipeResource(
        name="qwen3vl_4b_lora", settings=["gspo.group_size=6"], environment={"OSWORLD_TIMEOUT": "77", **environment}
    )
    recipe = source.load()
    assert (recipe.gspo.group_size, recipe.gspo.episode_timeout_s) == (6, 77.0)
    assert recipe.agent.max_turns == 8, "the file's"
    small = RecipeResource(name="qwen3vl_4b_lora", smoke=True, environment=environment).load()
    assert small.model.kind == "tiny"
