"""The container images: what each says about its own content. `make test-deploy` builds them and runs it."""

import hashlib
import importlib.metadata
import json
import os
import subprocess
import time
from typing import Any
from uuid import uuid4

import httpx
import pytest
from packaging.utils import canonicalize_name
from podman_cluster import podman

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not os.environ.get("OSWORLD_TEST_DEPLOY"), reason="make test-deploy builds the images it needs"),
]
VERSION = importlib.metadata.version("osworld-pipeline")
DEBIAN = "dpkg-query --show --showformat '${Package}\\n'"
PYTHON = "uv pip list --quiet --format json"


def inside(image: str, command: str) -> str:
    run = ["podman", "run", "--rm", "--entrypoint", "sh", f"localhost/osworld/{image}:{VERSION}", "-c", command]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def components(image: str, name: str) -> list[dict[str, Any]]:
    listed = json.loads(inside(image, f"cat /usr/share/sbom/{name}.cdx.json"))
    assert listed["bomFormat"] == "CycloneDX"
    return listed["components"]


@pytest.mark.parametrize(
    ("image", "debian", "python"),
    [
        ("env-server", "xvfb", "fastapi"),
        ("pipeline", "python3", "dagster"),
        ("trainer", "python3", "torch"),
        ("weights-receiver", "python3", "starlette"),
    ],
)
def test_an_image_lists_every_package_that_is_installed_in_it(image: str, debian: str, python: str) -> None:
    listed = {one["name"] for one in components(image, "debian")}
    installed = set(inside(image, DEBIAN).split())
    assert debian in installed
    assert installed <= listed, installed - listed
    found = components(image, "python")
    names = {canonicalize_name(one["name"]) for one in found}
    wanted = {canonicalize_name(one["name"]) for one in json.loads(inside(image, PYTHON))}
    assert python in wanted
    assert wanted <= names, wanted - names
    assert sum("licenses" in one for one in found) > 0.9 * len(found)


def test_the_weights_receiver_stores_what_a_trainer_sends_and_requires_the_token() -> None:
    content, name, token = b"weights" * 1000, f"receiver-{uuid4().hex[:8]}", uuid4().hex
    image = f"localhost/osworld/weights-receiver:{VERSION}"
    podman("run", "--detach", "--name", name, "--publish", "127.0.0.1::30900", "--env", f"ENGINE_TOKEN={token}", image)
    try:
        url = f"http://{podman('port', name, '30900')}/v1"
        wait_until_served(url, name)
        assert httpx.get(f"{url}/weights/w1").status_code == 401
        with httpx.Client(headers={"Authorization": f"Bearer {token}"}) as client:
            assert client.get(f"{url}/weights/w1").status_code == 404
            files = {"config.json": b"{}", "model.safetensors": content}
            for file, data in files.items():
                client.put(f"{url}/uploads/one/{file}", content=data).raise_for_status()
            sizes = {file: len(data) for file, data in files.items()}
            client.post(f"{url}/uploads/one", json={"name": "w1", "files": sizes}).raise_for_status()
            path = client.get(f"{url}/weights/w1").raise_for_status().json()["path"]
        assert path.startswith("/srv/osworld/weights/")
        stored = podman("exec", name, "sha256sum", f"{path}/model.safetensors").split()[0]
        assert stored == hashlib.sha256(content).hexdigest()
    finally:
        podman("rm", "--force", "--volumes", name)


def wait_until_served(url: str, name: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            httpx.get(url)
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline, podman("logs", name)
            time.sleep(0.2)
