"""Pulls a state from an object store into a folder, which is a cache of it: tables, parts, suites and the cards of
checkpoints; images and weights are fetched on demand.

The order of the steps keeps the folder readable at all times, and a killed pull resumes when it is called again.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from osworld_pipeline.atomic_io import locked
from osworld_pipeline.domain.shown_commands import PIPELINE, shell_line
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.object_store import Bucket, RemoteNote, open_bucket, read_note, write_note
from osworld_pipeline.object_store.note import FOLDER, is_cache
from osworld_pipeline.progress import BYTES, OnProgress, Tally, begin
from osworld_pipeline.remote.contents import (
    commits_others,
    is_card,
    is_catalog,
    is_checkpoint_file,
    is_index,
    is_part,
)
from osworld_pipeline.remote.manifest import Hashes, RemoteManifest, is_pack, read_base, read_remote, write_base
from osworld_pipeline.store.compaction import RETIRED_GRACE_S, commit_manifest, exclusive, remove_retired
from osworld_pipeline.store.part_files import DETAILS_OF, HEAD_OF, Manifest
from osworld_pipeline.tables.catalog import rebuild_catalog

NUM_THREADS = 8
LOCK_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class PullSummary:
    generation: int
    is_changed: bool
    """False if the folder was up to date."""
    num_downloaded: int = 0
    downloaded_bytes: int = 0


def pull(state: StateDir, url: str, on_progress: OnProgress | None = None) -> PullSummary:
    """Updates a cache; data that was made here and not pushed yet is kept.

    Raises:
        StoreError: the folder holds another state; the same file was changed on both sides; nothing was pushed; or the
            object store or the file system refused.
        DependencyError: obstore is not installed.
        TableError: the catalog cannot be built.
    """
    bucket = open_bucket(url)
    note = _need_cache(state, bucket.url)
    with locked(
        state.root / FOLDER / "sync.lock", timeout_s=LOCK_TIMEOUT_S, error=StoreError,
        what="the copy of the object store",
    ):  # fmt: skip
        remote, base = read_remote(bucket), read_base(state.root)
        if remote is None:
            advised = shell_line(PIPELINE, "remote", "push", "--state-remote", bucket.url)
            raise StoreError(f"nothing was pushed to {bucket.url} yet: run `{advised}` where the state is")
        now = remote.manifest
        if base is not None and base.state_id != now.state_id:
            raise StoreError(f"{bucket.url} holds another state than {state.root}: pull into a new folder")
        if base is not None and base.generation == now.generation and state.catalog.is_file():
            return PullSummary(generation=now.generation, is_changed=False)
        if note is None:
            write_note(state.root, RemoteNote(url=bucket.url, role="cache"))
        done = _pull(state, bucket, now, base, on_progress)
        begin(on_progress, "building the catalog")
        rebuild_catalog(state)
        write_base(state.root, now)
        return done


def _need_cache(state: StateDir, url: str) -> RemoteNote | None:
    note = read_note(state.root)
    if note is not None and note.url != url:
        raise StoreError(f"{state.root} belongs to {note.url}, not to {url}: pull into a new folder")
    if note is None and (state.tables.is_dir() or state.trajectories.is_dir()):
        raise StoreError(f"{state.root} holds a state of its own: pull into a new folder")
    return note


def _pull(
    state: StateDir,
    bucket: Bucket,
    now: RemoteManifest,
    base: RemoteManifest | None,
    on_progress: OnProgress | None,
) -> PullSummary:
    root = state.trajectories
    hashes = Hashes(state.root)
    others = [path for path in now.files if _is_pulled(path) and not is_part(path)]
    others = [path for path in others if _is_newer_there(state, path, hashes, now, base)]
    parts = [path for path in now.files if is_part(path) and not _is_here(state, path, now)]
    received = _received(now, [*parts, *others], on_progress)
    with exclusive(root):
        remove_retired(root, grace_s=RETIRED_GRACE_S)
        before = Manifest.read(root)
        after = _merged_compaction(state, before, now, base)
        # As in a compaction, the generation is committed first, because the names of compacted files begin with it.
        commit_manifest(root, replace(before, generation=after.generation))
        heads = [path for path in parts if path.split("/")[1] not in HEAD_OF]
        sizes = _download(state, bucket, now, sorted(set(parts) - set(heads)), received)
        sizes += _download(state, bucket, now, heads, received)
        sizes += _download(state, bucket, now, [path for path in others if not commits_others(path)], received)
        commit_manifest(root, after)
        sizes += _download(state, bucket, now, [path for path in others if commits_others(path)], received)
    for path in base.files if base is not None and is_cache(state.root) else ():
        if is_index(path) and path not in now.files:
            (state.root / path).unlink(missing_ok=True)
    return PullSummary(
        generation=now.generation, is_changed=True, num_downloaded=len(sizes), downloaded_bytes=sum(sizes)
    )


def _is_pulled(path: str) -> bool:
    """Whether a pull downloads it at once. The catalog is not pulled but built here."""
    return not is_catalog(path) and not is_pack(path) and (not is_checkpoint_file(path) or is_card(path))


def _is_here(state: StateDir, path: str, now: RemoteManifest) -> bool:
    """Whether this file, which does not change, exists here."""
    try:
        return (state.root / path).stat().st_size == now.files[path].num_bytes
    except FileNotFoundError:
        return False


def _is_newer_there(
    state: StateDir, path: str, hashes: Hashes, now: RemoteManifest, base: RemoteManifest | None
) -> bool:
    """Raises StoreError if it was changed on both sides."""
    try:
        here = hashes.of(path)
    except FileNotFoundError:
        return True
    there, common = now.files[path], base.files.get(path) if base else None
    if here == there or there == common:
        return False
    if here == common or base is None:
        return True
    raise StoreError(
        f"{state.root / path} was changed here and in {bucket_of(state)}: move the local file elsewhere, then pull "
        "again"
    )


def bucket_of(state: StateDir) -> str:
    note = read_note(state.root)
    return note.url if note else "the object store"


def _merged_compaction(state: StateDir, here: Manifest, now: RemoteManifest, base: RemoteManifest | None) -> Manifest:
    """The manifest after the pull. Files that the object store no longer names are retired here, because their rows are
    now in other files."""
    there = (now.compaction, _named(now.compacted))
    common = (base.compaction, _named(base.compacted)) if base else (0, {})
    mine = (here.generation, _named(here.files))
    if there == common or mine == there:
        return here
    # A killed pull has already committed the generation.
    if mine not in (common, (now.compaction, common[1])):
        raise StoreError(
            f"{state.trajectories} was compacted here and at {bucket_of(state)}: pull into a new folder, and compact "
            "in one place only"
        )
    gone = [path for path in (base.files if base else ()) if is_part(path) and path not in now.files]
    heads = [path.partition("/")[2] for path in gone if path.split("/")[1] in DETAILS_OF]
    return Manifest(
        generation=now.compaction,
        files=now.compacted,
        retired={**dict.fromkeys(heads, time.time()), **here.retired},
    )


def _named(files: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {head: names for head, names in files.items() if names}


def _received(now: RemoteManifest, paths: Iterable[str], on_progress: OnProgress | None) -> Tally:
    return Tally(on_progress, "receiving files", sum(now.files[path].num_bytes for path in paths), BYTES)


def _download(state: StateDir, bucket: Bucket, now: RemoteManifest, paths: Iterable[str], received: Tally) -> list[int]:
    """Downloads files; returns the bytes of each."""

    def fetch(path: str) -> int:
        file = now.files[path]
        key = file.key(path)
        if not bucket.download(key, state.root / path, sha256=file.sha256, on_bytes=received.add):
            raise StoreError(
                f"{bucket.url}/{key} is missing ({path}): restore it, or remove {bucket.url}/remote.json and push the "
                "state again from its origin"
            )
        return file.num_bytes

    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pull") as pool:
        return list(pool.map(fetch, paths))


def fetch_checkpoints(state: StateDir, checkpoint_ids: Collection[str], on_progress: OnProgress | None = None) -> int:
    """Downloads the missing files of these checkpoints, or of all checkpoints if one of these is an adapter, because
    its base is not known. Returns the bytes. A folder that is not a cache is unchanged.

    Raises:
        StoreError: the object store or the file system refused.
        DependencyError: obstore is not installed.
    """
    note, base = read_note(state.root), read_base(state.root)
    if note is None or base is None or not is_cache(state.root):
        return 0
    wanted = _with_bases(base, checkpoint_ids)
    folders = tuple(f"{state.checkpoints.name}/{name}/" for name in wanted)
    paths = [path for path in base.files if path.startswith(folders) and not _is_here(state, path, base)]
    return sum(_download(state, open_bucket(note.url), base, paths, _received(base, paths, on_progress)))


def _with_bases(base: RemoteManifest, checkpoint_ids: Collection[str]) -> set[str]:
    """The id of an adapter does not show its base checkpoint, so all are included."""
    wanted = set(checkpoint_ids)
    if any(f"checkpoints/{name}/adapter/base.json" in base.files for name in wanted):
        wanted |= {path.split("/")[1] for path in base.files if is_card(path)}
    return wanted
