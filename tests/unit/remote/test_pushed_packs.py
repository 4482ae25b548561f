"""Packs of images on an object store are sent unchanged, and read image by image from a machine that has only the
bucket."""

import hashlib

import pytest
from episode_samples import make_episode, make_step
from export_samples import make_state
from s3_server import S3

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.remote.manifest import read_base
from osworld_pipeline.remote.pull import pull
from osworld_pipeline.remote.push import push
from osworld_pipeline.runs.upkeep.upkeep import collect_garbage, missing_blobs
from osworld_pipeline.store import BlobStore, TrajectoryStore
from osworld_pipeline.store.packing import pack_cold_images
from osworld_pipeline.tables.catalog import rebuild_catalog


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    """A state whose images are all in two packs, with a checkpoint's files."""
    state = make_state(tmp_path_factory.mktemp("packs") / "var")
    pack(state, pack_bytes=1)
    for name in ("checkpoint.json", "model.safetensors"):
        path = state.checkpoints / "gspo-1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    rebuild_catalog(state)
    return state


def pack(state: StateDir, *, pack_bytes: int = 1 << 20) -> None:
    pack_cold_images(BlobStore(state.blobs), cold_s=-10, pack_bytes=pack_bytes, min_bytes=0)


def images(state: StateDir) -> dict[str, bytes]:
    blobs = BlobStore(state.blobs)
    digests = (record["digest"].tobytes().hex() for index in blobs.packs.indexes() for record in index.records())
    return {sha256: blobs.read(sha256) for sha256 in digests}


def test_a_pack_is_one_object_and_a_cache_reads_single_images_of_it(
    s3: S3, url: str, origin: StateDir, cache: StateDir
) -> None:
    done = push(origin, url)
    assert (done.num_images, done.num_missing_images) == (0, 0)
    num_packs = len(BlobStore(origin.blobs).packs.here())
    assert sum("PUT" in one and "/blobs/" in one for one in s3.requests) == num_packs == 5
    pull(cache, url)
    assert list(cache.blobs.rglob("*.zip")) == []
    s3.requests.clear()
    found = images(cache)
    assert found == images(origin)
    assert len(s3.requests) == len(found)
    assert all(request.startswith("GET") and request.endswith(".zip") for request in s3.requests)
    assert {path.stem: path.read_bytes() for path in cache.blobs.glob("??/*")} == found
    suffixes = {path.stem: path.suffix for path in cache.blobs.glob("??/*")}
    assert set(suffixes.values()) == {".png", ".jpeg"}
    assert images(cache) == found
    assert len(s3.requests) == len(found), "what was fetched is here"
    with pytest.raises(StoreError, match="is not in"):
        BlobStore(cache.blobs).read("b" * 64)


def test_an_image_that_was_pushed_as_a_file_and_packed_later_is_read_from_its_pack(
    s3: S3, url: str, origin: StateDir, cache: StateDir
) -> None:
    late = TrajectoryStore(origin).write_blob(b"late", suffix="png")
    TrajectoryStore(origin).write_episodes("late", [make_episode("late", steps=(make_step(sha256=late),))])
    assert push(origin, url).num_images == 1
    pack(origin)
    assert push(origin, url).num_images == 0
    pull(cache, url)
    s3.requests.clear()
    assert BlobStore(cache.blobs).read(late) == b"late"
    (request,) = s3.requests
    assert request.endswith(".zip")


def test_a_push_from_a_cache_keeps_the_files_that_the_cache_has_not_fetched(
    s3: S3, url: str, origin: StateDir, cache: StateDir
) -> None:
    push(origin, url)
    pull(cache, url)
    before = read_base(cache.root)
    TrajectoryStore(cache).write_episodes("mine", [make_episode("e-mine")])
    push(cache, url)
    after = read_base(cache.root)
    assert before is not None
    assert after is not None
    assert "checkpoints/gspo-1/model.safetensors" in before.files
    assert set(before.files) <= set(after.files)
    assert len(set(after.files) - set(before.files)) == 3
    kept = {file.key(path) for path, file in before.files.items() if path.startswith(("blobs/", "checkpoints/"))}
    assert not kept & after.retired_objects.keys()
    pull(origin, url)
    assert images(origin).keys() == images(cache).keys()


def test_a_rewritten_pack_replaces_the_old_one_in_the_bucket_and_in_caches(
    s3: S3, url: str, origin: StateDir, cache: StateDir
) -> None:
    blobs = BlobStore(origin.blobs)
    kept = blobs.write(b"kept", suffix="png")
    for number in range(3):
        blobs.write(f"dropped {number}".encode() * 9, suffix="png")
    pack(origin)
    TrajectoryStore(origin).write_episodes("kept", [make_episode("kept", steps=(make_step(sha256=kept),))])
    push(origin, url)
    pull(cache, url)
    assert collect_garbage(origin, grace_s=-20).num_images == 3
    assert BlobStore(origin.blobs).read(kept) == b"kept"
    push(origin, url)
    pull(cache, url)
    names = {path.name for path in (origin.blobs / "packs" / "index").iterdir()}
    assert {path.name for path in (cache.blobs / "packs" / "index").iterdir()} == names
    assert BlobStore(cache.blobs).read(kept) == b"kept"
    base = read_base(origin.root)
    assert base is not None
    assert [key for key in base.retired_objects if key.endswith(".zip")] != []


def test_a_pack_that_was_changed_in_the_bucket_is_detected(s3: S3, url: str, origin: StateDir, cache: StateDir) -> None:
    import boto3
    from s3_server import BUCKET

    push(origin, url)
    pull(cache, url)
    client = boto3.client("s3", endpoint_url=s3.endpoint, aws_access_key_id="key", aws_secret_access_key="s")
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    for found in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/blobs/packs/")["Contents"]:
        client.put_object(Bucket=BUCKET, Key=found["Key"], Body=b"x" * found["Size"])
    (first, *_) = (record["digest"].tobytes().hex() for record in BlobStore(cache.blobs).packs.indexes()[0].records())
    with pytest.raises(StoreError, match=r"is damaged .*push it from its origin"):
        BlobStore(cache.blobs).read(first)
    assert list(cache.blobs.glob("??/*")) == []


def test_images_packed_while_a_push_runs_are_sent_with_their_pack(
    s3: S3, url: str, origin: StateDir, cache: StateDir
) -> None:
    """The push has already listed the packs, so it lists them again."""
    late = TrajectoryStore(origin).write_blob(b"late", suffix="png")
    TrajectoryStore(origin).write_episodes("late", [make_episode("late", steps=(make_step(sha256=late),))])
    for number in range(40):
        TrajectoryStore(origin).write_episodes(f"p{number}", [make_episode(f"p{number}")])
    is_done = False

    def pack_once(request: str) -> None:
        nonlocal is_done
        if not is_done:
            is_done = True
            pack(origin)

    s3.on_request = pack_once
    push(origin, url)
    pull(cache, url)
    assert BlobStore(cache.blobs).read(late) == b"late"
    assert hashlib.sha256(b"late").hexdigest() not in missing_blobs(origin)
