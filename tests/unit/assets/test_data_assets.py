"""The data assets: what they report to Dagster, and that unchanged input rebuilds nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from raw_samples import config, put_lines, put_task, record

from assets.checks import CHECKS
from assets.raw import RAW_ASSETS, imports
from assets.replay import verified_replay
from assets.tables import union_tables
from osworld_pipeline.definitions import defs
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.verify_replay.summary import (
    FailedDemonstration,
    VerificationSummary,
    verification_key,
    write_summary,
)
from resources.desktops import DesktopsResource
from resources.launcher import Launcher
from resources.progress import ProgressResource
from resources.state import RecipeResource, StateResource

ROOT = Path(__file__).resolve().parents[3]
RECIPE = load_recipe("smoke")
TABLES = ("union_tasks", "replay_buffer", "train_tasks")


class NoDesktops(DesktopsResource):
    """For assets that must not start a desktop."""

    @contextmanager
    def serve(self, state: StateDir, recipe: Recipe, *, run_id: str) -> Iterator[EnvServers]:
        raise AssertionError("a desktop was asked for")
        yield


def materialize(state: StateDir, assets: list[Any], recipe: str = "smoke") -> dict[str, dg.AssetMaterialization]:
    result = dg.materialize(
        assets,
        resources={
            "state": StateResource(path=str(state.root)),
            "recipe": RecipeResource(name=recipe),
            "desktops": NoDesktops(),
            "launcher": Launcher(),
            "progress": ProgressResource(),
        },
    )
    return {
        event.asset_key.to_user_string(): event.step_materialization_data.materialization
        for event in result.get_asset_materialization_events()
        if event.asset_key is not None
    }


def value(event: dg.AssetMaterialization, name: str) -> Any:
    return event.metadata[name].value


def data_version(event: dg.AssetMaterialization) -> str | None:
    return (event.tags or {}).get("dagster/data_version")


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path)
    put_lines(state, "bc_sft", [record("t1"), "{cut", record("t2")])
    put_task(state, config("t1"))
    return state


def test_raw_sources_and_tables_report_rows_columns_rejects_previews_and_stay_without_a_change(
    state: StateDir,
) -> None:
    assets = [*RAW_ASSETS, union_tables, *(check for check in CHECKS if asset_of(check) in TABLES)]
    first = materialize(state, assets)
    raw = first["raw_bc_sft"]
    assert (value(raw, "dagster/row_count"), value(raw, "rejects"), value(raw, "present")) == (2, 1, True)
    assert "| 2 | malformed |" in value(raw, "first rejects")
    absent = first["raw_sft_clean"]
    assert (value(absent, "dagster/row_count"), value(absent, "present")) == (0, False)
    assert value(first["imports"], "dagster/row_count") == 0

    rows = {name: value(first[name], "dagster/row_count") for name in TABLES}
    assert rows == {"union_tasks": 2, "replay_buffer": 2, "train_tasks": 1}
    for name in TABLES:
        columns = value(first[name], "dagster/column_schema").columns
        assert all(column.description for column in columns), f"a column of {name} says nothing"
        assert "| t1 |" in value(first[name], "preview")
    assert "malformed" in value(first["replay_buffer"], "rejects by kind")

    second = materialize(state, assets)
    assert value(second["raw_bc_sft"], "unchanged")
    assert all(value(second[name], "unchanged") for name in TABLES)
    assert {name: data_version(event) for name, event in second.items()} == {
        name: data_version(event) for name, event in first.items()
    }
    assert all(data_version(first[name]) for name in (*TABLES, "raw_bc_sft", "imports"))


def asset_of(check: dg.AssetChecksDefinition) -> str:
    return next(iter(check.check_keys)).asset_key.to_user_string()


def test_a_finished_verification_starts_no_desktop_and_shows_what_failed(state: StateDir) -> None:
    failed = FailedDemonstration(
        row_id="r1", task_id="t1", source="bc_sft: a.jsonl:1", earned=(0.0, 0.25), error="the desktop refused action 0"
    )
    key = verification_key(state, RECIPE, desktops=DesktopsResource().identity(RECIPE))
    summary = VerificationSummary(
        num_rows=4, num_demonstrations=3, num_chosen=3, num_verified=2, num_failed=1, num_open=0, num_faults=1,
        num_tasks=2, coverage=1.0, verified_coverage=0.5, failed=(failed,), unplayable={"no task": ("r4",)},
        digest="d", key=key,
    )  # fmt: skip
    write_summary(state, summary)
    event = materialize(state, [verified_replay])["verified_replay"]
    reported = {
        name: value(event, name) for name in ("verified", "failed", "faults", "not verifiable", "verified coverage")
    }
    assert reported == {"verified": 2, "failed": 1, "faults": 1, "not verifiable": 1, "verified coverage": 0.5}
    assert "| t1 | r1 | bc\\_sft: a.jsonl:1 | 0, 0.25 | the desktop refused action 0 |" in value(event, "failed ones")
    assert "| no task | 1 | r4 |" in value(event, "reasons")
    assert data_version(event) == "d"


def test_a_recipe_that_verifies_nothing_starts_no_desktop(state: StateDir, tmp_path: Path) -> None:
    text = (ROOT / "osworld_pipeline" / "recipes" / "smoke.toml").read_text()
    path = tmp_path / "quiet.toml"
    path.write_text(text + '\n[replay]\nverify = "none"\n')
    event = materialize(state, [verified_replay], recipe=str(path))["verified_replay"]
    assert "none" in value(event, "skipped")


def test_another_grader_image_recipe_or_row_changes_the_verification_key(state: StateDir) -> None:
    known = verification_key(state, RECIPE, desktops="a")
    assert known == verification_key(state, RECIPE, desktops="a")
    assert known != verification_key(state, RECIPE, desktops="b")
    assert known != verification_key(state, load_recipe("demo"), desktops="a")
    assert verification_key(state, RECIPE, desktops=None) == ""
    materialize(state, [*RAW_ASSETS, union_tables])
    assert known != verification_key(state, RECIPE, desktops="a")


def test_desktops_of_another_machine_have_no_identity_here() -> None:
    assert DesktopsResource(urls=["http://desktops.example:8100"]).identity(RECIPE) is None
    assert DesktopsResource().identity(RECIPE)


def test_imports_are_shown_with_their_licence(state: StateDir) -> None:
    folder = state.imports / "theirs"
    folder.mkdir(parents=True)
    (folder / "source.json").write_text('{"name": "theirs", "licence": "mit", "num_demonstrations": 5}')
    event = materialize(state, [imports])["imports"]
    assert value(event, "dagster/row_count") == 5
    assert "mit" in value(event, "imports")


def test_training_comes_after_verification_in_every_job_that_has_both() -> None:
    graph = defs.resolve_asset_graph()
    for name in ("sft_checkpoint", "gspo_phase1_checkpoint", "gspo_phase2_checkpoint"):
        parents = {key.to_user_string() for key in graph.get(dg.AssetKey(name)).parent_keys}
        assert "verified_replay" in parents
    assert {key.to_user_string() for key in graph.get(dg.AssetKey("verified_replay")).parent_keys} == {
        "replay_buffer",
        "train_tasks",
    }


def test_the_train_evaluate_and_rank_jobs_cover_every_asset_except_upkeep() -> None:
    everything = {key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()}
    selected = [
        key
        for job in ("train", "evaluate", "rank")
        for key in defs.resolve_job_def(job).asset_layer.selected_asset_keys
    ]
    assert sorted(everything - {"compacted_trajectories"}) == sorted(key.to_user_string() for key in selected)
    for name in ("verify_replay", "compact_trajectories", "collect_garbage", "build_tables"):
        assert defs.resolve_job_def(name).name == name


def test_every_data_asset_has_a_code_version() -> None:
    graph = defs.resolve_asset_graph()
    versioned = [name for key in graph.get_all_asset_keys() if (name := key.to_user_string()).startswith("raw_")]
    assert len(versioned) == 13
    for name in (*versioned, *TABLES, "verified_replay", "compacted_trajectories"):
        assert graph.get(dg.AssetKey(name)).code_version, name
