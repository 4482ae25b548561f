"""An S3 server for the tests of this folder, a prefix for each test, and the two folders that the tests use."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import BUCKET, S3, serve_s3

from osworld_pipeline.domain.state import StateDir


@pytest.fixture(scope="session")
def server() -> Iterator[S3]:
    with serve_s3() as s3:
        yield s3


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.failures.clear()
    server.requests.clear()
    server.on_request = lambda _: None


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{abs(hash(request.node.name))}"


@pytest.fixture
def origin(sample: StateDir, tmp_path: Path) -> StateDir:
    """A copy of the module's `sample`."""
    shutil.copytree(sample.root, tmp_path / "origin")
    return StateDir(tmp_path / "origin")


@pytest.fixture
def cache(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "cache")
