"""The roles rest on checks that exist; what neighbours tell is judged."""

from pathlib import Path
from typing import Any

import pytest

from env_server.doctor import make_checks as make_desktop_checks
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
from osworld_pipeline.doctor.roles import ROLES, make_checks
from osworld_pipeline.domain.finding import Status
from osworld_pipeline.domain.state import StateDir

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
    assert {name for role in ROLES.values() for name in role.checks} == names


def test_what_the_env_server_checks_is_what_is_asked_of_it(tmp_path: Path) -> None:
    assert tuple(make_desktop_checks(tmp_path, tmp_path / "python")) == DESKTOP_CHECKS


def test_one_role_is_judged_by_its_own_checks_alone(tmp_path: Path) -> None:
    found = diagnose(make_checks(place(tmp_path)), role="mlflow", is_only=True)
    assert set(found.findings) == set(ROLES["mlflow"].checks)
    assert list(found.lacks) == ["mlflow"]
    assert found.is_ok


def test_a_sane_instance_tells_its_limits(tmp_path: Path) -> None:
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
        ({"storage": "DagsterPostgresStorage"}, Status.WARN, "runs fail at a pool whose limit is the default"),
        ({"is_new": True}, Status.OK, "valid and empty"),
    ],
)
def test_an_instance_is_judged(tmp_path: Path, change: dict[str, Any], status: Status, words: str) -> None:
    found = judge_instance("dagster-instance", {**SANE, **change}, tmp_path)
    assert found.status == status
    assert words in found.message


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("run dagster instance migrate", "dagster instance migrate"),
        ("No module named 'dagster_postgres'", "doctor --role postgres"),
        ("the environment variable DAGSTER_PG_HOST is not set", "docs/instances.md"),
    ],
)
def test_what_an_instance_lacks_has_its_way_out(tmp_path: Path, error: str, remedy: str) -> None:
    assert remedy in judge_instance("dagster-instance", {"error": error}, tmp_path).remedy


def test_a_daemon_is_judged_by_its_heartbeat() -> None:
    assert judge_daemon("d", SANE, start="make dev").message == "Dagster's daemon sent a heartbeat 3 s ago"
    late = judge_daemon("d", {**SANE, "heartbeats_s": {"SENSOR": 3600.0}}, start="make dev STATE=/s")
    assert ("for 60 minutes" in late.message, late.remedy) == (True, "make dev STATE=/s")
    assert judge_daemon("d", {"heartbeats_s": {}}, start="make dev").status == Status.WARN
    assert "fails at: SENSOR" in judge_daemon("d", {**SANE, "failing_daemons": ["SENSOR"]}, start="make dev").message


def test_dagster_home_must_be_absolute_and_hold_a_dagster_yaml(tmp_path: Path) -> None:
    assert check_home("h", place(tmp_path)).status == Status.WARN
    assert "requires an absolute path" in check_home("h", place(tmp_path, Path("here"))).message
    assert "no dagster.yaml" in check_home("h", place(tmp_path, tmp_path)).message
    (tmp_path / "dagster.yaml").touch()
    assert check_home("h", place(tmp_path, tmp_path)).status == Status.OK


def test_an_sglang_that_is_not_there_names_its_set_up(tmp_path: Path) -> None:
    found = check_sglang("sglang", tmp_path)
    assert found.status == Status.MISSING
    assert "scripts/setup-sglang" in found.remedy


@pytest.mark.desktop
def test_the_env_server_tells_what_it_finds_as_a_program(tmp_path: Path) -> None:
    found = {finding.name: finding for finding in check_desktops(place(tmp_path))}
    assert set(found) == set(DESKTOP_CHECKS)
    assert found["local-desktop"].status == Status.OK, found["local-desktop"].message
    assert found["desktop-env"].status == Status.MISSING
    assert not (tmp_path / "var").exists(), "looking makes nothing"
