"""Garbage collection on an object store removes objects that nothing names, and none that a push or a reader needs."""

import hashlib
import time
from dataclasses import replace
from typing import Any

import boto3
import pytest
from episode_samples import make_episode, make_step
from export_samples import make_state
from s3_server import BUCKET, S3

from jobs.upkeep import collect_garbage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.object_store import open_bucket
from osworld_pipeline.remote import garbage
from osworld_pipeline.remote.garbage import RemoteGarbage, collect_remote_garbage
from osworld_pipeline.remote.manifest import KEY, read_base, read_remote
from osworld_pipeline.remote.pull import pull
from osworld_pipeline.remote.push import PushSummary, push, push_known
from osworld_pipeline.store import BlobStore, TrajectoryStore
from osworld_pipeline.store.packing import pack_cold_images
from osworld_pipeline.tables.catalog import rebuild_catalog
from resources.state import StateResource

ALL = -10.0
"""A grace under which everything is old."""
NOTHING = RemoteGarbage()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    state = make_state(tmp_path_factory.mktemp("garbage") / "var")
    rebuild_catalog(state)
    return state


class Objects:
    """The objects of one prefix, as another client sees them."""

    def __init__(self, s3: S3, url: str) -> None:
        self._client: Any = boto3.client(
            "s3", endpoint_url=s3.endpoint, aws_access_key_id="key", aws_secret_access_key="s", region_name="us-east-1"
        )
        self._prefix = url.removeprefix(f"s3://{BUCKET}/")

    def listed(self) -> set[str]:
        found = self._client.list_objects_v2(Bucket=BUCKET, Prefix=f"{self._prefix}/").get("Contents", [])
        return {one["Key"].removeprefix(f"{self._prefix}/") for one in found}

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=f"{self._prefix}/{key}", Body=data)


@pytest.fixture
def objects(s3: S3, url: str) -> Objects:
    return Objects(s3, url)


def image_key(data: bytes) -> str:
    sha256 = hashlib.sha256(data).hexdigest()
    return f"blobs/{sha256[:2]}/{sha256}.png"


def add_episode(state: StateDir, name: str, data: bytes) -> str:
    sha256 = TrajectoryStore(state).write_blob(data, suffix="png")
    TrajectoryStore(state).write_episodes(name, [make_episode(name, steps=(make_step(sha256=sha256),))])
    return sha256


def test_objects_that_rows_or_the_manifest_name_stay(url: str, objects: Objects, origin: StateDir) -> None:
    push(origin, url)
    before = objects.listed()
    assert collect_remote_garbage(origin, url, grace_s=ALL) == NOTHING
    assert objects.listed() == before
    assert push(origin, url).is_changed is False


def test_objects_that_nothing_names_are_removed_and_foreign_ones_stay(
    url: str, objects: Objects, origin: StateDir
) -> None:
    push(origin, url)
    before = objects.listed()
    objects.put(image_key(b"no row"), b"no row")
    objects.put(f"objects/ab/{'ab' * 32}", b"left by a killed push")
    objects.put("blobs/packs/0-left.zip", b"pack")
    objects.put("notes.txt", b"not ours")
    expected = RemoteGarbage(num_images=1, image_bytes=6, num_files=2, file_bytes=25)
    assert collect_remote_garbage(origin, url, grace_s=ALL, is_dry_run=True) == expected
    assert len(objects.listed()) == len(before) + 4
    assert collect_remote_garbage(origin, url, grace_s=ALL) == expected
    assert objects.listed() == before | {"notes.txt"}


def test_young_objects_stay(url: str, objects: Objects, origin: StateDir) -> None:
    push(origin, url)
    objects.put(image_key(b"no row"), b"no row")
    assert collect_remote_garbage(origin, url, grace_s=60.0) == NOTHING
    assert image_key(b"no row") in objects.listed()


def test_images_that_are_in_a_pack_are_removed_and_read_from_the_pack(
    url: str, objects: Objects, origin: StateDir, cache: StateDir
) -> None:
    late = add_episode(origin, "late", b"late")
    push(origin, url)
    pack_cold_images(BlobStore(origin.blobs), cold_s=ALL, min_bytes=0)
    assert collect_remote_garbage(origin, url, grace_s=60.0) == NOTHING, "readers may know the images without the pack"
    done = collect_remote_garbage(origin, url, grace_s=ALL)
    assert done.num_images >= 1
    assert [key for key in objects.listed() if key.startswith("blobs/") and "packs" not in key] == []
    pull(cache, url)
    assert BlobStore(cache.blobs).read(late) == b"late"


def test_an_image_that_is_needed_again_is_sent_again(
    url: str, objects: Objects, origin: StateDir, cache: StateDir
) -> None:
    """The journals of both folders may still list the image."""
    data = b"seen twice"
    add_episode(origin, "first", data)
    push(origin, url)
    pull(cache, url)
    for path in origin.trajectories.rglob("*first*.parquet"):
        path.unlink()
    assert collect_remote_garbage(origin, url, grace_s=ALL).num_images == 1
    assert image_key(data) not in objects.listed()
    add_episode(origin, "second", data)
    assert push(origin, url).num_images == 1
    assert image_key(data) in objects.listed()


def test_a_push_that_started_before_a_collection_fails_and_succeeds_when_it_is_repeated(
    s3: S3, url: str, objects: Objects, origin: StateDir, cache: StateDir
) -> None:
    data = b"there and unused until now"
    push(origin, url)
    pull(cache, url)
    objects.put(image_key(data), data)
    add_episode(cache, "mine", data)
    collected: list[RemoteGarbage] = []

    def collect_once(request: str) -> None:
        if not collected and request.startswith("PUT") and "/objects/" in request:
            collected.append(NOTHING)
            collected.append(collect_remote_garbage(origin, url, grace_s=ALL))

    s3.on_request = collect_once
    with pytest.raises(StoreError, match="received a push from elsewhere in the meantime"):
        push(cache, url)
    assert collected[1].num_images == 1
    assert image_key(data) not in objects.listed()
    push(cache, url)
    assert image_key(data) in objects.listed()
    pull(origin, url)
    assert BlobStore(cache.blobs).read(hashlib.sha256(data).hexdigest()) == data


def test_a_killed_collection_blocks_pushes_for_a_while_and_loses_no_image(
    url: str, objects: Objects, origin: StateDir, cache: StateDir
) -> None:
    add_episode(origin, "first", b"removed")
    push(origin, url)
    pull(cache, url)
    bucket = open_bucket(url)
    remote = read_remote(bucket)
    assert remote is not None
    closed = replace(remote.manifest, collection=1, closed_until=time.time() + 300)
    bucket.replace(KEY, closed.to_bytes(), version=remote.version)
    bucket.remove([image_key(b"removed")])
    for folder in (origin, cache):
        with pytest.raises(StoreError, match=r"is being collected: try again when the collection has ended"):
            push(folder, url)
    remote = read_remote(bucket)
    assert remote is not None
    bucket.replace(KEY, replace(closed, closed_until=time.time() - 1).to_bytes(), version=remote.version)
    add_episode(origin, "second", b"removed")
    assert push(origin, url).num_images == 1, "the journal of before is not relied on"
    assert image_key(b"removed") in objects.listed()
    base = read_base(origin.root)
    assert base is not None
    assert (base.collection, base.closed_until) == (1, 0.0)


def test_a_failed_collection_allows_pushes_again(s3: S3, url: str, objects: Objects, origin: StateDir) -> None:
    push(origin, url)
    objects.put(image_key(b"no row"), b"no row")
    s3.failures.append((r"POST /.*", 403, 1))
    with pytest.raises(StoreError, match="refused to remove objects"):
        collect_remote_garbage(origin, url, grace_s=ALL)
    assert push(origin, url).is_changed is False
    assert collect_remote_garbage(origin, url, grace_s=ALL).num_images == 1


def test_only_the_origin_folder_may_collect(s3: S3, url: str, origin: StateDir, cache: StateDir) -> None:
    push(origin, url)
    pull(cache, url)
    with pytest.raises(StoreError, match="is not the origin of"):
        collect_remote_garbage(cache, url)


def test_another_push_between_the_push_of_a_collection_and_its_removals_stops_the_collection(
    url: str, objects: Objects, origin: StateDir, cache: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The origin no longer has all rows, so an image of the other folder must stay."""
    data = b"there and unused until now"
    push(origin, url)
    pull(cache, url)
    objects.put(image_key(data), data)
    add_episode(cache, "mine", data)

    def push_and_be_overtaken(*arguments: Any) -> PushSummary:
        done = push_known(*arguments)
        push(cache, url)
        return done

    monkeypatch.setattr(garbage, "push_known", push_and_be_overtaken)
    with pytest.raises(StoreError, match="has received a push from elsewhere"):
        collect_remote_garbage(origin, url, grace_s=ALL)
    assert image_key(data) in objects.listed()


def test_journals_of_earlier_collections_are_removed(s3: S3, url: str, origin: StateDir, cache: StateDir) -> None:
    push(origin, url)
    pull(cache, url)
    add_episode(cache, "first", b"first")
    push(cache, url)
    pull(origin, url)
    collect_remote_garbage(origin, url, grace_s=ALL)
    add_episode(cache, "second", b"second")
    push(cache, url)
    for folder in (origin, cache):
        (journal,) = (folder.root / "remote").glob("pushed-*")
        assert journal.name.endswith("-1")


def test_the_job_collects_on_the_object_store_too(s3: S3, url: str, origin: StateDir) -> None:
    push(origin, url)
    state = StateResource(path=str(origin.root))
    assert collect_garbage.execute_in_process(resources={"state": state}).success
    remote = read_remote(open_bucket(url))
    assert remote is not None
    assert (remote.manifest.collection, remote.manifest.closed_until) == (1, 0.0)
