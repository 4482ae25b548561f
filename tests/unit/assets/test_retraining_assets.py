"""The flywheel and the GSPO phases from an existing checkpoint: where they start, what they may spend, and which
checkpoint a stage gives if its budget ended it."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from checkpoint_samples import lay_down, make_checkpoint
from replay_samples import rollout

from assets.checkpoints import flywheel_checkpoint, gspo_phase1_checkpoint, gspo_phase2_checkpoint
from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TrackingError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.runs.budget import Spent
from osworld_pipeline.runs.checkpoints.ids import read_checkpoint
from osworld_pipeline.runs.flywheel.retraining import RETRAINING_TAG
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.checkpoints import upsert_checkpoint
from osworld_pipeline.tables.owned import write_table
from resources.desktops import DesktopsResource
from resources.engine import EngineResource
from resources.launcher import Launcher
from resources.progress import ProgressResource
from resources.start import StartResource
from resources.state import RecipeResource, StateResource
from resources.tracking import TrackingResource

ASSETS = [flywheel_checkpoint, gspo_phase1_checkpoint, gspo_phase2_checkpoint]
COST = 4


class Program(Launcher):
    """A phase of two updates: it rolls out COST episodes and ends with a milestone if the budget is spent by then."""

    def launch(self, context: Any, program: str, job: Any, on_message: Any, *, state: StateDir, **more: Any) -> Any:
        assert program == "train_gspo"
        stage_key, run_ids, parent = job.checkpoint_id, job.run_ids, job.parent
        episodes = [rollout(f"{stage_key}-{name}", run_ids=run_ids, stage_key=stage_key) for name in range(COST)]
        TrajectoryStore(state).write_episodes(f"{stage_key}-u0000", episodes)
        stopped = job.budget.less(Spent(episodes=COST)).end_reason(now=0.0)
        made = f"{stage_key}-u0001" if stopped else stage_key
        fields = {"parent_id": parent.checkpoint_id, "num_updates": 1 if stopped else 2, "run_ids": run_ids}
        lay_down(state, make_checkpoint(made, job.stage, **fields))
        return {"checkpoint_id": made, **({"stopped": stopped} if stopped else {})}


class Unasked:
    """An MLflow run that accepts every call of a stage."""

    run_id = "mlflow-run"

    def url(self, base_url: str) -> str:
        return f"{base_url}/runs/{self.run_id}"

    def __getattr__(self, name: str) -> Any:
        return lambda *reported, **more: None


class NoTracking(TrackingResource):
    best: str = ""

    @contextmanager
    def stage(self, *reported: Any, **more: Any) -> Iterator[Any]:
        yield Unasked()

    def run_id_of(self, state: StateDir, stage_key: str) -> str | None:
        return "mlflow-run"

    def history_of(self, state: StateDir, stage_key: str, names: Any) -> list[tuple[str, int, float]]:
        if stage_key.startswith("gspo_phase2"):
            raise TrackingError("MLflow is gone")
        return [("kl", 1, 0.5), ("kl", 2, 0.25)]

    def champion(self, state: StateDir) -> str | None:
        return self.best or None


class SomeDesktops(DesktopsResource):
    @contextmanager
    def serve(self, state: StateDir, recipe: Recipe, *, run_id: str) -> Iterator[EnvServers]:
        yield EnvServers(urls=("http://127.0.0.1:1",), token=None, num_replicas=1)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def state(tmp_path: Path, instance: dg.DagsterInstance) -> StateDir:
    """A state with an SFT checkpoint, and a champion that is recorded only in its folder."""
    state = StateDir(tmp_path)
    lay_down(state, make_checkpoint("sft-1"), make_checkpoint("best-1", Stage.GSPO_PHASE2))
    upsert_checkpoint(state, make_checkpoint("sft-1"))
    write_table(state, "train_tasks", [{"task_id": "t", "domain": "os", "task_config": "{}"}])
    instance.report_runless_asset_event(dg.AssetMaterialization("sft_checkpoint", metadata={"checkpoint_id": "sft-1"}))
    return state


def materialize(
    instance: dg.DagsterInstance,
    state: StateDir,
    start: str,
    *settings: str,
    champion: str = "best-1",
    stage: Stage = Stage.FLYWHEEL,
    has_budget: bool = True,
) -> dg.ExecuteInProcessResult:
    resources = {
        "state": StateResource(path=str(state.root)),
        "recipe": RecipeResource(name="smoke", settings=list(settings)),
        "desktops": SomeDesktops(),
        "engine": EngineResource(),
        "launcher": Program(),
        "tracking": NoTracking(best=champion),
        "progress": ProgressResource(),
        "start": StartResource(checkpoint=start, stage=str(stage), has_budget=has_budget),
    }
    return dg.materialize(ASSETS, instance=instance, resources=resources, raise_on_error=False)


def shown(result: dg.ExecuteInProcessResult) -> list[dict[str, Any]]:
    """The metadata of each asset, the flywheel first."""
    events = result.get_asset_materialization_events()
    found = {event.asset_key: event.step_materialization_data.materialization.metadata for event in events}
    return [{name: value.value for name, value in found[asset.key].items()} for asset in ASSETS]


def observations(result: dg.ExecuteInProcessResult) -> list[dg.AssetObservation]:
    events = result.filter_events(lambda event: event.event_type is dg.DagsterEventType.ASSET_OBSERVATION)
    return [event.asset_observation_data.asset_observation for event in events]


def test_a_re_training_starts_with_the_champion_and_costs_nothing_a_second_time(
    instance: dg.DagsterInstance, state: StateDir
) -> None:
    first = materialize(instance, state, "champion")
    flywheel, phase1, phase2 = shown(first)
    assert flywheel["checkpoint_id"] == phase1["parent_id"] == "best-1"
    assert phase2["parent_id"] == phase1["checkpoint_id"]
    assert first.dagster_run.run_id == read_checkpoint(state, phase2["checkpoint_id"]).run_ids["dagster"]  # pyright: ignore
    run = instance.get_run_by_id(first.dagster_run.run_id)
    assert run is not None
    assert run.tags[RETRAINING_TAG] == "best-1"
    assert not phase1["was there already"]
    assert "<polyline" in base64.b64decode(phase1["curves"].partition("base64,")[2].removesuffix(")")).decode()
    assert "curves" not in phase2, "MLflow is gone, and the asset is made"
    links = [observation.metadata for observation in observations(first)]
    assert len(links) == 2, "the flywheel had no round to run"
    assert links[0]["mlflow"].value == "http://127.0.0.1:5000/runs/mlflow-run"
    assert links[0]["desktops 1"].value == "http://127.0.0.1:1/status"
    again = shown(materialize(instance, state, "best-1", "retraining.max_episodes=1"))
    assert [one["checkpoint_id"] for one in again] == [one["checkpoint_id"] for one in (flywheel, phase1, phase2)]
    assert again[0]["rounds run now"] == 0
    assert again[1]["was there already"]
    assert again[2]["was there already"]
    assert "stopped" not in again[2]


def test_a_phase_ended_by_its_budget_gives_its_milestone_as_does_the_next_phase_until_it_resumes(
    instance: dg.DagsterInstance, state: StateDir
) -> None:
    _, phase1, phase2 = shown(materialize(instance, state, "champion", f"retraining.max_episodes={COST}"))
    assert phase1["checkpoint_id"].endswith("-u0001")
    assert "retraining.max_episodes" in phase1["stopped"]
    assert phase2["checkpoint_id"] == phase1["checkpoint_id"]
    assert phase2["stopped"].startswith("it did not run")
    _, finished, following = shown(materialize(instance, state, "champion"))
    assert finished["checkpoint_id"] == phase1["checkpoint_id"].removesuffix("-u0001")
    assert following["parent_id"] == finished["checkpoint_id"]
    assert "stopped" not in finished


def test_both_phases_spend_one_budget(instance: dg.DagsterInstance, state: StateDir) -> None:
    _, phase1, phase2 = shown(materialize(instance, state, "champion", f"retraining.max_episodes={COST + 1}"))
    assert "stopped" not in phase1
    assert phase2["checkpoint_id"].endswith("-u0001")
    assert phase2["parent_id"] == phase1["checkpoint_id"]


def test_the_time_of_a_re_training_counts_from_the_start_of_its_run(
    instance: dg.DagsterInstance, state: StateDir
) -> None:
    stages = shown(materialize(instance, state, "champion", "retraining.max_wall_s=0.000001", "flywheel.num_rounds=2"))
    assert [one["checkpoint_id"] for one in stages] == ["best-1"] * 3
    assert "round 1 was not run: the budget of wall time is spent" in stages[0]["stopped"]


def test_training_from_the_asset_upstream_has_no_budget(instance: dg.DagsterInstance, state: StateDir) -> None:
    result = materialize(instance, state, "", "retraining.max_episodes=1", "retraining.max_wall_s=0.000001")
    flywheel, phase1, phase2 = shown(result)
    assert flywheel["checkpoint_id"] == "sft-1"
    assert "stopped" not in phase1 | phase2
    run = instance.get_run_by_id(result.dagster_run.run_id)
    assert run is not None
    assert RETRAINING_TAG not in run.tags


@pytest.mark.parametrize(
    ("start", "champion", "sentence"),
    [
        ("champion", "", "there is no champion to train further"),
        ("gspo-9", "best-1", "no checkpoint 'gspo-9'"),
        ("far-1", "best-1", "far-1 is an endpoint"),
    ],
)
def test_a_checkpoint_that_cannot_be_trained_further_is_refused_with_one_clear_error(
    instance: dg.DagsterInstance, state: StateDir, start: str, champion: str, sentence: str
) -> None:
    upsert_checkpoint(state, make_checkpoint("far-1", Stage.EXTERNAL, path="http://far.example/v1#m"))
    result = materialize(instance, state, start, champion=champion)
    assert not result.success
    assert sentence in str(result.failure_data_for_node("flywheel_checkpoint"))


def test_a_phase_may_train_a_named_checkpoint_without_a_budget(instance: dg.DagsterInstance, state: StateDir) -> None:
    result = materialize(
        instance, state, "best-1", "retraining.max_episodes=1", stage=Stage.GSPO_PHASE1, has_budget=False
    )
    flywheel, phase1, phase2 = shown(result)
    assert flywheel["checkpoint_id"] == "sft-1", "it stands for the asset upstream"
    assert phase1["parent_id"] == "best-1"
    assert phase2["parent_id"] == phase1["checkpoint_id"]
    assert "stopped" not in phase1 | phase2
    run = instance.get_run_by_id(result.dagster_run.run_id)
    assert run is not None
    assert RETRAINING_TAG not in run.tags


def test_training_starts_with_a_stage_that_trains() -> None:
    with pytest.raises(ValueError, match="no stage 'base' trains a checkpoint"):
        StartResource(checkpoint="best-1", stage="base")
