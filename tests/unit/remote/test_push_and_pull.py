"""A state on an object store: a push holds the state of one moment, a cache gives the same answers as its origin, and
no kill or failure loses or mixes anything. The S3 server and the client are real."""

import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import boto3
import pytest
from episode_samples import make_episode
from export_samples import make_state, picture
from s3_server import BUCKET, S3

from osworld_pipeline.columns import OWNED_TABLES, PART_TABLES
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.remote.pull import fetch_checkpoints, pull
from osworld_pipeline.remote.push import push
from osworld_pipeline.remote.status import push_after, refresh, remote_status
from osworld_pipeline.runs.upkeep.upkeep import compact_store
from osworld_pipeline.store import BlobStore, TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import open_catalog, run_query
from osworld_pipeline.tables.views import DERIVED

"""Typer imports what a later click will not have."""
COUNT = "SELECT count(*), count(DISTINCT episode_id) FROM episodes"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    """A state that is partly compacted, with a checkpoint's files and a suite."""
    state = make_state(tmp_path_factory.mktemp("remote") / "var")
    compact_store(state, min_parts=1)
    TrajectoryStore(state).write_episodes("later", [make_episode("e-new", checkpoint_id="gspo-1", task_id="a")])
    for name in ("checkpoint.json", "model.safetensors", "optimizer/0.distcp"):
        path = state.checkpoints / "gspo-1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    state.suites.mkdir()
    (state.suites / "mine.json").write_text("{}")
    rebuild_catalog(state)
    return state


def answers(state: StateDir) -> dict[str, list[str]]:
    names = (*PART_TABLES, *OWNED_TABLES, *DERIVED)
    with open_catalog(state) as connection:
        return {name: sorted(map(repr, connection.execute(f"FROM {name}").fetchall())) for name in names}


def test_a_machine_that_has_only_the_bucket_gets_every_answer(
    s3: S3, url: str, origin: StateDir, cache: StateDir
) -> None:
    done = push(origin, url)
    assert (done.generation, done.is_changed, done.num_missing_images) == (1, True, 1)
    assert done.num_images == 5
    pull(cache, url)
    assert answers(cache) == answers(origin)
    assert (cache.suites / "mine.json").read_text() == "{}"


def test_images_and_weights_are_fetched_on_request(s3: S3, url: str, origin: StateDir, cache: StateDir) -> None:
    push(origin, url)
    pull(cache, url)
    assert not cache.blobs.exists()
    sha256 = run_query(cache, "SELECT screenshot_sha256 FROM steps WHERE episode_id = 'e-cut'").rows[1][0]
    assert BlobStore(cache.blobs).read(sha256) == picture(9, "JPEG")
    with pytest.raises(StoreError, match="is not in"):
        BlobStore(cache.blobs).read("b" * 64)
    folder = cache.checkpoints / "gspo-1"
    assert [path.name for path in folder.rglob("*")] == ["checkpoint.json"]
    assert fetch_checkpoints(cache, ["gspo-1"]) > 0
    assert (folder / "model.safetensors").read_text() == "model.safetensors"
    assert fetch_checkpoints(cache, ["gspo-1"]) == 0


def test_a_push_without_changes_sends_nothing_and_after_a_new_part_only_that_part(
    s3: S3, url: str, origin: StateDir, cache: StateDir
) -> None:
    push(origin, url)
    num_uploads = s3.num_uploads()
    again = push(origin, url)
    assert (again.is_changed, again.generation, s3.num_uploads()) == (False, 1, num_uploads)
    TrajectoryStore(origin).write_episodes("more", [make_episode("e-more")])
    more = push(origin, url)
    # A head, its details, and the manifest.
    assert (more.generation, more.num_uploaded, s3.num_uploads()) == (2, 3, num_uploads + 4)
    pull(cache, url)
    assert pull(cache, url).is_changed is False
    assert run_query(cache, COUNT).rows == [(9, 9)]


def test_a_cache_follows_compactions_and_keeps_no_old_version_of_a_rewritten_row(
    s3: S3, url: str, origin: StateDir, cache: StateDir
) -> None:
    push(origin, url)
    pull(cache, url)
    for name in ("p", "q"):
        TrajectoryStore(origin).write_episodes(name, [make_episode(f"e-{name}")])
        push(origin, url)
        pull(cache, url)
    TrajectoryStore(origin).write_episodes("p", [make_episode("e-p", num_steps=1)])
    compact_store(origin, min_parts=1, retired_grace_s=0)
    # The second compaction deletes the files that the first one retired, so its manifest no longer names them.
    compact_store(origin, min_parts=1, retired_grace_s=0)
    push(origin, url)
    assert run_query(cache, COUNT).rows == [(10, 10)]
    pull(cache, url)
    rebuild_catalog(origin)
    assert answers(cache) == answers(origin)
    assert run_query(cache, COUNT).rows == [(10, 10)]


def test_parts_that_a_cache_wrote_itself_stay_and_can_be_pushed(
    s3: S3, url: str, origin: StateDir, cache: StateDir
) -> None:
    push(origin, url)
    pull(cache, url)
    TrajectoryStore(cache).write_episodes("mine", [make_episode("e-mine")])
    TrajectoryStore(origin).write_episodes("yours", [make_episode("e-yours")])
    push(origin, url)
    with pytest.raises(StoreError, match="has received a push from elsewhere") as refused:
        push(cache, url)
    (advised,) = [part for part in str(refused.value).split("`") if "remote" in part]
    from osworld_pipeline.cli import app

    app(shlex.split(advised)[1:], standalone_mode=False)
    assert push(cache, url).generation == 3
    pull(origin, url)
    for state in (origin, cache):
        assert run_query(state, COUNT).rows == [(10, 10)]


def test_a_file_changed_on_both_sides_is_refused_by_name(s3: S3, url: str, origin: StateDir, cache: StateDir) -> None:
    push(origin, url)
    pull(cache, url)
    for state in (origin, cache):
        (state.suites / "mine.json").write_text(str(state.root))
    push(origin, url)
    with pytest.raises(StoreError, match=r"mine.json was changed here and in s3://"):
        pull(cache, url)


def test_a_push_or_pull_never_mixes_two_different_states(
    s3: S3, url: str, origin: StateDir, cache: StateDir, tmp_path: Path
) -> None:
    push(origin, url)
    other = make_state(tmp_path / "other")
    with pytest.raises(StoreError, match="holds another state than"):
        push(other, url)
    with pytest.raises(StoreError, match="holds a state of its own: pull into a new folder"):
        pull(other, url)
    with pytest.raises(StoreError, match="nothing was pushed to"):
        pull(cache, f"{url}-else")
    with pytest.raises(StoreError, match="belongs to"):
        push(origin, f"{url}-else")


def test_a_bucket_that_was_emptied_is_filled_again(s3: S3, url: str, origin: StateDir, cache: StateDir) -> None:
    push(origin, url)
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    client = boto3.client("s3", endpoint_url=s3.endpoint, aws_access_key_id="key", aws_secret_access_key="s")
    found = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")["Contents"]
    client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": one["Key"]} for one in found]})
    again = push(origin, url)
    assert (again.generation, again.num_images) == (1, 5)
    pull(cache, url)
    assert answers(cache) == answers(origin)


PUSH = """
import sys
from pathlib import Path
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.remote.push import push
print(push(StateDir(Path(sys.argv[1])), sys.argv[2]))
"""
PULL = PUSH.replace("push", "pull")


def run_and_kill(s3: S3, script: str, state: StateDir, url: str, *, at_request: int, pattern: str) -> bool:
    """Kills the program at request `at_request` of that kind, before the answer. Returns False if it ended first."""
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(state.root), url], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **s3.environment},
    )  # fmt: skip
    left, lock = at_request, threading.Lock()

    def on_request(request: str) -> None:
        nonlocal left
        with lock:
            left -= request.startswith(pattern)
            if left == 0:
                os.kill(child.pid, signal.SIGKILL)

    s3.on_request = on_request
    output, _ = child.communicate(timeout=60)
    s3.on_request = lambda _: None
    assert child.returncode in (0, -signal.SIGKILL), output.decode()
    return child.returncode != 0


@pytest.mark.parametrize("at_request", [12, 0])
def test_a_killed_push_leaves_the_previous_state_and_the_next_push_continues(
    s3: S3, url: str, origin: StateDir, cache: StateDir, at_request: int
) -> None:
    """0: killed at the swap of the manifest, which arrives although its sender dies."""
    pattern = "PUT" if at_request else f"PUT /{url.removeprefix('s3://')}/remote.json"
    assert run_and_kill(s3, PUSH, origin, url, at_request=at_request or 1, pattern=pattern)
    if at_request:
        with pytest.raises(StoreError, match="nothing was pushed to"):
            pull(cache, url)
    num_uploads = s3.num_uploads()
    done = push(origin, url)
    assert done.generation == 1
    assert done.num_uploaded + done.num_images <= s3.num_uploads() - num_uploads
    assert done.num_images < 5
    pull(cache, url)
    assert answers(cache) == answers(origin)


@pytest.mark.parametrize("at_request", [2, 4])
def test_a_killed_pull_leaves_a_readable_cache_and_the_next_pull_continues(
    s3: S3, url: str, origin: StateDir, cache: StateDir, at_request: int
) -> None:
    push(origin, url)
    pull(cache, url)
    before = answers(cache)
    for name in ("p", "q", "r"):
        TrajectoryStore(origin).write_episodes(name, [make_episode(f"e-{name}")])
    compact_store(origin, min_parts=2)
    TrajectoryStore(origin).write_episodes("s", [make_episode("e-s")])
    push(origin, url)
    assert run_and_kill(s3, PULL, cache, url, at_request=at_request, pattern="GET")
    assert set(before["steps"]) <= set(answers(cache)["steps"])
    pull(cache, url)
    rebuild_catalog(origin)
    assert answers(cache) == answers(origin)


@pytest.mark.parametrize("status", [503, 0])
def test_requests_that_fail_for_a_while_are_retried(
    s3: S3, url: str, origin: StateDir, cache: StateDir, status: int
) -> None:
    s3.failures += [("PUT .*/objects/", status, 2), ("PUT .*/blobs/", status, 2), ("PUT .*/remote.json", status, 1)]
    assert push(origin, url).is_changed
    s3.failures += [("GET .*/objects/", status, 2)]
    pull(cache, url)
    assert answers(cache) == answers(origin)


def test_a_refused_request_is_an_error_of_one_sentence_that_shows_no_secret(s3: S3, url: str, origin: StateDir) -> None:
    s3.failures.append((".*", 403, 1_000))
    with pytest.raises(StoreError, match=r"refused to .*: check the credentials in the environment") as reported:
        push(origin, url)
    assert "secretsecret" not in f"{reported.value} {reported.value.__cause__}"


def test_without_credentials_or_with_an_invalid_url_no_request_is_sent(
    s3: S3, url: str, origin: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bad in ("s3://", "http://bucket/x", "s3://bucket/a b", "/folder"):
        with pytest.raises(StoreError, match="write it as s3://BUCKET/PREFIX"):
            push(origin, bad)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(StoreError, match="needs credentials in the environment"):
        push(origin, url)
    assert s3.requests == []


def test_an_object_that_was_changed_in_the_bucket_is_detected(
    s3: S3, url: str, origin: StateDir, cache: StateDir
) -> None:
    push(origin, url)
    client = boto3.client("s3", endpoint_url=s3.endpoint, aws_access_key_id="key", aws_secret_access_key="s")
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    for found in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/objects/")["Contents"]:
        client.put_object(Bucket=BUCKET, Key=found["Key"], Body=b"x" * found["Size"])
    with pytest.raises(StoreError, match=r"is damaged \(another SHA-256\)"):
        pull(cache, url)


def test_status_and_refresh_report_the_state_of_both_sides(
    s3: S3, url: str, origin: StateDir, cache: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert remote_status(origin, url).remote_generation is None
    said: list[str] = []
    assert push_after(origin, "", said.append) is None
    assert push_after(origin, url, said.append) is not None
    TrajectoryStore(origin).write_episodes("more", [make_episode("e-more")])
    status = remote_status(origin, url)
    assert (status.role, status.generation, status.num_changed) == ("origin", 1, 3)
    refresh(cache, url, said.append)
    push(origin, url)
    refresh(cache, "", said.append)
    assert run_query(cache, COUNT).rows == [(9, 9)]
    refresh(origin, url, said.append)
    assert said == []
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    refresh(cache, "", said.append)
    assert push_after(origin, url, said.append) is None
    assert [one.split(":")[0] for one in said] == [f"the copy in {cache.root} may be old", "not pushed"]
