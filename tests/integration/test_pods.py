"""The pods of the Kubernetes manifests, run by Podman: the smoke recipe while the env servers are updated one after the
other. `make test-deploy` builds the images and runs it."""

import base64
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from osworld_pipeline.project import kubernetes_files, write_project

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not os.environ.get("OSWORLD_TEST_DEPLOY"), reason="make test-deploy builds the images it needs"),
]
TOKEN = "a-token-of-this-test"
PODMAN_LACKS = ("ports", "startupProbe", "readinessProbe", "livenessProbe")
"""Podman 4.3 publishes a container's port on the host, and has no probe by a port's name."""
NAMES = ("env-server-0", "env-server-1")
NUM_UPDATES = 6
"""Of one server; each is updated three times, while it has a live episode."""
RUN_LIMIT_S = 900.0
END_LIMIT_S = 120.0
"""For the live episodes of a server."""


def podman(*words: str, limit_s: float = 120.0, text: str | None = None) -> str:
    done = subprocess.run(["podman", *words], capture_output=True, text=True, timeout=limit_s, input=text)
    assert done.returncode == 0, f"podman {' '.join(words)}: {done.stderr}"
    return done.stdout.strip()


@contextmanager
def made(kind: str, name: str, *words: str, text: str | None = None) -> Iterator[str]:
    podman(kind, "create", *words, name, *(["-"] if text else []), text=text)
    try:
        yield name
    finally:
        podman(kind, "rm", name)


@dataclass(frozen=True)
class Cluster:
    folder: Path
    network: str
    state: str
    server_pod: dict[str, Any]
    images: dict[str, str]

    def play(self, name: str) -> None:
        """Starts a pod and waits until it is ready."""
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": self.server_pod}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(pod))
        podman("kube", "play", "--network", f"{self.network}:alias=env-server", str(path))
        ready = "import urllib.request as r; r.urlopen('http://127.0.0.1:8100/readyz', timeout=4)"
        deadline = time.monotonic() + 90
        while subprocess.run(
            ["podman", "exec", f"{name}-env-server", "python3", "-c", ready], capture_output=True, timeout=60
        ).returncode:
            assert time.monotonic() < deadline, podman("logs", f"{name}-env-server")
            time.sleep(0.5)

    def is_in_use(self, name: str) -> bool:
        """Whether its server has a live episode."""
        ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8100/health', timeout=4).read().decode())"
        return json.loads(podman("exec", f"{name}-env-server", "python3", "-c", ask))["episodes"] > 0

    def end(self, name: str, grace_s: int) -> str:
        """Stops a pod as a kubelet does: SIGTERM, and SIGKILL after the grace; its network stays until then, which
        `podman pod stop` would not wait for. Returns its log."""
        podman("stop", "--time", str(grace_s), f"{name}-env-server", limit_s=END_LIMIT_S)
        log = subprocess.run(["podman", "logs", f"{name}-env-server"], capture_output=True, text=True, timeout=60)
        podman("pod", "rm", "--force", name)
        return log.stdout + log.stderr

    def command(self, *words: str) -> list[str]:
        """A command in a pod of a run: its image, state, configuration and environment."""
        return [
            *("podman", "run", "--rm", "--network", self.network, "--volume", f"{self.state}:/srv/osworld/var"),
            *("--volume", f"{self.folder / 'kubernetes' / 'config'}:/etc/osworld:ro"),
            *("--env", "OSWORLD_DEPLOYMENT=/etc/osworld/deployment.yaml", "--env", f"ENV_SERVER_TOKEN={TOKEN}"),
            *(self.images["trainer"], *words),
        ]

    def query(self, sql: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            self.command("osworld-pipeline", "query", sql, "--json"), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def rendered(folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    write_project(tmp_path, kubernetes_files(recipe="smoke"))
    manifests, suffix = tmp_path / "kubernetes", uuid4().hex[:8]
    (manifests / "secrets.env").write_text(
        f"ENV_SERVER_TOKEN={TOKEN}\nOSWORLD_VIEWER_TOKEN=unused\nDAGSTER_PG_PASSWORD=unused\n"
    )
    deployment = manifests / "config" / "deployment.yaml"
    resources = yaml.safe_load(deployment.read_text())["resources"]
    del resources["tracking"]  # MLflow is not run here
    deployment.write_text(yaml.safe_dump({"resources": resources}))

    documents = rendered(manifests)
    (server,) = (one for one in documents if (one["kind"], one["metadata"]["name"]) == ("StatefulSet", "env-server"))
    (code,) = (one for one in documents if (one["kind"], one["metadata"]["name"]) == ("Deployment", "code"))
    pod = server["spec"]["template"]["spec"]
    for container in pod["containers"]:
        for key in PODMAN_LACKS:
            container.pop(key, None)
    # Podman 4.3 reads a secret as JSON.
    secret = json.dumps({"ENV_SERVER_TOKEN": base64.b64encode(TOKEN.encode()).decode()})
    for volume in pod["volumes"]:
        volume["name"] += suffix
        for container in pod["containers"]:
            for mount in container["volumeMounts"]:
                mount["name"] += suffix
    with ExitStack() as stack:
        network = stack.enter_context(made("network", f"osworld-{suffix}"))
        state = stack.enter_context(made("volume", f"state-{suffix}"))
        stack.enter_context(made("secret", "osworld-secrets", text=secret))
        stack.callback(subprocess.run, ["podman", "pod", "rm", "--force", "--ignore", *NAMES], capture_output=True)
        yield Cluster(
            folder=tmp_path,
            network=network,
            state=state,
            server_pod=pod,
            images={"trainer": code["spec"]["template"]["spec"]["containers"][0]["image"]},
        )


def test_no_episode_is_lost_while_the_env_servers_are_updated(cluster: Cluster, tmp_path: Path) -> None:
    grace_s = cluster.server_pod["terminationGracePeriodSeconds"]
    for name in NAMES:
        cluster.play(name)
    logs: list[str] = []
    output = tmp_path / "train.log"
    command = cluster.command(
        *("osworld-pipeline", "train", "--recipe", "/etc/osworld/recipe.toml"),
        *("--set", "evaluation.seeds=[0,1,2,3,4,5]", "--set", "desktop.num_replicas=4"),
    )
    with output.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as run:
        try:
            deadline = time.monotonic() + RUN_LIMIT_S
            while run.poll() is None and len(logs) < NUM_UPDATES:
                assert time.monotonic() < deadline, output.read_text()
                name = NAMES[len(logs) % len(NAMES)]
                if not cluster.is_in_use(name):
                    continue
                logs.append(cluster.end(name, grace_s))
                cluster.play(name)
            run.wait(deadline - time.monotonic())
        finally:
            run.kill()
    assert run.returncode == 0, output.read_text()
    assert len(logs) == NUM_UPDATES, "the run took longer than the updates"
    (counted,) = cluster.query(
        "SELECT count(*) AS episodes, count(*) FILTER (NOT is_valid) AS faults, "
        "count(*) FILTER (len(earlier_faults) > 0) AS repeated, count(DISTINCT episode_id) AS ids FROM episodes"
    )
    num_met = sum("draining: 0 episodes" not in log for log in logs)
    print(f"{len(logs)} updates of a server, {num_met} with live episodes; {counted}")
    assert (counted["faults"], counted["repeated"]) == (0, 0)
    assert counted["ids"] == counted["episodes"] >= 30
    assert all("draining" in log for log in logs)
    assert num_met >= NUM_UPDATES // 2, "updates met live episodes"
    assert not [log for log in logs if "did not end within" in log]
