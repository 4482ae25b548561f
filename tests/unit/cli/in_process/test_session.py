"""Jobs that a command runs in its own process."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import pytest
from rich.console import Console

from osworld_pipeline.cli.in_process import session
from osworld_pipeline.cli.in_process.session import open_in_process
from resources.launcher import Launcher
from resources.local_launcher import PROGRAM_ENV, LocalLauncher
from resources.ray_launcher import RayLauncher
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


@pytest.mark.parametrize(
    ("runs_on", "starts_warm", "expected"),
    [(LocalLauncher(), True, [PROGRAM_ENV]), (LocalLauncher(), False, []), (RayLauncher(), True, [])],
)
def test_imports_of_programs_start_at_once_if_this_machine_runs_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runs_on: LocalLauncher | RayLauncher,
    starts_warm: bool,
    expected: list[Mapping[str, str]],
) -> None:
    shutil.copy(ROOT / "dagster.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    begun: list[Mapping[str, str]] = []

    @contextmanager
    def noted(environment: Mapping[str, str]) -> Iterator[None]:
        begun.append(environment)
        yield

    monkeypatch.setattr(session, "kept_fork_server", noted)
    defs = dg.Definitions(resources={"launcher": Launcher(runs_on=runs_on)})
    with open_in_process(
        defs, source=RecipeResource(name="smoke"), state_root=tmp_path / "var", console=Console(quiet=True),
        starts_warm=starts_warm,
    ):  # fmt: skip
        assert begun == expected
