"""The two instances that come with the repository: this folder's, and the one in Postgres."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from resources.instance_report import report

ROOT = Path(__file__).resolve().parents[3]
PROJECT = ROOT / "osworld_pipeline" / "project"
LOCAL, POSTGRES = PROJECT / "dagster.yaml", PROJECT / "dagster.postgres.yaml"


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOST", "DATABASE", "USER", "PASSWORD"):
        monkeypatch.setenv(f"DAGSTER_PG_{name}", "nobody")
    monkeypatch.setenv("DAGSTER_PG_PORT", "1")
    monkeypatch.setenv("DAGSTER_FILES", str(tmp_path / "files"))


def load(path: Path, folder: Path) -> dg.DagsterInstance:
    """Loads the instance from a copy that does not access its tables in Postgres, which do not exist."""
    fields = yaml.safe_load(path.read_text())
    if "postgres" in fields["storage"]:
        fields["storage"]["postgres"]["should_autocreate_tables"] = False
    (folder / "dagster.yaml").write_text(yaml.dump(fields))
    return dg.DagsterInstance.from_config(str(folder))


def settings(instance: dg.DagsterInstance) -> dict[str, Any]:
    pools = instance.get_concurrency_config().pool_config
    monitoring = {**instance.run_monitoring_settings}
    return {"pools": (pools.pool_granularity, pools.default_pool_limit), "monitoring": monitoring}


def test_both_instances_load_and_agree_in_pools_and_monitoring(
    tmp_path: Path, variables: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dagster_postgres", reason="the extra postgres is not installed")
    monkeypatch.chdir(tmp_path)  # the local file's paths are relative
    found = []
    for path in (LOCAL, POSTGRES):
        folder = tmp_path / path.stem
        folder.mkdir()
        with load(path, folder) as instance:
            assert type(instance.run_coordinator).__name__ == "QueuedRunCoordinator"
            found.append(settings(instance))
    assert found[0] == found[1]
    assert found[0]["pools"][1] == 1
    assert found[0]["monitoring"]["free_slots_after_run_end_seconds"] == 15


def test_the_instance_in_postgres_holds_no_address_and_no_secret() -> None:
    storage = yaml.safe_load(POSTGRES.read_text())["storage"]["postgres"]["postgres_db"]
    plain = {name: value for name, value in storage.items() if not isinstance(value, dict)}
    assert plain == {"scheme": "postgresql+psycopg2"}
    assert all(value["env"].startswith("DAGSTER_PG_") for value in storage.values() if isinstance(value, dict))


def test_a_run_whose_process_died_is_started_again_and_one_that_failed_is_not() -> None:
    retries = yaml.safe_load(POSTGRES.read_text())["run_retries"]
    assert retries == {"enabled": True, "max_retries": 2, "retry_on_asset_or_op_failure": False}


def test_a_report_only_reads_and_makes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dagster.yaml").write_text(LOCAL.read_text())
    reported = report(tmp_path)
    assert (reported["is_new"], reported["relative"], reported["pools"]["default_limit"]) == (True, True, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["dagster.yaml"]


def test_a_report_of_an_instance_in_use_lists_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dagster.yaml").write_text(LOCAL.read_text())
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        instance.event_log_storage.set_concurrency_slots("desktops", 4)
    reported = report(tmp_path)
    assert reported["without_limit"] == []
    assert (reported["limits"], reported["heartbeats_s"], reported["num_unfinished"]) == ({"desktops": 4}, {}, 0)


def test_a_variable_that_is_not_set_is_named(tmp_path: Path, variables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dagster_postgres", reason="the extra postgres is not installed")
    monkeypatch.delenv("DAGSTER_PG_PASSWORD")
    (tmp_path / "dagster.yaml").write_text(POSTGRES.read_text())
    assert report(tmp_path)["error"].endswith("the environment variable DAGSTER_PG_PASSWORD is not set")


def test_the_report_program_prints_the_error_of_a_file_that_dagster_refuses(tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_text("concurrency: {pools: {default_limt: 1}}")
    command = [sys.executable, "-m", "resources.instance_report", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert "default_limt" in done.stdout
    assert done.stderr == ""
