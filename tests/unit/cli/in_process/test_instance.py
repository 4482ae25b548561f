"""Every state has a Dagster instance of its own."""

import shutil
from pathlib import Path

import dagster as dg
import pytest

from osworld_pipeline.cli.in_process.instance import instance_home, open_instance
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DependencyError
from resources.state import configured_state

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the project's dagster.yaml, as the working directory."""
    shutil.copy(ROOT / "dagster.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_materializations_of_one_state_are_not_in_another_state(checkout: Path) -> None:
    default, first, second = (StateDir(checkout / name) for name in ("var", "first", "second"))
    for state in (default, first):
        with open_instance(state) as instance:
            instance.report_runless_asset_event(dg.AssetMaterialization(f"made_in_{state.root.name}"))
    found = {}
    for state in (default, first, second):
        with open_instance(state) as instance:
            found[state.root.name] = {key.to_user_string() for key in instance.all_asset_keys()}
    assert found == {"var": {"made_in_var"}, "first": {"made_in_first"}, "second": set()}


def test_runs_of_a_state_are_stored_below_its_folder(checkout: Path) -> None:
    state = StateDir(checkout / "elsewhere")
    with open_instance(state) as instance:
        instance.report_runless_asset_event(dg.AssetMaterialization("asset"))
    assert list((state.root / "dagster").rglob("*.db"))
    assert not (checkout / "var").exists()
    assert instance_home(state) == state.root / "dagster"


def test_the_default_state_has_the_instance_of_this_folder(checkout: Path) -> None:
    assert instance_home(StateDir(checkout / "var")) == checkout


def test_without_a_dagster_yaml_the_error_says_where_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DependencyError, match=r"make this folder a project with `.*osworld-pipeline init`"):
        open_instance(StateDir(tmp_path / "var"))


def test_a_variable_names_the_state_that_dagster_serves() -> None:
    assert configured_state({}) == "var"
    assert configured_state({"OSWORLD_STATE": "/data/state"}) == "/data/state"
