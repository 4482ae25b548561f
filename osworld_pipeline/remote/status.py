"""Compares a state folder with the object store, and syncs them automatically for the commands."""

from collections.abc import Callable
from dataclasses import dataclass

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DependencyError, StoreError
from osworld_pipeline.object_store import open_bucket, read_note
from osworld_pipeline.progress import OnProgress
from osworld_pipeline.remote.contents import is_catalog, list_contents
from osworld_pipeline.remote.manifest import Hashes, read_base, read_remote
from osworld_pipeline.remote.pull import pull
from osworld_pipeline.remote.push import PushSummary, push

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RemoteStatus:
    url: str
    role: str
    """`origin` or `cache`; empty before the first push or pull."""
    generation: int | None
    """Last pushed or pulled here; None before the first time."""
    remote_generation: int | None
    """None if nothing was pushed yet."""
    num_files: int
    """Files of the state on the object store, with packs of images but without single images."""
    num_bytes: int
    num_changed: int
    """Local files that are new or changed since the last push or pull, without the catalog, which is built from the
    others."""


def remote_status(state: StateDir, url: str, on_progress: OnProgress | None = None) -> RemoteStatus:
    """Raises StoreError, DependencyError."""
    bucket = open_bucket(url)
    note, base, remote = read_note(state.root), read_base(state.root), read_remote(bucket)
    here = list_contents(state, Hashes(state.root), on_progress).files if state.root.is_dir() else {}
    known = base.files if base else {}
    there = remote.manifest.files if remote else {}
    return RemoteStatus(
        url=bucket.url,
        role=note.role if note else "",
        generation=base.generation if base else None,
        remote_generation=remote.manifest.generation if remote else None,
        num_files=len(there),
        num_bytes=sum(file.num_bytes for file in there.values()),
        num_changed=sum(known.get(path) != file for path, file in here.items() if not is_catalog(path)),
    )


def need_remote(state: StateDir, url: str) -> str:
    """The named object store, else the one that the folder belongs to. Raises StoreError."""
    note = read_note(state.root)
    if url or note is not None:
        return url or (note.url if note else "")
    raise StoreError(f"{state.root} belongs to no object store: name one with --state-remote s3://BUCKET/PREFIX")


def refresh(state: StateDir, url: str, say: Say, on_progress: OnProgress | None = None) -> None:
    """Updates a cache before it is read; any other folder is unchanged. If the pull fails and the cache has a catalog,
    the earlier content is used, and `say` reports the reason.

    Raises:
        StoreError: the pull failed, and there is no catalog.
        DependencyError, TableError: as pull.
    """
    note = read_note(state.root)
    is_own = note.role == "origin" if note else state.tables.is_dir() or state.trajectories.is_dir()
    if is_own or not (url or note):
        return
    try:
        pull(state, need_remote(state, url), on_progress)
    except StoreError as error:
        if not state.catalog.is_file():
            raise
        say(f"the copy in {state.root} may be old: {error}")


def push_after(state: StateDir, url: str, say: Say, on_progress: OnProgress | None = None) -> PushSummary | None:
    """Pushes an origin after a compaction or a stage, if configured. A failure is only reported, because the next push
    makes up for it. A cache is pushed only by the command."""
    try:
        note = read_note(state.root)
        return push(state, url, on_progress) if url and (note is None or note.role == "origin") else None
    except (StoreError, DependencyError) as error:
        say(f"not pushed: {error}")
        return None
