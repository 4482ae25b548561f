"""A push, a pull and a collection report what they send, receive and look at, up to the right total."""

from pathlib import Path

import pytest
from episode_samples import make_episode
from export_samples import make_state
from progress_reports import last_of_each, never_falls
from s3_server import S3

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.object_store import open_bucket
from osworld_pipeline.object_store.bucket import CHUNK_BYTES
from osworld_pipeline.progress import Progress
from osworld_pipeline.remote.garbage import collect_remote_garbage
from osworld_pipeline.remote.manifest import read_remote
from osworld_pipeline.remote.pull import fetch_checkpoints, pull
from osworld_pipeline.remote.push import push
from osworld_pipeline.runs.upkeep.upkeep import compact_store
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog

WEIGHTS = b"w" * (CHUNK_BYTES + 1_000)
"""More than one request."""


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    state = make_state(tmp_path_factory.mktemp("progress") / "var")
    compact_store(state, min_parts=1)
    TrajectoryStore(state).write_episodes("later", [make_episode("e-new", checkpoint_id="gspo-1", task_id="a")])
    folder = state.checkpoints / "gspo-1"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    rebuild_catalog(state)
    return state


def test_a_push_counts_the_bytes_that_it_reads_and_sends_and_the_images(s3: S3, url: str, origin: StateDir) -> None:
    seen: list[Progress] = []
    done = push(origin, url, seen.append)
    assert never_falls(seen)
    remote = read_remote(open_bucket(url))
    assert remote is not None
    num_bytes = sum(file.num_bytes for file in remote.manifest.files.values())
    num_images = done.num_images + done.num_missing_images
    what = f"sending images of files 1-{done.num_files} of {done.num_files}"
    assert last_of_each(seen) == {
        "hashing files": (num_bytes, num_bytes, "bytes"),
        what: (num_images, num_images, "images"),
        "sending files": (num_bytes, num_bytes, "bytes"),
    }
    assert sum(one.what == "sending files" for one in seen) > done.num_files, "a large file is counted in pieces"


def test_files_that_the_object_store_has_already_count_as_sent(s3: S3, url: str, origin: StateDir) -> None:
    s3.failures.append((r"PUT .*/remote\.json", 403, 1))
    with pytest.raises(StoreError, match="refused to write"):
        push(origin, url)
    s3.failures.clear()
    seen: list[Progress] = []
    push(origin, url, seen.append)
    done, total, _ = last_of_each(seen)["sending files"]
    assert done == total > len(WEIGHTS)


def test_a_pull_counts_the_bytes_that_it_receives(s3: S3, url: str, origin: StateDir, cache: StateDir) -> None:
    push(origin, url)
    seen: list[Progress] = []
    done = pull(cache, url, seen.append)
    assert never_falls(seen)
    assert last_of_each(seen) == {
        "receiving files": (done.downloaded_bytes, done.downloaded_bytes, "bytes"),
        "building the catalog": (0, 0, ""),
    }
    weights: list[Progress] = []
    assert fetch_checkpoints(cache, ["gspo-1"], weights.append) == len(WEIGHTS)
    assert last_of_each(weights) == {"receiving files": (len(WEIGHTS), len(WEIGHTS), "bytes")}


def test_a_collection_counts_the_objects_that_it_looks_at(s3: S3, url: str, origin: StateDir, tmp_path: Path) -> None:
    push(origin, url)
    num_objects = len(list(open_bucket(url).list()))
    seen: list[Progress] = []
    collect_remote_garbage(origin, url, is_dry_run=True, on_progress=seen.append)
    num_files = len(list(origin.trajectories.rglob("*.parquet")))
    ends = last_of_each(seen)
    assert ends["looking for unused objects"] == (num_objects, num_objects, "objects")
    assert ends["reading the rows of trajectories"] == (num_files, num_files, "files")
