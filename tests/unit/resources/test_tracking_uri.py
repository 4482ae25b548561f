"""Which MLflow is used: the resource's, else that of MLFLOW_TRACKING_URI, else the file in the state; by runs, commands
and links alike."""

from pathlib import Path

import dagster as dg
import pytest

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import PipelineError
from resources.deployment import deployment_tracking
from resources.tracking import MLFLOW_URL, URI_VARIABLE, TrackingResource

STATE = StateDir(Path("/srv/state"))
FILE = "resources: {tracking: {config: {%s}}}"


def given(folder: Path, config: str) -> dict[str, str]:
    path = folder / "deployment.yaml"
    path.write_text(FILE % config)
    return {"OSWORLD_DEPLOYMENT": str(path)}


@dg.op
def used(tracking: TrackingResource) -> str:
    return tracking.resolve(STATE)


def test_the_resource_comes_before_the_variable_and_the_variable_before_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert TrackingResource().resolve(STATE) == "sqlite:////srv/state/mlflow/mlflow.db"
    monkeypatch.setenv(URI_VARIABLE, "http://shared:5000")
    assert TrackingResource().resolve(STATE) == "http://shared:5000"
    assert TrackingResource(uri="http://own:5000").resolve(STATE) == "http://own:5000"
    monkeypatch.setenv(URI_VARIABLE, "")
    assert TrackingResource().resolve(STATE) == STATE.mlflow_uri, "an empty variable names nothing"


def test_a_run_whose_configuration_of_the_resource_has_no_uri_uses_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URI_VARIABLE, "http://shared:5000")
    tracking = deployment_tracking(given(tmp_path, "uri: 'http://own:5000'"))

    @dg.job(resource_defs={"tracking": tracking})
    def look() -> None:
        used()

    assert look.execute_in_process().output_for_node("used") == "http://own:5000"
    replaced = look.execute_in_process({"resources": {"tracking": {"config": {"dagster_url": "http://dagster:3000"}}}})
    assert replaced.output_for_node("used") == "http://shared:5000"


def test_links_lead_to_the_server_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TrackingResource().pages_url == MLFLOW_URL
    assert TrackingResource(uri="postgresql://db/mlflow").pages_url == MLFLOW_URL, "a database has no pages"
    monkeypatch.setenv(URI_VARIABLE, "https://shared")
    assert TrackingResource().pages_url == "https://shared"
    assert TrackingResource(ui_url="https://pages").pages_url == "https://pages"


def test_a_command_reads_a_value_that_the_file_takes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = given(tmp_path, "uri: {env: LAB_MLFLOW}")
    with pytest.raises(PipelineError, match=r"deployment\.yaml.*`tracking`.*LAB_MLFLOW"):
        deployment_tracking(environment)
    monkeypatch.setenv("LAB_MLFLOW", "http://lab:5000")
    assert deployment_tracking(environment).resolve(STATE) == "http://lab:5000"
