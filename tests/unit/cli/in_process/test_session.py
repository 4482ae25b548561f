"""Jobs that a command runs in its own process."""

import shutil
from pathlib import Path

import dagster as dg
import pytest
from rich.console import Console

from osworld_pipeline.cli.in_process.session import open_in_process
from resources.state import RecipeResource, StateResource

ROOT = Path(__file__).resolve().parents[4]


def test_a_commands_run_has_its_own_state_folder_and_the_object_store_of_the_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(ROOT / "dagster.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    found: list[tuple[str, str]] = []

    @dg.asset
    def seen(state: StateResource, recipe: RecipeResource) -> None:
        found.append((state.path, state.remote))

    defs = dg.Definitions(
        assets=[seen],
        jobs=[dg.define_asset_job("look")],
        resources={"state": StateResource(path="var", remote="s3://bucket/runs"), "recipe": RecipeResource()},
    )
    folder = tmp_path / "elsewhere"
    with open_in_process(
        defs, source=RecipeResource(name="smoke"), state_root=folder, console=Console(quiet=True)
    ) as here:
        here.run("look")
    assert found == [(str(folder), "s3://bucket/runs")]
