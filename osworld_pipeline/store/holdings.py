"""Reads from the rows which parts the files of a head table have. This is used to rebuild a manifest, and to keep a
compacted file with the only copy of a part."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from osworld_pipeline.errors import StoreError
from osworld_pipeline.progress import OnProgress, tracked
from osworld_pipeline.store.compaction import commit_manifest, exclusive
from osworld_pipeline.store.part_files import (
    COMPACTED,
    DETAILS_OF,
    SEED,
    VERSION_SHIFT,
    Manifest,
    PartFile,
    last_generation,
    list_names,
    repair_of,
)
from osworld_pipeline.store.reading import compute, read_part_table


@dataclass(frozen=True, kw_only=True)
class RepairSummary:
    is_changed: bool
    """Whether the manifest named other files, or could not be read."""
    num_files: int
    """Compacted files that the manifest names now, not counting details."""
    num_retired: int
    """Files whose rows are all in newer ones."""
    num_lost: int
    """Missing files that the manifest named."""


def rebuild_manifest(root: Path, on_progress: OnProgress | None = None) -> RepairSummary:
    """Rebuilds the compaction's manifest from the rows of the parts; a valid one is unchanged.

    Raises:
        StoreError: other upkeep runs, a file is damaged, or files contradict each other.
    """
    with exclusive(root):
        before = _read_or_none(root)
        old = before or Manifest()
        generation, now = old.generation, time.time()
        files: dict[str, tuple[str, ...]] = {}
        retired: dict[str, float] = {}
        num_lost = 0
        for head in DETAILS_OF:
            held = _compacted_holdings(root, head, on_progress)
            small = _newest_small(root, head)
            chosen = _choose(root, head, held, small)
            if chosen:
                files[head] = chosen
            generation = max(generation, last_generation(held))
            num_lost += len(set(old.files.get(head, ())) - held.keys())
            gone = [f"{head}/{COMPACTED}/{name}" for name in held if name not in chosen]
            gone += [f"{head}/{name}" for name in _covered_small(root, head, [held[name] for name in chosen])]
            retired |= {name: old.retired.get(name, now) for name in gone}
        manifest = Manifest(generation=generation, files=files, retired=retired)
        is_changed = before is None or _contents(before) != _contents(manifest)
        if is_changed:
            commit_manifest(root, manifest)
        return RepairSummary(
            is_changed=is_changed,
            num_files=sum(map(len, files.values())),
            num_retired=len(retired),
            num_lost=num_lost,
        )


def need_other_copies(root: Path, head: str, manifest: Manifest, names: Sequence[str]) -> None:
    """Raises StoreError if one of the compacted files `names` has a part that no live file has in the same or a newer
    version."""
    if not names:
        return
    small = _newest_small(root, head).values()
    counted = {file.part: file.version for file in small if f"{head}/{file.name}" not in manifest.retired}
    for name in manifest.files.get(head, ()):
        _raise_to(counted, _holding(root, head, name))
    for name in names:
        only = sorted(part for part, version in _holding(root, head, name).items() if counted.get(part, -1) < version)
        if only:
            raise StoreError(
                f"{root / head / COMPACTED / name} is in no manifest, but part '{only[0]}' ({len(only)} in all) is in "
                f"no other file: the manifest is not the latest; {repair_of(root)} rebuilds it from the parts"
            )


def _read_or_none(root: Path) -> Manifest | None:
    """None if it is damaged, so that it is rebuilt."""
    try:
        return Manifest.read(root)
    except StoreError:
        return None


def _contents(manifest: Manifest) -> tuple:
    files = {head: set(names) for head, names in manifest.files.items() if names}
    return manifest.generation, files, set(manifest.retired)


def _compacted_holdings(root: Path, head: str, on_progress: OnProgress | None) -> dict[str, Mapping[str, int]]:
    """The parts of each compacted file with their versions. A file without its details counts as damage."""
    names = sorted(name for name in list_names(root / head / COMPACTED) if name != SEED)
    for path in (root / detail / COMPACTED / name for detail in DETAILS_OF[head] for name in names):
        if not path.is_file():
            raise StoreError(
                f"{path} is missing, and {head} has its head: restore it from a copy, or remove "
                f"{root / head / COMPACTED / path.name} and run its stages again"
            )
    found = tracked(names, on_progress, f"reading {head}", "files")
    return {name: _holding(root, head, name) for name in found}


def _holding(root: Path, head: str, name: str) -> Mapping[str, int]:
    """The compacted version of each part, without the generation."""
    rows = read_part_table(root / head / COMPACTED / name, head, columns=["part", "part_version"])
    newest = rows.group_by("part").aggregate([("part_version", "max")])
    versions = compute.shift_left(compute.shift_right(newest["part_version_max"], VERSION_SHIFT), VERSION_SHIFT)
    return dict(zip(newest["part"].to_pylist(), versions.to_pylist(), strict=True))


def _newest_small(root: Path, head: str) -> dict[str, PartFile]:
    newest: dict[str, PartFile] = {}
    for file in _small(root, head):
        newest[file.part] = max(newest.get(file.part, file), file)
    return newest


def _small(root: Path, head: str) -> Iterable[PartFile]:
    return filter(None, map(PartFile.parse, list_names(root / head)))


def _covered_small(root: Path, head: str, holdings: Iterable[Mapping[str, int]]) -> list[str]:
    """Names of the small files whose rows are in compacted files, in the same or a newer version."""
    counted: dict[str, int] = {}
    for holding in holdings:
        _raise_to(counted, holding)
    return sorted(file.name for file in _small(root, head) if counted.get(file.part, -1) >= file.version)


def _raise_to(versions: dict[str, int], other: Mapping[str, int]) -> None:
    for part, version in other.items():
        versions[part] = max(version, versions.get(part, -1))


def _choose(
    root: Path, head: str, held: Mapping[str, Mapping[str, int]], small: Mapping[str, PartFile]
) -> tuple[str, ...]:
    """Selects the live compacted files: together they have the newest version of each part once.

    The files of a killed compaction have the same rows as their sources, so either may be selected.
    """
    newest: dict[str, int] = {}
    for holding in held.values():
        _raise_to(newest, holding)
    needed = {part for part, version in newest.items() if part not in small or small[part].version <= version}
    chosen: list[str] = []
    taken: set[str] = set()
    for name in sorted(held, key=lambda name: (last_generation([name]), name), reverse=True):
        parts = held[name].keys() & needed
        if parts and not parts & taken and all(held[name][part] == newest[part] for part in parts):
            chosen.append(name)
            taken |= parts
    missing = sorted(needed - taken)
    if missing:
        raise StoreError(
            f"the compacted files of {root / head} hold part '{missing[0]}' ({len(missing)} in all) in ways that "
            "contradict each other: restore the trajectories from a copy"
        )
    return tuple(sorted(chosen))
