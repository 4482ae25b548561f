"""Pushes a state folder to an object store: images, then files and packs of images, then the manifest that names
them."""

import hashlib
import secrets
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from osworld_pipeline.atomic_io import locked, write_file
from osworld_pipeline.domain.shown_commands import pipeline_line
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.object_store import Bucket, RemoteNote, open_bucket, read_note, write_note
from osworld_pipeline.object_store.bucket import OutdatedError
from osworld_pipeline.object_store.note import FOLDER
from osworld_pipeline.progress import BYTES, OnProgress, Tally
from osworld_pipeline.remote.contents import Contents, is_catalog, list_contents
from osworld_pipeline.remote.images import push_images
from osworld_pipeline.remote.manifest import (
    KEY,
    PENDING,
    Hashes,
    Remote,
    RemoteFile,
    RemoteManifest,
    is_pack,
    read_base,
    read_remote,
    write_base,
)

ID = "id"
LOCK = f"{FOLDER}/sync.lock"
NUM_THREADS = 4
NUM_LOOKS = 5
LOCK_TIMEOUT_S = 600.0
RETIRED_GRACE_S = 86_400.0
"""Time to keep an object that no path names any longer, for running readers."""


@dataclass(frozen=True, kw_only=True)
class PushSummary:
    generation: int
    is_changed: bool
    """False if the object store already had all of it."""
    num_files: int
    """Files of the whole state, with packs of images but without single images."""
    num_uploaded: int
    uploaded_bytes: int
    num_images: int
    """Images uploaded."""
    num_missing_images: int
    num_removed: int
    """Removed objects that no path had named for a day."""


def push(state: StateDir, url: str, on_progress: OnProgress | None = None) -> PushSummary:
    """Uploads the current state to the object store; safe during training. A killed push leaves the earlier state.

    Raises:
        StoreError: the object store holds another state, or one that was pushed to from elsewhere; another push or a
            garbage collection runs; the state is damaged, or changes faster than it can be pushed; or the object store
            or the file system refused.
        DependencyError: obstore is not installed.
    """
    bucket = open_bucket(url)
    note = read_note(state.root)
    if note is not None and note.url != bucket.url:
        raise StoreError(
            f"{state.root} belongs to {note.url}, not to {bucket.url}: name that one, "
            f"or remove {state.root / FOLDER} to start over"
        )
    with locked(state.root / LOCK, timeout_s=LOCK_TIMEOUT_S, error=StoreError, what="the copy on the object store"):
        remote = need_known(state, bucket)
        done = push_known(state, bucket, remote, on_progress)
        if note is None:
            write_note(state.root, RemoteNote(url=bucket.url, role="origin"))
        return done


def need_known(state: StateDir, bucket: Bucket) -> Remote | None:
    """The manifest on the object store. Raises StoreError if it is not the one that this folder last pushed or pulled,
    or is closed now."""
    remote, base = read_remote(bucket), read_base(state.root)
    if remote is None:
        if base is not None:
            # It was emptied since. Under a new id the journal of uploaded images is empty, too.
            (state.root / FOLDER / ID).unlink(missing_ok=True)
        return None
    left_s = remote.manifest.closed_until - time.time()
    if left_s > 0:
        raise StoreError(
            f"garbage of {bucket.url} is being collected: try again when the collection has ended (if its process was "
            f"killed, in {left_s / 60:.0f} minutes)"
        )
    if remote.manifest == read_base(state.root, PENDING):
        return remote  # an earlier push was killed after its swap
    if base is None or base.state_id != remote.manifest.state_id:
        raise StoreError(f"{bucket.url} holds another state than {state.root}: push to another prefix")
    if base.generation != remote.manifest.generation:
        advised = pipeline_line(state, "remote", "pull", "--state-remote", bucket.url)
        raise StoreError(f"{bucket.url} has received a push from elsewhere: run `{advised}`, then push again")
    return remote


def push_known(
    state: StateDir, bucket: Bucket, remote: Remote | None, on_progress: OnProgress | None = None
) -> PushSummary:
    """`remote`: as returned by `need_known`. The caller holds the lock."""
    before = remote.manifest if remote else RemoteManifest(state_id=_new_id(state), generation=0, files={})
    hashes = Hashes(state.root)
    for _ in range(NUM_LOOKS):
        contents = list_contents(state, hashes, on_progress)
        new = [path for path, file in contents.files.items() if before.files.get(path) != file]
        try:
            packs = {path.rpartition("/")[2] for path in contents.files if is_pack(path)}
            images = push_images(state, bucket, new, packs, journal=before.journal, on_progress=on_progress)
            sizes = _upload(state, bucket, contents, new, on_progress)
            break
        except FileNotFoundError:
            continue  # compaction has replaced a file: retry; uploaded objects are found again
    else:
        raise StoreError(f"{state.root} changes faster than it can be pushed: push again when its compaction has ended")
    hashes.save()
    is_changed = remote is None or not _is_same(before, contents)
    manifest = _next(before, contents) if is_changed else before
    if is_changed:
        write_base(state.root, manifest, PENDING)
        swap(state, bucket, manifest, remote)
    write_base(state.root, manifest)
    return PushSummary(
        generation=manifest.generation,
        is_changed=is_changed,
        num_files=len(contents.files),
        num_uploaded=len(sizes),
        uploaded_bytes=sum(sizes) + images.num_bytes,
        num_images=images.num_uploaded,
        num_missing_images=images.num_missing,
        num_removed=_remove_retired(bucket, before, manifest),
    )


def _is_same(before: RemoteManifest, contents: Contents) -> bool:
    """Ignores the catalog, which is built from the others."""
    there, here = ({path: file for path, file in files.items() if not is_catalog(path)}
                   for files in (before.files, contents.files))  # fmt: skip
    return there == here and before.compaction == contents.compaction.generation


def _new_id(state: StateDir) -> str:
    """The id of a state that was not yet pushed completely; the same when a killed first push is repeated."""
    path = state.root / FOLDER / ID
    if not path.is_file():
        write_file(path, secrets.token_hex(8).encode())
    return path.read_text()


def _upload(
    state: StateDir, bucket: Bucket, contents: Contents, paths: Collection[str], on_progress: OnProgress | None
) -> list[int]:
    """Bytes of each file that was sent."""
    num_bytes = sum(contents.files[path].num_bytes for path in paths)
    sent = Tally(on_progress, "sending files", num_bytes, BYTES)

    def send(path: str) -> int:
        # Files are replaced, not changed: an open file keeps its content.
        with (state.root / path).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != contents.files[path].sha256:
                raise FileNotFoundError(path)
            file.seek(0)
            return bucket.upload(file, contents.files[path].key(path), on_bytes=sent.add)

    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="push") as pool:
        return [size for size in pool.map(send, paths) if size]


def _next(before: RemoteManifest, contents: Contents) -> RemoteManifest:
    now = time.time()
    named = _keys(contents.files)
    gone = _keys(before.files) - named
    retired = {key: since for key, since in before.retired_objects.items() if since > now - RETIRED_GRACE_S}
    retired = {key: since for key, since in {**dict.fromkeys(gone, now), **retired}.items() if key not in named}
    return RemoteManifest(
        state_id=before.state_id,
        generation=before.generation + 1,
        files=contents.files,
        compaction=contents.compaction.generation,
        compacted=contents.compaction.files,
        retired_objects=retired,
        collection=before.collection,
    )


def _keys(files: Mapping[str, RemoteFile]) -> set[str]:
    return {file.key(path) for path, file in files.items()}


def swap(state: StateDir, bucket: Bucket, manifest: RemoteManifest, remote: Remote | None) -> None:
    try:
        bucket.replace(KEY, manifest.to_bytes(), version=remote.version if remote else None)
    except OutdatedError as error:
        advised = pipeline_line(state, "remote", "pull", "--state-remote", bucket.url)
        raise StoreError(
            f"{bucket.url} received a push from elsewhere in the meantime: run `{advised}`, then push again"
        ) from error


def _remove_retired(bucket: Bucket, before: RemoteManifest, now: RemoteManifest) -> int:
    """Removes the objects that the swap dropped. After a kill they remain, unnamed, and only use space."""
    named = _keys(now.files)
    due = [key for key in before.retired_objects if key not in now.retired_objects and key not in named]
    bucket.remove(due)
    return len(due)
