"""Automatic pushes, and data of an object store that is refused."""

from pathlib import Path

import dagster as dg
import orjson
import pytest
from episode_samples import make_episode
from s3_server import S3

from assets.upkeep import compacted_trajectories
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.object_store import open_bucket
from osworld_pipeline.remote.manifest import KEY, read_remote
from osworld_pipeline.remote.pull import pull
from osworld_pipeline.remote.push import push
from osworld_pipeline.runs.upkeep.upkeep import compact_store
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog
from resources.state import StateResource

"""Typer uses, while it is imported, what a later click will not have."""


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path / "var")
    for part in ("a", "b"):
        TrajectoryStore(state).write_episodes(part, [make_episode(part)])
    rebuild_catalog(state)
    return state


def generation(url: str) -> int:
    found = read_remote(open_bucket(url))
    return found.manifest.generation if found else 0


def test_a_compaction_pushes_if_a_remote_is_configured(s3: S3, url: str, state: StateDir) -> None:
    from osworld_pipeline.cli import app

    app(["compact", "--min-parts", "1", "--state", str(state.root), "--state-remote", url], standalone_mode=False)
    assert generation(url) == 1
    compacted_trajectories(dg.build_asset_context(), state=StateResource(path=str(state.root)))
    assert generation(url) == 1
    TrajectoryStore(state).write_episodes("c", [make_episode("c")])
    compacted_trajectories(dg.build_asset_context(), state=StateResource(path=str(state.root), remote=url))
    assert generation(url) == 2


def test_a_failed_push_does_not_fail_the_compaction(
    s3: S3, url: str, state: StateDir, capfd: pytest.CaptureFixture[str]
) -> None:
    from osworld_pipeline.cli import app

    s3.failures.append((".*", 403, 100))
    app(["compact", "--min-parts", "1", "--state", str(state.root), "--state-remote", url], standalone_mode=False)
    reported = capfd.readouterr()
    assert "2 parts and 0 earlier files became 1 files" in reported.out
    assert "not pushed: " in reported.err


def test_a_cache_is_not_compacted(s3: S3, url: str, state: StateDir, tmp_path: Path) -> None:
    push(state, url)
    pull(StateDir(tmp_path / "cache"), url)
    with pytest.raises(StoreError, match="is a cache: compact the original state"):
        compact_store(StateDir(tmp_path / "cache"), min_parts=1)


@pytest.mark.parametrize(
    "path",
    ["../outside", "/outside", "tables/../../outside", "remote/note.json", "tables/.hidden", "tables", "blobs/x"],
)
def test_a_manifest_that_names_a_file_outside_the_state_is_refused(
    s3: S3, url: str, state: StateDir, tmp_path: Path, path: str
) -> None:
    push(state, url)
    bucket = open_bucket(url)
    found = bucket.read(KEY)
    assert found is not None
    manifest = orjson.loads(found.data)
    manifest["files"][path] = next(iter(manifest["files"].values()))
    bucket.replace(KEY, orjson.dumps(manifest), version=found.version)
    with pytest.raises(StoreError, match="is not a file of a state"):
        pull(StateDir(tmp_path / "cache"), url)


def test_a_manifest_of_a_newer_program_is_refused(s3: S3, url: str, tmp_path: Path) -> None:
    open_bucket(url).replace(KEY, b'{"format": 999, "needs": "9.1.0"}', version=None)
    with pytest.raises(StoreError, match=r"is of format 999, .* install version 9\.1\.0 or newer"):
        pull(StateDir(tmp_path / "cache"), url)
