"""The instance of `init --postgres` in a real Postgres, which runs for these tests alone."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.project import project_files, write_project
from osworld_pipeline.tables.owned import read_table
from resources.instance_report import report

USER = "nobody"
START_LIMIT_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RETRY_LIMIT_S = 300.0
SMOKE = {"resources": {"recipe": {"config": {"name": "smoke"}}}}


def postgres_folder() -> Path:
    """Debian keeps the server's programs off PATH."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not folders:
        pytest.skip("no Postgres here (apt-get install postgresql)")
    return folders[-1]


def as_ordinary_user(command: list[str]) -> list[str]:
    """Postgres refuses to run as root. It ends with whoever started it."""
    change = ["--reuid", USER, "--regid", "nogroup", "--clear-groups"] if os.geteuid() == 0 else []
    return ["setpriv", *change, "--pdeathsig", "INT", "--", *command]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    pytest.importorskip("dagster_postgres", reason="the extra postgres is not installed")
    programs = postgres_folder()
    with tempfile.TemporaryDirectory(prefix="postgres-", dir="/tmp") as folder:
        if os.geteuid() == 0:
            shutil.chown(folder, USER)
        data = f"{folder}/data"
        init = [str(programs / "initdb"), "-D", data, "-U", "dagster", "-A", "trust", "-N"]
        done = subprocess.run(as_ordinary_user(init), capture_output=True, text=True, timeout=START_LIMIT_S, cwd="/")
        assert done.returncode == 0, done.stderr
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            number = free.getsockname()[1]
        options = ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-p", str(number), "-k", folder]
        command = as_ordinary_user([str(programs / "postgres"), "-D", data, *options])
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
        try:
            wait_for(number, server)
            yield number
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)


def wait_for(number: int, server: subprocess.Popen[bytes]) -> None:
    import psycopg2

    deadline = time.monotonic() + START_LIMIT_S
    while True:
        with suppress(psycopg2.OperationalError):
            psycopg2.connect(host="127.0.0.1", port=number, user="dagster", dbname="postgres").close()
            return
        assert server.poll() is None, "Postgres ended"
        assert time.monotonic() < deadline, "Postgres did not come up"
        time.sleep(0.05)


@pytest.fixture
def home(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    values = {"HOST": "127.0.0.1", "PORT": str(port), "DATABASE": "postgres", "USER": "dagster", "PASSWORD": ""}
    for name, value in values.items():
        monkeypatch.setenv(f"DAGSTER_PG_{name}", value)
    monkeypatch.setenv("DAGSTER_FILES", str(tmp_path / "files"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("PWD", str(tmp_path))  # Dagster's programs read .env, which names it
    write_project(tmp_path, project_files(is_postgres=True))
    return tmp_path


@dg.asset(pool="catalog")
def table() -> dg.MaterializeResult:
    return dg.MaterializeResult(metadata={"num_rows": 3})


def test_runs_events_and_pool_limits_lie_in_postgres(home: Path) -> None:
    assert report(home)["is_new"], "a report makes no table"
    with dg.DagsterInstance.from_config(str(home)) as instance:
        for pool, limit in (("desktops", 2), ("catalog", 1), ("desktops", 4)):  # set again, as people do
            instance.event_log_storage.set_concurrency_slots(pool, limit)
        assert dg.materialize([table], instance=instance).success
    with dg.DagsterInstance.from_config(str(home)) as instance:
        event = instance.get_latest_materialization_event(dg.AssetKey("table"))
        assert event is not None
        assert event.asset_materialization is not None
        assert event.asset_materialization.metadata["num_rows"].value == 3
        claim = instance.event_log_storage.claim_concurrency_slot
        assert claim("catalog", "run-1", "step").is_claimed
        assert not claim("catalog", "run-2", "step").is_claimed, "the catalog has one writer"
        assert all(claim("desktops", f"run-{number}", "step").is_claimed for number in range(4))
        for run_id in ("run-1", "run-2", *(f"run-{number}" for number in range(4))):
            instance.event_log_storage.free_concurrency_slots_for_run(run_id)
    told = report(home)
    assert (told["storage"], told["limits"]) == ("DagsterPostgresStorage", {"catalog": 1, "desktops": 4})
    assert not list(home.rglob("*.db")), "nothing in a file"


@pytest.mark.desktop
@pytest.mark.skipif("OSWORLD_CHAOS_KILLS" not in os.environ, reason="takes minutes: make test-faults")
def test_a_named_job_whose_process_was_killed_is_started_again_and_ends(home: Path) -> None:
    daemon = subprocess.Popen(
        [program("dagster-daemon"), "run", "-w", "workspace.yaml"], cwd=home, start_new_session=True
    )
    try:
        launch = [program("dagster"), "job", "launch", "-w", "workspace.yaml", "-j", "build_tables"]
        subprocess.run([*launch, "--config-json", json.dumps(SMOKE)], cwd=home, check=True, timeout=START_LIMIT_S)
        os.kill(within(START_LIMIT_S, lambda: parent_of("osworld_pipeline.runs record_sources", home)), signal.SIGKILL)
        with dg.DagsterInstance.from_config(str(home)) as instance:
            of_job = dg.RunsFilter(job_name="build_tables")
            within(RETRY_LIMIT_S, lambda: any(run.is_success for run in instance.get_runs(of_job)))
            runs = instance.get_runs(of_job)
    finally:
        os.killpg(daemon.pid, signal.SIGTERM)
        daemon.wait(START_LIMIT_S)
    assert {run.status for run in runs} == {dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS}
    (again,) = (run for run in runs if run.parent_run_id)
    assert again.is_success
    assert read_table(StateDir(home / "var"), "replay_buffer").num_rows > 0


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def within(limit_s: float, answer: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := answer()):
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s"
        time.sleep(0.2)
    return found


def parent_of(words: str, folder: Path) -> int | None:
    """The process that started a program in this folder: the worker of a run."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if words in command and os.readlink(entry / "cwd") == str(folder):
                return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return None
