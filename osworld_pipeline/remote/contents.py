"""Lists the files of a state at one moment."""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.object_store import read_note
from osworld_pipeline.progress import BYTES, OnProgress, Tally
from osworld_pipeline.remote.manifest import Hashes, RemoteFile, read_base
from osworld_pipeline.store.old_tokens import need_sequences
from osworld_pipeline.store.pack_index import SUFFIX as INDEX_SUFFIX
from osworld_pipeline.store.packs import Packs, open_packs
from osworld_pipeline.store.part_files import COMPACTED, DETAILS_OF, Manifest, list_names, take_snapshot
from osworld_pipeline.tables.builds import CURRENT, current_build

CARD = "checkpoint.json"
NUM_LOOKS = 20
PAUSE_S = 0.2
"""Pause between attempts while a compaction or a build of the union commits."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    files: dict[str, RemoteFile]
    compaction: Manifest


def list_contents(state: StateDir, hashes: Hashes, on_progress: OnProgress | None = None) -> Contents:
    """
    Raises:
        StoreError: the store is damaged, or changes faster than it can be listed.
    """
    need_sequences(state.trajectories)
    for _ in range(NUM_LOOKS):
        before = _marks(state)
        try:
            compaction = Manifest.checked(state.trajectories)
            files = _hashed(hashes, [*_parts(state), *_others(state), *_packs(state)], on_progress)
            files = {**_not_fetched(state, files), **files}
        except FileNotFoundError:
            continue  # replaced since it was listed
        if _marks(state) == before:
            return Contents(files=files, compaction=compaction)
        time.sleep(PAUSE_S)
    raise StoreError(f"{state.root} changes faster than it can be listed: push again when its compaction has ended")


def _hashed(hashes: Hashes, paths: Sequence[str], on_progress: OnProgress | None) -> dict[str, RemoteFile]:
    """Raises FileNotFoundError if one of them is gone."""
    num_bytes = sum(map(hashes.size, paths)) if on_progress is not None else 0
    read = Tally(on_progress, "hashing files", num_bytes, BYTES)
    files: dict[str, RemoteFile] = {}
    for path in paths:
        files[path] = hashes.of(path)
        read.add(files[path].num_bytes)
    return files


def _marks(state: StateDir) -> tuple[Manifest, str]:
    """What commits several files at once: the manifest of the parts, and the name of the union's current build."""
    build = current_build(state)
    return Manifest.read(state.trajectories), build.name if build else ""


def _parts(state: StateDir) -> Iterator[str]:
    """The files that readers currently use, without replaced files that wait for deletion."""
    root = state.trajectories
    for head, details in DETAILS_OF.items():
        files = take_snapshot(root, head)
        for table in (head, *details):
            yield from (f"{root.name}/{table}/{COMPACTED}/{name}" for name in files.compacted)
            yield from (f"{root.name}/{table}/{file.name}" for file in files.small)


def _others(state: StateDir) -> Iterator[str]:
    tables = state.tables.name
    yield from (f"{tables}/{name}" for name in list_names(state.tables) if name.endswith((".parquet", ".json")))
    build = current_build(state)
    if build is not None:
        yield from (f"{tables}/{build.name}/{name}" for name in list_names(build))
    yield from (f"{state.suites.name}/{name}" for name in list_names(state.suites) if name.endswith(".json"))
    if state.catalog.is_file():
        yield state.catalog.name
    for card in sorted(state.checkpoints.glob(f"*/{CARD}")):
        for path in sorted(card.parent.rglob("*")):
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(card.parent).parts):
                yield path.relative_to(state.root).as_posix()


def _packs(state: StateDir) -> Iterator[str]:
    """Packs of images, and the indexes that name them."""
    packs = open_packs(state.blobs)
    here = packs.here()
    for index in packs.indexes():
        yield index.path.relative_to(state.root).as_posix()
    yield from (_pack_path(state, packs, name) for name in sorted(here & packs.named()))


def _not_fetched(state: StateDir, files: Collection[str]) -> dict[str, RemoteFile]:
    """Files of local checkpoints and indexes that the object store has and this cache has not fetched."""
    note, base = read_note(state.root), read_base(state.root)
    if note is None or note.role != "cache" or base is None:
        return {}
    packs = open_packs(state.blobs)
    named = {_pack_path(state, packs, name) for name in packs.named()}
    cards = {path.rpartition("/")[0] for path in files if is_card(path)}
    return {
        path: file
        for path, file in base.files.items()
        if path in named or (is_checkpoint_file(path) and "/".join(path.split("/")[:2]) in cards)
    }


def _pack_path(state: StateDir, packs: Packs, name: str) -> str:
    return packs.path(name).relative_to(state.root).as_posix()


def is_part(path: str) -> bool:
    return path.startswith("trajectories/")


def is_checkpoint_file(path: str) -> bool:
    return path.startswith("checkpoints/")


def is_card(path: str) -> bool:
    return is_checkpoint_file(path) and path.count("/") == 2 and path.endswith(f"/{CARD}")


def is_index(path: str) -> bool:
    """Whether it is an index of packs."""
    return path.startswith("blobs/") and path.endswith(INDEX_SUFFIX)


def is_catalog(path: str) -> bool:
    return path == StateDir(Path()).catalog.name


def commits_others(path: str) -> bool:
    """Whether this file names other files and is committed after them: the name of the union's current build."""
    return path == f"{StateDir(Path()).tables.name}/{CURRENT}"
