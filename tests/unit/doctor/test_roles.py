"""The roles depend on checks that exist; the reports of other programs are judged."""

import argparse
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from env_server.doctor import make_checks as make_desktop_checks
from env_server.options import add_server_options, settings_of
from osworld_pipeline.cli import app
from osworld_pipeline.doctor.checkup import one
from osworld_pipeline.doctor.diagnosis import diagnose
from osworld_pipeline.doctor.external_services import (
    DESKTOP_CHECKS,
    check_desktops,
    check_home,
    check_sglang,
    judge_daemon,
    judge_instance,
)
from osworld_pipeline.doctor.place import Place
from osworld_pipeline.doctor.roles import ROLES, checks_of_recipe, make_checks
from osworld_pipeline.domain.finding import Finding, Status
from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.project import project_files, write_project
from osworld_pipeline.recipes import load_recipe

SANE: dict[str, Any] = {
    "relative": False,
    "storage": "DagsterSqliteStorage",
    "pools": {"granularity": "op", "default_limit": 1},
    "monitoring": {"enabled": True, "free_slots_after_run_end_seconds": 15},
    "heartbeats_s": {"SENSOR": 3.0, "SCHEDULER": 20.0},
    "failing_daemons": [],
    "limits": {"desktops": 4},
    "without_limit": ["trainer"],
    "num_unfinished": 2,
}


def place(folder: Path, home: Path | None = None) -> Place:
    return Place(
        state=StateDir(folder / "var"),
        dagster_home=home,
        sglang=folder / "sglang",
        desktop_env_python=folder / "python",
    )


def test_every_role_rests_on_checks_that_exist_and_every_check_serves_a_role(tmp_path: Path) -> None:
    names = {name for check in make_checks(place(tmp_path)) for name in check.names}
    assert {name for role in ROLES.values() for name in role.checks} | {"packages-lora"} == names


def test_adapters_need_their_package_only_where_the_recipe_trains_them() -> None:
    assert checks_of_recipe(load_recipe("qwen3vl_4b_lora")) == ("packages-lora",)
    assert checks_of_recipe(load_recipe("smoke")) == ()


def test_a_missing_package_that_the_recipe_needs_makes_the_role_unready(tmp_path: Path) -> None:
    lacking = one("packages-lora", lambda name: Finding(name=name, status=Status.MISSING, message="no peft"))
    checks = [*(check for check in make_checks(place(tmp_path)) if "packages-lora" not in check.names), lacking]
    found = diagnose(checks, role="mlflow", is_only=True, more=["packages-lora"])
    assert found.lacks == {"mlflow": ["packages-lora"]}
    assert diagnose(checks, role="mlflow", is_only=True).is_ok


def test_the_doctor_requests_exactly_the_checks_that_the_env_server_has(tmp_path: Path) -> None:
    assert tuple(make_desktop_checks(tmp_path, tmp_path / "python")) == DESKTOP_CHECKS


def test_one_role_is_judged_by_its_own_checks_alone(tmp_path: Path) -> None:
    found = diagnose(make_checks(place(tmp_path)), role="mlflow", is_only=True)
    assert set(found.findings) == set(ROLES["mlflow"].checks)
    assert list(found.lacks) == ["mlflow"]
    assert found.is_ok


def test_a_valid_dagster_instance_is_reported_with_its_limits(tmp_path: Path) -> None:
    found = judge_instance("dagster-instance", SANE, tmp_path)
    assert found.status == Status.OK
    assert "2 runs unfinished, pools: desktops 4, all others 1" in found.message


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"error": "its storage cannot be opened: no"}, Status.MISSING, "cannot be opened"),
        ({"monitoring": {"enabled": True}}, Status.WARN, "later runs never start"),
        ({"pools": {"granularity": "op"}}, Status.WARN, "no default limit"),
        ({"relative": True}, Status.WARN, "relative"),
        ({"storage": "DagsterPostgresStorage"}, Status.WARN, "pools without a limit of their own"),
        ({"is_new": True}, Status.OK, "valid and empty"),
    ],
)
def test_each_state_of_an_instance_has_its_status_and_message(
    tmp_path: Path, change: dict[str, Any], status: Status, words: str
) -> None:
    found = judge_instance("dagster-instance", {**SANE, **change}, tmp_path)
    assert found.status == status
    assert words in found.message


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("run dagster instance migrate", "dagster instance migrate"),
        ("No module named 'dagster_postgres'", how_to_set_up("postgres")),
        ("the environment variable DAGSTER_PG_HOST is not set", "set the environment variable that the error names"),
        ("the key is unknown", "init {folder} --overwrite"),
    ],
)
def test_each_error_of_a_dagster_instance_has_its_remedy(tmp_path: Path, error: str, remedy: str) -> None:
    reported = judge_instance("dagster-instance", {"error": error}, tmp_path).remedy
    assert remedy.format(folder=tmp_path) in reported


def test_a_daemon_is_judged_by_its_heartbeat() -> None:
    assert judge_daemon("d", SANE, start="osworld-pipeline dev").message == "Dagster's daemon sent a heartbeat 3 s ago"
    late = judge_daemon("d", {**SANE, "heartbeats_s": {"SENSOR": 3600.0}}, start="osworld-pipeline dev --state /s")
    assert ("for 60 minutes" in late.message, late.remedy) == (True, "osworld-pipeline dev --state /s")
    assert judge_daemon("d", {"heartbeats_s": {}}, start="osworld-pipeline dev").status == Status.WARN
    assert (
        "these of its daemons fail: SENSOR"
        in judge_daemon("d", {**SANE, "failing_daemons": ["SENSOR"]}, start="osworld-pipeline dev").message
    )


def test_dagster_home_must_be_absolute_and_hold_a_dagster_yaml(tmp_path: Path) -> None:
    empty, other = tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    other.mkdir()
    found = check_home("h", place(tmp_path), folder=empty)
    assert (found.status, f"init {empty}" in found.remedy) == (Status.MISSING, True)
    assert "requires an absolute path" in check_home("h", place(tmp_path, Path("here")), folder=empty).message
    found = check_home("h", place(tmp_path, other), folder=empty)
    assert (f"no dagster.yaml in {other}" in found.message, f"init {other}" in found.remedy) == (True, True)
    (other / "dagster.yaml").touch()
    assert check_home("h", place(tmp_path, other), folder=empty).status == Status.OK


def test_a_project_folder_needs_no_dagster_home_of_the_shell(tmp_path: Path) -> None:
    write_project(tmp_path, project_files())
    here = place(tmp_path)
    assert check_home("h", here, folder=tmp_path).status == Status.OK
    (tmp_path / ".env").unlink()
    found = check_home("h", here, folder=tmp_path)
    assert (found.status, found.remedy) == (Status.WARN, f"export DAGSTER_HOME={tmp_path}")


def test_a_dagster_home_other_than_that_of_the_commands_is_named(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        write_project(folder, project_files())
    found = check_home("h", place(mine, other), folder=mine)
    assert found.status == Status.WARN
    assert f"DAGSTER_HOME is {other}, and commands in {mine} use {mine}" in found.message
    assert check_home("h", place(mine, mine), folder=mine).status == Status.OK


def test_a_missing_sglang_is_reported_with_its_set_up_command(tmp_path: Path) -> None:
    found = check_sglang("sglang", tmp_path)
    assert found.status == Status.MISSING
    assert "setup sglang --folder" in found.remedy


@pytest.mark.desktop
def test_the_findings_of_the_env_server_come_from_running_its_program(tmp_path: Path) -> None:
    found = {finding.name: finding for finding in check_desktops(place(tmp_path))}
    assert set(found) == set(DESKTOP_CHECKS)
    assert found["local-desktop"].status == Status.OK, found["local-desktop"].message
    assert found["desktop-env"].status == Status.MISSING
    assert not (tmp_path / "var").exists(), "looking makes nothing"


def test_the_doctor_ends_with_one_thing_to_do(tmp_path: Path) -> None:
    state, ready = place(tmp_path).state, diagnose(make_checks(place(tmp_path)), role="mlflow", is_only=True)
    assert f"sqlite:///{state.mlflow_db}" in ready.next_step(state, "demo")
    lacking = one(
        "mlflow-database",
        lambda name: Finding(name=name, status=Status.MISSING, message="it is old", remedy="migrate it"),
    )
    checks = [*(check for check in make_checks(place(tmp_path)) if "mlflow-database" not in check.names), lacking]
    assert diagnose(checks, role="mlflow", is_only=True).next_step(state, "demo") == "migrate it"


def test_every_command_that_a_ready_role_starts_with_is_accepted(tmp_path: Path) -> None:
    pipeline = typer.main.get_command(app)
    assert isinstance(pipeline, click.Group)
    for name, role in ROLES.items():
        program, *words = shlex.split(role.start(place(tmp_path).state, "smoke"))
        if Path(program).name == "osworld-pipeline" and words[-1] != "--help":
            pipeline.commands[words[0]].make_context(words[0], words[1:])
        if Path(program).name == "env-server":
            parser = argparse.ArgumentParser()
            add_server_options(parser)
            settings_of(parser.parse_args(words))
        assert Path(program).name in ("osworld-pipeline", "env-server", "mlflow", "ray"), name
