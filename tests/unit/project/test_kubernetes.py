"""`init --kubernetes` writes manifests that a cluster accepts. kubectl renders them; no cluster is needed."""

import argparse
import copy
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
import jsonschema
import kubernetes_validate
import pytest
import typer
import yaml
from dagster._cli import create_dagster_cli
from dagster._config import validate_config
from dagster._daemon.cli import create_dagster_daemon_cli
from kubernetes_validate.utils import schema_contents

from env_server.options import add_server_options, settings_of
from env_server.settings import Settings
from osworld_pipeline.cli import app
from osworld_pipeline.domain.version import installed_version
from osworld_pipeline.project import kubernetes_files, write_project
from osworld_pipeline.recipes.schema import EngineSection
from osworld_pipeline.web.viewer.live.servers import LiveServers
from osworld_pipeline.web.viewer.settings import SERVER_TOKEN_VARIABLE
from resources.deployment import deployment_resources
from resources.desktops import DesktopsResource

CONTAINERFILE = Path(__file__).resolve().parents[3] / "deploy" / "Containerfile"
SECRETS = {"ENV_SERVER_TOKEN": "first-secret", "OSWORLD_VIEWER_TOKEN": "second-secret", "DAGSTER_PG_PASSWORD": "third"}
VERSIONS = ("1.31", "1.34", "1.37")
COMPONENTS = ("postgres", "user-namespaces", "kvm", "sglang", "weights-receiver", "ray", "grafana")
NEEDED = {"weights-receiver": ("sglang",)}
"""Components without which another has nothing to change."""
CHOICES = [(), *((*NEEDED.get(name, ()), name) for name in COMPONENTS), COMPONENTS]
RAY_SCHEMAS = "OSWORLD_KUBERAY_CRDS"
"""Names a folder with ray.io_rayclusters.yaml of one or more versions of KubeRay, below it."""
Documents = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    write_project(root, kubernetes_files(recipe="smoke"))
    lines = "".join(f"{name}={value}\n" for name, value in SECRETS.items())
    (root / "kubernetes" / "secrets.env").write_text(lines)
    return root / "kubernetes"


def rendered(folder: Path, *components: str, images: str = "") -> Documents:
    """The manifests with these components, and with lines added to the list of images."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed, which renders the manifests")
    kustomization = folder / "kustomization.yaml"
    text = kustomization.read_text()
    chosen = text
    for name in components:
        chosen = chosen.replace(f"# - components/{name} ", f"- components/{name} ")
    assert chosen.count("  - components/") == len(components)
    kustomization.write_text(chosen.replace("images:\n", f"images:\n{images}"))
    try:
        done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=120)
    finally:
        kustomization.write_text(text)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def base(folder: Path) -> Documents:
    return rendered(folder)


def one(documents: Documents, kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def pods(documents: Documents) -> Iterator[tuple[str, dict[str, Any]]]:
    for each in documents:
        if each["kind"] in ("Deployment", "StatefulSet"):
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


@pytest.fixture(scope="module", autouse=True)
def each_schema_is_parsed_once() -> Iterator[None]:
    """The library would parse several megabytes of definitions for each document."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", functools.cache(schema_contents))
        yield


def check_schema(document: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("components", CHOICES, ids=str)
def test_every_choice_of_components_renders_manifests_that_kubernetes_accepts(
    folder: Path, components: tuple[str, ...]
) -> None:
    documents = rendered(folder, *components)
    assert {each["metadata"].get("namespace", "osworld") for each in documents} == {"osworld"}
    for each in documents:
        if each["kind"] != "RayCluster":
            check_schema(each)


def test_the_check_finds_a_wrong_key(base: Documents) -> None:
    server = one(base, "StatefulSet", "env-server")
    server["spec"]["template"]["spec"]["containers"][0]["securityContext"]["privilegd"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="privilegd"):
        check_schema(server)
    del server["spec"]["template"]["spec"]["containers"][0]["securityContext"]["privilegd"]


def test_the_pods_of_the_ray_cluster_are_accepted_as_pods(folder: Path) -> None:
    spec = one(rendered(folder, "ray"), "RayCluster", "trainers")["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node"}, "spec": group["template"]["spec"]}
        check_schema(pod)
        (container,) = pod["spec"]["containers"]
        assert container["image"].endswith(f"osworld/trainer:{installed_version()}")


def test_ray_requires_a_token_that_no_desktop_has(folder: Path) -> None:
    documents = rendered(folder, "ray")
    assert one(documents, "ConfigMap", "osworld-cluster")["data"]["RAY_AUTH_MODE"] == "token"
    spec = one(documents, "RayCluster", "trainers")["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert {"configMapRef": {"name": "osworld-cluster"}} in container["envFrom"]
        assert {"secretRef": {"name": "osworld-secrets"}} in container["envFrom"]
    (server,) = one(documents, "StatefulSet", "env-server")["spec"]["template"]["spec"]["containers"]
    assert "envFrom" not in server
    assert [one["name"] for one in server["env"]] == ["ENV_SERVER_TOKEN"]


def test_the_operator_accepts_the_ray_cluster(folder: Path) -> None:
    """KubeRay's schema is a megabyte: it is not part of this project."""
    files = sorted(Path(os.environ.get(RAY_SCHEMAS) or "/nonexistent").rglob("ray.io_rayclusters.yaml"))
    if not files:
        pytest.skip(f"{RAY_SCHEMAS} names no folder with ray.io_rayclusters.yaml, a CRD of KubeRay")
    cluster = one(rendered(folder, "ray"), "RayCluster", "trainers")
    wrong = copy.deepcopy(cluster)
    wrong["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["imag"] = "x"
    for file in files:
        accepted = ray_schema(file)
        assert [error.message for error in accepted.iter_errors(cluster)] == [], file
        assert ["imag" in error.message for error in accepted.iter_errors(wrong)] == [True], file


def ray_schema(crd: Path) -> jsonschema.Draft7Validator:
    """The schema of `v1`, with unknown keys as errors, as `kubectl apply` reports them."""
    (schema,) = (
        version["schema"]["openAPIV3Schema"]
        for version in yaml.load(crd.read_text(), yaml.CSafeLoader)["spec"]["versions"]
        if version["name"] == "v1"
    )
    make_strict(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft7Validator(schema)


def make_strict(schema: Any) -> None:
    if isinstance(schema, list):
        for each in schema:
            make_strict(each)
    if not isinstance(schema, dict):
        return
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    for each in schema.values():
        make_strict(each)


def test_sglang_has_the_version_that_is_tested_on_a_cpu(folder: Path) -> None:
    pod = one(rendered(folder, "sglang"), "StatefulSet", "sglang")["spec"]["template"]["spec"]
    pinned = resources.files("osworld_pipeline.installing") / "sglang" / "without-dependencies.txt"
    (version,) = re.findall(r"^sglang==(\S+)", pinned.read_text(), re.MULTILINE)
    assert pod["containers"][0]["image"] == f"lmsysorg/sglang:v{version}"


def test_a_digest_in_the_list_of_images_pins_a_third_party_image(folder: Path) -> None:
    pins = {"postgres": f"sha256:{'1' * 64}", "lmsysorg/sglang": f"sha256:{'2' * 64}"}
    lines = "".join(f"  - {{name: {name}, digest: '{digest}'}}\n" for name, digest in pins.items())
    documents = rendered(folder, "postgres", "sglang", images=lines)
    images = {container["image"] for _, pod in pods(documents) for container in pod["containers"]}
    assert {f"{name}@{digest}" for name, digest in pins.items()} <= images


def test_virtual_machines_run_in_the_image_that_has_their_guest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENV_SERVER_TOKEN", SECRETS["ENV_SERVER_TOKEN"])
    pod = one(rendered(folder, "kvm"), "StatefulSet", "env-server")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"].endswith(f"osworld/env-server-qemu:{installed_version()}")
    assert "initContainers" not in pod
    (entrypoint,) = re.findall(r'^ENTRYPOINT (\["env-server", .+\])$', CONTAINERFILE.read_text(), re.MULTILINE)
    settings = server_settings([*json.loads(entrypoint)[1:], *container["args"]])
    assert settings.provider == "qemu"
    assert f"build-image --state-dir {settings.state_dir} " in CONTAINERFILE.read_text()


def test_the_weights_receiver_stores_where_sglang_reads(folder: Path) -> None:
    documents = rendered(folder, "sglang", "weights-receiver")
    pod = one(documents, "StatefulSet", "sglang")["spec"]["template"]["spec"]
    sglang, receiver = (
        next(each for each in pod["containers"] if each["name"] == name) for name in ("sglang", "weights-receiver")
    )
    (written,) = receiver["volumeMounts"]
    assert written | {"readOnly": True} in sglang["volumeMounts"]
    accept(typer.main.get_command(app), ["receive-weights", written["mountPath"], *receiver["args"]])
    port = EngineSection().receiver_port
    assert [each["containerPort"] for each in receiver["ports"]] == [port]
    assert {"name": "weights", "port": port} in one(documents, "Service", "sglang")["spec"]["ports"]
    assert receiver["image"].endswith(f"osworld/weights-receiver:{installed_version()}")


def test_images_have_this_version_and_runs_use_the_image_of_the_code_deployment(base: Documents) -> None:
    images = {container["image"] for _, pod in pods(base) for container in pod["containers"]}
    version = installed_version()
    assert images == {f"localhost/osworld/env-server:{version}", f"localhost/osworld/trainer:{version}"}
    ((container,),) = (pod["containers"] for name, pod in pods(base) if name == "code")
    assert {"name": "DAGSTER_CURRENT_IMAGE", "value": container["image"]} in container["env"]


def test_every_command_is_accepted_by_its_program(base: Documents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENV_SERVER_TOKEN", SECRETS["ENV_SERVER_TOKEN"])
    seen = set()
    for name, pod in pods(base):
        (container,) = pod["containers"]
        if name == "env-server":
            settings = server_settings(container["args"])
            assert settings.drain_episodes_s < pod["terminationGracePeriodSeconds"]
            continue
        program, *words = container["args"]
        seen.add(program)
        if program == "osworld-pipeline":
            accept(typer.main.get_command(app), words)
        elif program == "dagster":
            accept(create_dagster_cli(), words)
        else:
            assert entry_points(group="console_scripts", name=program)
    assert seen == {"osworld-pipeline", "dagster", "dagster-daemon", "dagster-webserver", "mlflow"}


def test_every_probe_that_runs_a_command_is_accepted_by_its_program(base: Documents) -> None:
    programs = {"dagster": create_dagster_cli(), "dagster-daemon": create_dagster_daemon_cli()}
    seen = set()
    for _, pod in pods(base):
        (container,) = pod["containers"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if "exec" in container.get(probe, {}):
                program, *words = container[probe]["exec"]["command"]
                accept(programs[program], words)
                seen.add((program, probe))
    assert seen == {("dagster", "startupProbe"), ("dagster-daemon", "livenessProbe")}


def server_settings(words: list[str]) -> Settings:
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    return settings_of(parser.parse_args(words))


def accept(command: click.Command, words: list[str]) -> None:
    while isinstance(command, click.Group):
        command, words = command.commands[words[0]], words[1:]
    command.make_context("command", words)


def test_only_the_desktops_have_more_than_a_programs_rights(base: Documents) -> None:
    for name, pod in pods(base):
        (container,) = pod["containers"]
        if name == "env-server":
            assert container["securityContext"]["privileged"]
            assert pod["automountServiceAccountToken"] is False
            continue
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert ("serviceAccountName" in pod) == name.startswith("dagster")


def test_secret_values_are_only_in_the_secret(base: Documents) -> None:
    others = yaml.safe_dump([each for each in base if each["kind"] != "Secret"])
    assert not [value for value in SECRETS.values() if value in others]


def test_a_run_is_a_job_with_the_state_the_configuration_and_the_secrets(folder: Path, base: Documents) -> None:
    from dagster_k8s import K8sRunLauncher  # it imports the whole client of Kubernetes

    instance = yaml.safe_load(one(base, "ConfigMap", "osworld-config")["data"]["dagster.yaml"])
    config = instance["run_launcher"]["config"]
    checked = validate_config(K8sRunLauncher.config_type(), config)
    assert checked.success, checked.errors
    assert "postgres" in instance["storage"]
    there = {(each["kind"], each["metadata"]["name"]) for each in base}
    for kind, names in {
        "ConfigMap": [config["instance_config_map"], *config["env_config_maps"]],
        "Secret": config["env_secrets"],
        "ServiceAccount": [config["service_account_name"]],
        "PersistentVolumeClaim": [each["persistentVolumeClaim"]["claimName"] for each in config["volumes"][:1]],
    }.items():
        assert {(kind, name) for name in names} <= there
    code = one(base, "Deployment", "code")["spec"]["template"]["spec"]["containers"][0]
    mounts = {mount["mountPath"] for mount in code["volumeMounts"]}
    assert {mount["mountPath"] for mount in config["volume_mounts"]} <= mounts


def test_the_viewer_finds_the_desktops_by_the_headless_service_and_has_their_token(base: Documents) -> None:
    service = one(base, "Service", "env-server")
    container = one(base, "Deployment", "viewer")["spec"]["template"]["spec"]["containers"][0]
    words = container["args"]
    address = words[words.index("--env-server-url") + 1]
    assert address == f"dns+http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    LiveServers([address], None)  # an address that is not valid is an error
    assert {"secretRef": {"name": "osworld-secrets"}} in container["envFrom"]
    assert SERVER_TOKEN_VARIABLE in one(base, "Secret", "osworld-secrets")["data"]


def test_desktops_and_dagster_link_to_the_viewer_at_its_forwarded_port(base: Documents) -> None:
    (port,) = one(base, "Service", "viewer")["spec"]["ports"]
    address = f"http://127.0.0.1:{port['port']}"
    server = one(base, "StatefulSet", "env-server")["spec"]["template"]["spec"]["containers"][0]
    assert f"--viewer-url={address}" in server["args"]
    assert one(base, "ConfigMap", "osworld-cluster")["data"]["OSWORLD_VIEWER_URL"] == address


def test_runs_find_the_desktops_by_the_headless_service(folder: Path, base: Documents) -> None:
    desktops = deployment_resources({"OSWORLD_DEPLOYMENT": str(folder / "config" / "deployment.yaml")})["desktops"]
    assert isinstance(desktops, DesktopsResource)
    service = one(base, "Service", "env-server")
    assert desktops.urls == [f"dns+http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"]
    assert service["spec"]["clusterIP"] == "None"
