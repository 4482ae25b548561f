"""Pods of the Kubernetes manifests, run by Podman on one network. Parts of a pod that Podman 4.3 does not accept are
given to it in another form. This process runs the probes, as a kubelet does."""

import base64
import copy
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from osworld_pipeline.project import kubernetes_files, write_project

SECRETS = {
    "ENV_SERVER_TOKEN": "a-token-of-this-test",
    "OSWORLD_VIEWER_TOKEN": "another-token-of-this-test",
    "DAGSTER_PG_PASSWORD": "a-password-of-this-test",
    "RAY_AUTH_TOKEN": "a-token-of-this-test-for-ray",
}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
PODMAN_LACKS = ("ports", *PROBES)
"""Podman 4.3 publishes a container's port on the host, and has no probe by a port's name."""
START_LIMIT_S = 420.0
END_LIMIT_S = 120.0
"""For the live episodes of a server."""
TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
Spec = dict[str, Any]


def podman(*words: str, limit_s: float = 120.0, text: str | None = None) -> str:
    done = subprocess.run(["podman", *words], capture_output=True, text=True, timeout=limit_s, input=text)
    assert done.returncode == 0, f"podman {' '.join(words)}: {done.stderr}"
    return done.stdout.strip()


@dataclass(frozen=True)
class Api:
    """Where the API server of the cluster is, and the files by which a pod's service account reaches it."""

    host: str
    port: int
    folder: Path


@dataclass
class PodmanCluster:
    folder: Path
    """Of the rendered project."""
    documents: list[Spec]
    network: str
    state: str
    """The volume that the claim `osworld-state` names."""
    suffix: str
    api: Api | None = None
    _pods: set[str] = field(default_factory=set)

    def document(self, kind: str, name: str) -> Spec:
        (found,) = (one for one in self.documents if (one["kind"], one["metadata"]["name"]) == (kind, name))
        return found

    @property
    def gateway(self) -> str:
        """This host's address on the network, once a pod runs there."""
        (network,) = json.loads(podman("network", "inspect", self.network))
        return network["subnets"][0]["gateway"]

    def start(self, kind: str, name: str, *, pod: str = "") -> None:
        """Starts a pod of a Deployment or StatefulSet, under the name of its service, and waits for its probes.
        `pod` is its name, by default that of the workload."""
        spec = self.document(kind, name)["spec"]["template"]["spec"]
        self.play(pod or name, spec, alias=name)
        (container,) = spec["containers"]
        for probe in PROBES:
            if probe in container:
                self._wait(pod or name, container, probe)

    def play(self, pod: str, spec: Spec, *, alias: str = "") -> None:
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod}, "spec": self._for_podman(spec)}
        path = self.folder / f"{pod}.yaml"
        path.write_text(yaml.safe_dump(document))
        maps = self.folder / "config-maps.yaml"
        maps.write_text(yaml.safe_dump_all(one for one in self.documents if one["kind"] == "ConfigMap"))
        self._pods.add(pod)
        network = f"{self.network}:alias={alias}" if alias else self.network
        podman("kube", "play", "--network", network, "--configmap", str(maps), str(path))

    def end(self, pod: str, container: str, grace_s: int) -> str:
        """Stops a pod as a kubelet does: SIGTERM, and SIGKILL after the grace period. Its network stays until then;
        `podman pod stop` would not wait for that. Returns its log."""
        podman("stop", "--time", str(grace_s), f"{pod}-{container}", limit_s=END_LIMIT_S)
        log = self.log(pod, container)
        podman("pod", "rm", "--force", pod)
        return log

    def log(self, pod: str, container: str) -> str:
        done = subprocess.run(["podman", "logs", f"{pod}-{container}"], capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def address(self, pod: str) -> str:
        (seen,) = json.loads(podman("pod", "inspect", pod, "--format", "[{{json .}}]"))
        (infra,) = json.loads(podman("inspect", seen["InfraContainerID"]))
        return infra["NetworkSettings"]["Networks"][self.network]["IPAddress"]

    def command(self, *words: str) -> list[str]:
        """The command line for `words` in a pod of a run, with its image, state, configuration and environment."""
        return [
            *("podman", "run", "--rm", "--network", self.network, "--volume", f"{self.state}:/srv/osworld/var"),
            *("--volume", f"{self.folder / 'kubernetes' / 'config'}:/etc/osworld:ro"),
            *(f"--env={name}={SECRETS[name]}" for name in ("ENV_SERVER_TOKEN", "RAY_AUTH_TOKEN")),
            *(f"--env={name}={value}" for name, value in self.document("ConfigMap", "osworld-cluster")["data"].items()),
            *(self.document("Deployment", "code")["spec"]["template"]["spec"]["containers"][0]["image"], *words),
        ]

    def query(self, sql: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            self.command("osworld-pipeline", "query", sql, "--json"), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def remove_pods(self) -> None:
        subprocess.run(["podman", "pod", "rm", "--force", "--ignore", *self._pods], capture_output=True, timeout=300)

    # Probes

    def _wait(self, pod: str, container: Spec, probe: str) -> None:
        ports = {one["name"]: one["containerPort"] for one in container.get("ports", [])}
        deadline = time.monotonic() + START_LIMIT_S
        while not self._is_met(pod, f"{pod}-{container['name']}", container[probe], ports):
            assert time.monotonic() < deadline, f"{pod}: {probe}: {self.log(pod, container['name'])}"
            time.sleep(0.5)

    def _is_met(self, pod: str, container: str, probe: Spec, ports: dict[str, int]) -> bool:
        limit_s = 60  # a command in a container takes seconds to start here
        if "exec" in probe:
            command = ["podman", "exec", container, *probe["exec"]["command"]]
            return subprocess.run(command, capture_output=True, timeout=limit_s).returncode == 0
        action = probe.get("httpGet") or probe["tcpSocket"]
        at = f"http://{self.address(pod)}:{ports.get(action['port'], action['port'])}{action.get('path', '/')}"
        try:
            with urllib.request.urlopen(at, timeout=limit_s) as answer:
                return answer.status < 400
        except urllib.error.HTTPError:
            return "tcpSocket" in probe  # the port is open
        except OSError:
            return False

    # Conversion to what Podman accepts

    def _for_podman(self, spec: Spec) -> Spec:
        spec = copy.deepcopy(spec)
        volumes = {one["name"]: one for one in spec.get("volumes", [])}
        kept: dict[str, Spec] = {}
        for container in spec["containers"]:
            for key in PODMAN_LACKS:
                container.pop(key, None)
            for variable in container.get("env", []):
                if "value" in variable:
                    variable["value"] = self._expanded(variable["value"])
            for mount in container.get("volumeMounts", []):
                made = self._volume(volumes[mount["name"]], mount.pop("subPath", ""))
                mount["name"] = made["name"]
                kept[made["name"]] = made
        spec["volumes"] = list(kept.values())
        account = self._account(spec)
        if self.api and spec.get("automountServiceAccountToken", account.get("automountServiceAccountToken", True)):
            self._add_account(spec, self.api)
        return spec

    def _expanded(self, value: str) -> str:
        """Expands `$(NAME)`, also for a variable of `envFrom`, which Podman 4.3 leaves unchanged."""
        for name, known in (self.document("ConfigMap", "osworld-cluster")["data"] | SECRETS).items():
            value = value.replace(f"$({name})", known)
        return value

    def _volume(self, volume: Spec, sub_path: str) -> Spec:
        """The volume with names of this cluster. A ConfigMap becomes the folder or file of its content."""
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"] == {"claimName": "osworld-state"}
            return {"name": volume["name"], "persistentVolumeClaim": {"claimName": self.state}}
        if "configMap" in volume:
            folder = self._written(volume["configMap"]["name"])
            where = {"path": str(folder / sub_path), "type": "File" if sub_path else "Directory"}
            return {"name": f"{volume['name']}{'-' if sub_path else ''}{sub_path.replace('.', '-')}", "hostPath": where}
        return volume | {"name": volume["name"] + self.suffix}

    def _written(self, config_map: str) -> Path:
        folder = self.folder / "config-maps" / config_map
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        for name, text in self.document("ConfigMap", config_map)["data"].items():
            if not (folder / name).exists():
                (folder / name).write_text(text)
        return folder

    def _account(self, spec: Spec) -> Spec:
        return self.document("ServiceAccount", spec["serviceAccountName"]) if "serviceAccountName" in spec else {}

    def _add_account(self, spec: Spec, api: Api) -> None:
        spec["volumes"].append({"name": "account", "hostPath": {"path": str(api.folder), "type": "Directory"}})
        where = {"KUBERNETES_SERVICE_HOST": api.host, "KUBERNETES_SERVICE_PORT": str(api.port)}
        for container in spec["containers"]:
            container.setdefault("env", []).extend({"name": name, "value": value} for name, value in where.items())
            container["volumeMounts"].append({"name": "account", "mountPath": TOKEN_FOLDER, "readOnly": True})


@contextmanager
def podman_cluster(folder: Path) -> Iterator[PodmanCluster]:
    """An empty cluster, with the manifests that `init --kubernetes --recipe smoke` writes to `folder`."""
    write_project(folder, kubernetes_files(recipe="smoke"))
    secrets = "".join(f"{name}={value}\n" for name, value in SECRETS.items())
    (folder / "kubernetes" / "secrets.env").write_text(secrets)
    suffix = uuid4().hex[:8]
    # Podman 4.3 reads a secret as JSON.
    secret = json.dumps({name: base64.b64encode(value.encode()).decode() for name, value in SECRETS.items()})
    with ExitStack() as stack:
        network = stack.enter_context(_made("network", f"osworld-{suffix}"))
        state = stack.enter_context(_made("volume", f"state-{suffix}"))
        stack.enter_context(_made("secret", "osworld-secrets", text=secret))
        cluster = PodmanCluster(folder=folder, documents=[], network=network, state=state, suffix=suffix)
        stack.callback(cluster.remove_pods)
        render(cluster)
        yield cluster


def render(cluster: PodmanCluster) -> None:
    """Reads the manifests anew, after a change of their files."""
    command = ["kubectl", "kustomize", str(cluster.folder / "kubernetes")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    cluster.documents = list(yaml.safe_load_all(done.stdout))


@contextmanager
def _made(kind: str, name: str, *, text: str | None = None) -> Iterator[str]:
    podman(kind, "create", name, *(["-"] if text else []), text=text)
    try:
        yield name
    finally:
        podman(kind, "rm", name)
