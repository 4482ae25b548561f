"""The container images: what each says about its own content. `make test-deploy` builds them and runs it."""

import importlib.metadata
import json
import os
import subprocess
from typing import Any

import pytest
from packaging.utils import canonicalize_name

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
    [("env-server", "xvfb", "fastapi"), ("pipeline", "python3", "dagster"), ("trainer", "python3", "torch")],
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
