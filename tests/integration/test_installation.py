"""All steps of a user without a checkout: the wheel with its dependencies in a fresh environment, an empty folder,
`init`, `setup`, the smoke recipe on real desktops, Dagster's pages. Takes minutes and a package index: `make
test-install`."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from installed_wheel import Installed, build

START_LIMIT_S = 180.0
DEMO_LIMIT_S = 900.0
LOCATIONS = "{ workspaceOrError { ... on Workspace { locationEntries { name locationOrLoadError { __typename } } } } }"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.desktop,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not os.environ.get("OSWORLD_TEST_INSTALL"), reason="takes minutes and a package index: make test-install"
    ),
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("install")
    return Installed.with_extras(build(folder)[0], folder / "venv", "server,pipeline,train")


@pytest.fixture(scope="module")
def project(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    done = installed.command("init", "--recipe", "smoke", cwd=folder)
    assert done.stdout.count("wrote  ") == 6, done.stdout + done.stderr
    return folder


def test_set_up_needs_nothing_besides_the_installed_wheel(installed: Installed, project: Path) -> None:
    done = installed.command("setup", cwd=project)
    assert done.returncode == 0, done.stderr
    assert "debian: installed" in done.stderr


def test_every_stage_runs_on_real_desktops_and_doctor_reports_success(installed: Installed, project: Path) -> None:
    done = installed.command("demo", "--recipe", "recipe.toml", "--json", cwd=project, limit_s=DEMO_LIMIT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert [sum(score["outcomes"].values()) for score in json.loads(done.stdout)["scores"]] == [2, 2, 2, 2]
    ready = installed.command("doctor", "--role", "demo", "--json", cwd=project)
    assert ready.returncode == 0, ready.stdout
    assert "4 checkpoints" in installed.command(cwd=project).stdout


@pytest.mark.parametrize("command", [("osworld-pipeline", "dev"), ("dagster", "dev")], ids=" ".join)
def test_dagster_serves_the_code_location_with_the_runs_of_the_demo(
    installed: Installed, project: Path, command: tuple[str, ...]
) -> None:
    with serving(installed, project, *command) as url:
        (location,) = ask(url, LOCATIONS)["workspaceOrError"]["locationEntries"]
        assert location == {
            "name": "osworld_pipeline",
            "locationOrLoadError": {"__typename": "RepositoryLocation"},
        }
        runs = ask(url, "{ runsOrError { ... on Runs { results { status } } } }")["runsOrError"]["results"]
        assert "SUCCESS" in {run["status"] for run in runs}, "sensors may have started others"
    assert [path.name for path in project.glob(".tmp_dagster_home*")] == [], "DAGSTER_HOME is that of .env"


@contextmanager
def serving(installed: Installed, folder: Path, program: str, *words: str) -> Iterator[str]:
    """The address of Dagster's web server, when it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DAGSTER", "OSWORLD", "PYTHON"))}
    with (folder / "dagster.log").open("wb") as log:
        process = subprocess.Popen(
            [installed.root / "bin" / program, *words, "--port", str(port)],
            cwd=folder, env=kept, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + START_LIMIT_S
        url = f"http://127.0.0.1:{port}"
        while True:
            try:
                with urllib.request.urlopen(f"{url}/server_info", timeout=5):
                    break
            except OSError:
                assert process.poll() is None, (folder / "dagster.log").read_text(errors="replace")[-3000:]
                assert time.monotonic() < until, (folder / "dagster.log").read_text(errors="replace")[-3000:]
                time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def ask(url: str, query: str) -> dict:
    request = urllib.request.Request(
        f"{url}/graphql", data=json.dumps({"query": query}).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["data"]
