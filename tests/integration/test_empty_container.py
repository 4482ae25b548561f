"""Follows docs/install.md with pip in a container that has only the base system of Debian, as root and as an ordinary
user. Needs minutes, Podman, a package index and a base image: `make test-install`. OSWORLD_TEST_BASE names another
base image, and so another Python."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from uuid import uuid4

import pytest
from installed_wheel import ROOT, build
from podman_cluster import podman

PACKAGES_LIMIT_S = 1500.0
DEMO_LIMIT_S = 900.0
COMMAND_LIMIT_S = 300.0
FOLDER = "/srv/user"
MAY_START_DESKTOPS = {
    "root": ("--privileged",),
    "someone": ("--security-opt", "seccomp=unconfined", "--security-opt", "unmask=ALL"),
}
"""By user, the options of docs/containers.md."""
BASE = (
    os.environ.get("OSWORLD_TEST_BASE")
    or re.findall(r"^ARG BASE=(\S+)", (ROOT / "deploy/Containerfile").read_text(), re.MULTILINE)[0]
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not os.environ.get("OSWORLD_TEST_INSTALL"), reason="takes minutes and a package index: make test-install"
    ),
    pytest.mark.skipif(which("podman") is None, reason="Podman is not installed"),
]


@dataclass(frozen=True)
class NewUser:
    """A user in a container, with an environment and a project in `FOLDER`."""

    name: str
    container: str

    def run(self, line: str, *, limit_s: float = COMMAND_LIMIT_S, user: str = "") -> subprocess.CompletedProcess[str]:
        """Runs a shell line in the project, with the environment active."""
        there = f"[ ! -d venv ] || . venv/bin/activate; [ ! -d project ] || cd project; {line}"
        command = ["podman", "exec", "--user", user or self.name, self.container, "bash", "-c", there]
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False
        )

    def succeed(self, line: str, *, limit_s: float = COMMAND_LIMIT_S, user: str = "") -> str:
        done = self.run(line, limit_s=limit_s, user=user)
        assert done.returncode == 0, f"{line}: {done.stdout[-3000:]}{done.stderr[-4000:]}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if subprocess.run(["podman", "image", "exists", BASE], check=False, timeout=60).returncode:
        pulled = subprocess.run(["podman", "pull", BASE], capture_output=True, text=True, check=False, timeout=600)
        if pulled.returncode:
            pytest.skip(f"the base image {BASE} cannot be pulled; OSWORLD_TEST_BASE names another")
    folder = tmp_path_factory.mktemp("wheel")
    folder.chmod(0o755)
    return build(folder)[0]


@pytest.fixture(scope="module", params=MAY_START_DESKTOPS)
def user(request: pytest.FixtureRequest, wheel: Path) -> Iterator[NewUser]:
    user = NewUser(request.param, f"trial-{uuid4().hex[:8]}")
    podman(
        *("run", "--detach", "--init", "--name", user.container, "--network", "host"),
        *MAY_START_DESKTOPS[user.name],
        *package_index(),
        *("--volume", f"{wheel.parent}:/wheel:ro", "--volume", FOLDER, "--workdir", FOLDER, BASE, "sleep", "infinity"),
    )
    try:
        yield user
    finally:
        podman("rm", "--force", "--volumes", "--time", "5", user.container)


def package_index() -> Iterator[str]:
    """Options by which pip in a container uses the index, proxy and files that the tester's variables name."""
    for name, value in os.environ.items():
        if not name.startswith("PIP_") and not name.lower().endswith("_proxy"):
            continue
        if Path(value).is_absolute() and Path(value).exists():
            yield from ("--volume", f"{value}:/tester{value}:ro")
            yield from ("--env", f"{name}=/tester{value}")
        else:
            yield from ("--env", f"{name}={value}")


def test_pip_installs_the_wheel_and_init_makes_a_project(user: NewUser, wheel: Path) -> None:
    user.succeed("apt-get update && apt-get install -y --no-install-recommends python3-venv", user="root")
    if user.name != "root":
        user.succeed(f"useradd --create-home {user.name} && chown {user.name} .", user="root")
    user.succeed("python3 -m venv venv")
    user.succeed(f"pip install --quiet '/wheel/{wheel.name}[server,pipeline,train]'", limit_s=PACKAGES_LIMIT_S)
    assert user.succeed("mkdir project && cd project && osworld-pipeline init").count("wrote  ") == 6


def test_set_up_installs_the_debian_packages_or_prints_the_command_for_an_administrator(user: NewUser) -> None:
    done = user.run("osworld-pipeline setup", limit_s=PACKAGES_LIMIT_S)
    if user.name != "root":
        assert done.returncode == 1
        (command,) = re.findall(r"as root, run: (.*)", done.stderr)
        user.succeed(f"export DEBIAN_FRONTEND=noninteractive; {command}", limit_s=PACKAGES_LIMIT_S, user="root")
        done = user.run("osworld-pipeline setup")
    assert done.returncode == 0, done.stderr
    assert "debian: installed" in done.stderr


def test_every_stage_runs_on_real_desktops_and_doctor_reports_success(user: NewUser) -> None:
    done = user.run("osworld-pipeline demo --recipe smoke --json", limit_s=DEMO_LIMIT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    scores = json.loads(done.stdout)["scores"]
    assert [sum(score["outcomes"].values()) for score in scores] == [2, 2, 2, 2]
    user.succeed("osworld-pipeline doctor --role demo")
    assert "4 checkpoints" in user.succeed("osworld-pipeline")
