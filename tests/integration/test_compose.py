"""compose.yaml of a project folder, run by podman-compose as docs/containers.md says. `make test-deploy` builds the
images and runs it."""

import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
from podman_cluster import podman

from osworld_pipeline.project import COMPOSE, project_files, write_project

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not os.environ.get("OSWORLD_TEST_DEPLOY"), reason="make test-deploy builds the images it needs"),
]
SERVICES = ("env-server", "dagster", "viewer", "mlflow")
TOKENS = {"ENV_SERVER_TOKEN": "a-token-of-this-test", "OSWORLD_VIEWER_TOKEN": "another-token-of-this-test"}
HEALTHY_LIMIT_S = 600.0
DEMO_LIMIT_S = 900.0


@dataclass(frozen=True)
class Compose:
    folder: Path
    name: str
    """Of the project, with which the names of its containers begin."""

    def __call__(self, *words: str, limit_s: float = 120.0) -> str:
        command = ["podman-compose", "--project-name", self.name, *words]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=limit_s)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    def container(self, service: str) -> str:
        return f"{self.name}_{service}_1"

    def url(self, service: str, port: int) -> str:
        return f"http://{podman('port', self.container(service), str(port))}"

    def wait_until_healthy(self, service: str) -> None:
        """Runs the health check of the service's container. Podman runs it by itself only where systemd runs."""
        deadline = time.monotonic() + HEALTHY_LIMIT_S
        while not self.is_healthy(service):
            assert time.monotonic() < deadline, f"{service}: {podman('logs', '--tail', '50', self.container(service))}"
            time.sleep(1)

    def is_healthy(self, service: str) -> bool:
        command = ["podman", "healthcheck", "run", self.container(service)]
        return subprocess.run(command, capture_output=True, timeout=120).returncode == 0

    def freeze(self, service: str) -> None:
        """Stops all processes of the service's container except the first and this shell, as if they hung."""
        podman("exec", self.container(service), "sh", "-c", "kill -STOP -1")


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Compose]:
    need_podman_compose()
    write_project(tmp_path, project_files(recipe="smoke"))
    with (tmp_path / ".env").open("a") as variables:
        variables.writelines(f"{name}={value}\n" for name, value in TOKENS.items())
        variables.write("OSWORLD_UNMASK=unmask=ALL\n")
    publish_on_free_ports(tmp_path / COMPOSE)
    made = Compose(tmp_path, f"osworld-{uuid4().hex[:8]}")
    try:
        yield made
    finally:
        made("--profile", "pages", "down", "--volumes", "--timeout", "1")


def need_podman_compose() -> None:
    """Skips the test without a podman-compose that has profiles. Debian 12 has 1.0.3, which lacks them."""
    if shutil.which("podman-compose") is None:
        pytest.skip("podman-compose is not installed (pip install podman-compose)")
    options = subprocess.run(["podman-compose", "--help"], capture_output=True, text=True, timeout=60).stdout
    if "--profile" not in options:
        pytest.skip("this podman-compose has no --profile; a newer one is needed (pip install podman-compose)")


def publish_on_free_ports(file: Path) -> None:
    text, num_ports = re.subn(r'\["127\.0\.0\.1:(\d+):\1"\]', r'["127.0.0.1::\1"]', file.read_text())
    assert num_ports == 3
    file.write_text(text)


def test_the_services_become_healthy_and_run_every_stage_of_the_smoke_recipe(compose: Compose) -> None:
    compose("up", "--detach")
    for service in SERVICES[:2]:
        compose.wait_until_healthy(service)
    demo = ("osworld-pipeline", "demo", "--recipe", "smoke", "--json")
    found = json.loads(compose("run", "--rm", "-T", "dagster", *demo, limit_s=DEMO_LIMIT_S))
    assert [sum(score["outcomes"].values()) for score in found["scores"]] == [2, 2, 2, 2]
    compose("--profile", "pages", "up", "--detach")
    for service in SERVICES[2:]:
        compose.wait_until_healthy(service)
    check_pages(compose)
    for service in SERVICES:
        compose.freeze(service)
        assert not compose.is_healthy(service), service


def check_pages(compose: Compose) -> None:
    assert "dagster" in get(compose.url("dagster", 3000)).lower()
    assert "mlflow" in get(compose.url("mlflow", 5000)).lower()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(compose.url("viewer", 8200))
    assert "gspo_phase2" in get(compose.url("viewer", 8200), token=TOKENS["OSWORLD_VIEWER_TOKEN"])


def get(url: str, *, token: str = "") -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return answer.read().decode()
