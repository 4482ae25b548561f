"""The file that OSWORLD_DEPLOYMENT names has default resources of runs."""

from pathlib import Path

import dagster as dg
import pytest

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import PipelineError
from osworld_pipeline.project import DEPLOYMENT, template
from resources.deployment import deployment_resources, deployment_tracking
from resources.desktops import DesktopsResource
from resources.engine import EngineResource
from resources.launcher import Launcher
from resources.ray_launcher import RayLauncher
from resources.state import RecipeResource, StateResource
from resources.tracking import TrackingResource

FILE = """
resources:
  recipe: {config: {name: smoke, settings: [desktop.num_replicas=3]}}
  desktops: {config: {urls: ["dns+http://desktops.example:8100"], token: {env: DESKTOP_TOKEN}}}
  tracking: {config: {uri: "http://mlflow.example:5000"}}
  launcher: {config: {runs_on: {ray: {address: "http://head.example:8265", token: {env: RAY_TOKEN}, gpus_per_rank: 1}}}}
"""


@dg.op
def seen(recipe: RecipeResource, desktops: DesktopsResource, launcher: Launcher) -> list[object]:
    runs_on = launcher.runs_on
    assert isinstance(runs_on, RayLauncher)
    settings = recipe.load().desktop
    return [
        recipe.name, settings.num_replicas, *desktops.urls, desktops.token, runs_on.address, runs_on.token,
        runs_on.gpus_per_rank,
    ]  # fmt: skip


def given(folder: Path, text: str) -> dict[str, str]:
    path = folder / "deployment.yaml"
    path.write_text(text)
    return {"OSWORLD_DEPLOYMENT": str(path)}


def test_a_run_without_configuration_uses_what_the_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resources = deployment_resources(given(tmp_path, FILE))
    monkeypatch.setenv("DESKTOP_TOKEN", "d")
    monkeypatch.setenv("RAY_TOKEN", "r")

    @dg.job(resource_defs={name: resources[name] for name in ("recipe", "desktops", "launcher")})
    def look() -> None:
        seen()

    assert look.execute_in_process().output_for_node("seen") == [
        "smoke", 3, "dns+http://desktops.example:8100", "d", "http://head.example:8265", "r", 1.0,
    ]  # fmt: skip
    changed = look.execute_in_process({"resources": {"recipe": {"config": {"settings": ["desktop.num_replicas=5"]}}}})
    assert changed.output_for_node("seen")[:3] == ["demo", 5, "dns+http://desktops.example:8100"], (
        "one is replaced whole"
    )


EXAMPLE = {
    "OSWORLD_STATE": "/srv/state", "OSWORLD_STATE_REMOTE": "s3://bucket/state", "RECIPE": "smoke",
    "DESKTOPS_1": "http://kvm-1:8100", "DESKTOPS_2": "http://kvm-2:8100", "ENV_SERVER_TOKEN": "d", "ENGINE_TOKEN": "e",
    "RAY_URL": "http://head:8265", "RAY_CLUSTER_TOKEN": "r", "MLFLOW_TRACKING_URI": "http://mlflow:5000",
    "MLFLOW_URL": "https://mlflow.example", "DAGSTER_URL": "https://dagster.example",
}  # fmt: skip


@dg.op
def everything(
    state: StateResource,
    recipe: RecipeResource,
    desktops: DesktopsResource,
    engine: EngineResource,
    launcher: Launcher,
    tracking: TrackingResource,
) -> list[str | None]:
    runs_on = launcher.runs_on
    assert isinstance(runs_on, RayLauncher)
    return [
        state.path, state.remote, recipe.load().name, *desktops.urls, desktops.token, engine.token, runs_on.address,
        runs_on.token, tracking.uri, tracking.pages_url, tracking.dagster_url,
    ]  # fmt: skip


def test_the_file_of_a_new_project_changes_nothing_and_each_of_its_examples_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = template(DEPLOYMENT)
    assert deployment_resources(given(tmp_path, text)).keys() == deployment_resources({}).keys()
    completed = given(tmp_path, text.replace("\n  # ", "\n  "))
    for name, value in EXAMPLE.items():
        monkeypatch.setenv(name, value)

    @dg.job(resource_defs=deployment_resources(completed))
    def look() -> None:
        everything()

    assert look.execute_in_process().output_for_node("everything") == list(EXAMPLE.values())


def test_no_secret_of_the_environment_is_in_what_dagster_stores(tmp_path: Path) -> None:
    environment = given(tmp_path, FILE) | {"ENGINE_TOKEN": "secret-1", "ENV_SERVER_TOKEN": "secret-2"}
    assert "secret" not in repr(deployment_resources(environment))


def test_commands_use_the_mlflow_that_the_file_names(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert deployment_tracking(given(tmp_path, FILE)).resolve(state) == "http://mlflow.example:5000"
    assert deployment_tracking({}).resolve(state).startswith("sqlite:///")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("resources: [", "while parsing"),
        ("recipe: {}", "must have the one key `resources`"),
        ("", "must have the one key `resources`"),
        ("resources: [recipe]", "`resources` must have keys that are names of resources"),
        ("resources: {recepe: {config: {}}}", "no resource `recepe`; did you mean 'recipe'"),
        ("resources: {recipe: {name: demo}}", "`recipe` must have the one key `config`"),
        ("resources: {recipe: {config: {nam: demo}}}", "`recipe`: there is no key `nam`; did you mean 'name'"),
        ("resources: {recipe: {config: {smoke: perhaps}}}", "`recipe`: .*smoke"),
        (
            "resources: {desktops: {config: {ray: {desktop_per_server: 4}}}}",
            "no key `desktop_per_server`; did you mean",
        ),
        ("resources: {launcher: {config: {runs_on: {slurm: {}}}}}", "`runs_on` must have one key: local or ray"),
        ("resources: {launcher: {config: {runs_on: {ray: {adress: x}}}}}", "no key `adress`; did you mean 'address'"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(PipelineError, match=f"(?s)OSWORLD_DEPLOYMENT.: .*{problem}"):
        deployment_resources(given(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"none\.yaml"):
        deployment_resources({"OSWORLD_DEPLOYMENT": str(tmp_path / "none.yaml")})
