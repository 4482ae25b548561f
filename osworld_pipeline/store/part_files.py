"""The live files of the trajectories: the names of parts, the compaction's manifest, and a snapshot of both, which a
reader takes first, so that all tables of one query are consistent.

Every file is written once and does not change. `episodes/<part>~<version>.parquet` (a head) is committed by its rename;
its details, files of the same name in `steps/` and `sequences/`, are written before. `compacted.json` lists the files
that compaction made and the heads that they replace; its rename commits a compaction. Files that a snapshot may name
are deleted only after a grace period.

A compaction first commits a manifest with its own generation, which the names of its files begin with. So a file of a
later generation than the manifest's means that the manifest was lost or is an older copy. Then nothing is read or
deleted, because rows would be missing.
"""

import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from osworld_pipeline.domain.shown_commands import pipeline_line
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.store.format_note import FORMAT, NOTE, read_format, write_format

DETAILS_OF: Mapping[str, tuple[str, ...]] = {
    "episodes": ("steps", "sequences"),
    "rollout_groups": ("injections",),
    "replay_verifications": (),
    "updates": (),
    "stage_attempts": (),
}
"""The head tables; the commit of a head also commits its details."""
HEAD_OF: Mapping[str, str] = {detail: head for head, details in DETAILS_OF.items() for detail in details}
KEY_OF: Mapping[str, str] = {
    "episodes": "episode_id",
    "rollout_groups": "group_id",
    "replay_verifications": "verification_id",
    "updates": "stage_key",
    "stage_attempts": "attempt_id",
}
COMPACTED = "compacted"
MANIFEST = "compacted.json"
INCOMING = "incoming"
SEED = "_seed.parquet"
VERSION_SHIFT = 20
_NAME = re.compile(r"(?P<part>[A-Za-z0-9][A-Za-z0-9._-]*)~(?P<version>[0-9a-f]{16})-[0-9a-f]{6}\.parquet")
_UNVERSIONED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.parquet")
"""How parts were named before any release."""
_GENERATION = re.compile(r"g(\d+)-\d+-[0-9a-f]+\.parquet")
_NUM_LOOKS = 3
"""How often a manifest and a folder are compared before an error: a compaction may commit in between."""


@dataclass(frozen=True, kw_only=True, order=True)
class PartFile:
    """The file of a head; the files of its details have the same name."""

    part: str
    version: int
    name: str

    @classmethod
    def parse(cls, name: str) -> "PartFile | None":
        found = _NAME.fullmatch(name)
        return cls(part=found["part"], version=int(found["version"], 16), name=name) if found else None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The result of the compactions so far."""

    generation: int = 0
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names in `compacted/` by head table, each with details of the same name."""
    retired: Mapping[str, float] = field(default_factory=dict)
    """Heads that compacted files replace, as `<table>/<name>` or `<table>/compacted/<name>`, and when (Unix time)."""
    retired_in: Mapping[str, int] = field(default_factory=dict)
    """The generation in which files were `retired`; missing for entries of older programs or of a rebuilt manifest. A
    reader that lists the folders before a compaction and reads the manifest after it uses the files retired in that
    generation."""

    @classmethod
    def read(cls, root: Path) -> "Manifest":
        """Raises StoreError if it is damaged."""
        path = root / MANIFEST
        try:
            found = orjson.loads(path.read_bytes())
            return cls(
                generation=int(found["generation"]),
                files={table: tuple(names) for table, names in found["files"].items()},
                retired=dict(found["retired"]),
                retired_in={name: int(number) for name, number in found.get("retired_in", {}).items()},
            )
        except FileNotFoundError:
            return cls()
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"{path} is damaged ({error}): {repair_of(root)} rebuilds it from the parts") from error

    @classmethod
    def checked(cls, root: Path, heads: Iterable[str] = tuple(DETAILS_OF)) -> "Manifest":
        """The manifest, after checking that it agrees with the compacted files of `heads`.

        Raises:
            StoreError: it is damaged, missing, or older than the files; or files that it names are missing; or the
                state has a newer format.
        """
        read_format(root)
        problem: str | None = None
        for _ in range(_NUM_LOOKS):
            manifest = cls.read(root)
            problem = next(filter(None, (_disagreement(root, head, manifest) for head in heads)), None)
            if problem is None:
                return manifest
        raise StoreError(problem)

    def to_bytes(self) -> bytes:
        retired_in = {name: number for name, number in self.retired_in.items() if name in self.retired}
        return orjson.dumps(
            {"generation": self.generation, "files": self.files, "retired": self.retired, "retired_in": retired_in}
        )


@dataclass(frozen=True, kw_only=True)
class HeadFiles:
    """The files with the rows of a head table and of its details, at one moment."""

    compacted: tuple[str, ...]
    """Names below `compacted/`; their rows are live unless the part is in `small`."""
    small: tuple[PartFile, ...]
    """The newest version of each part that is not compacted."""
    superseded: tuple[PartFile, ...]
    """Older versions of these parts."""

    @property
    def rewritten(self) -> frozenset[str]:
        return frozenset(file.part for file in self.small)


def take_snapshot(root: Path, head: str) -> HeadFiles:
    """The current files of `head`; each is kept for at least the grace period.

    The manifest is read before the folder is listed, so files that a later compaction replaces are still listed.

    Raises:
        StoreError: as Manifest.checked; or a part has no version in its name.
    """
    manifest = Manifest.checked(root, [head])
    newest: dict[str, PartFile] = {}
    superseded: list[PartFile] = []
    for name in list_names(root / head):
        if f"{head}/{name}" in manifest.retired:  # often most of the names
            continue
        file = PartFile.parse(name)
        if file is None and _UNVERSIONED.fullmatch(name):
            raise StoreError(
                f"{root / head / name} has no version in its name: a version before any release wrote it, and this one "
                "cannot read it; move it out of the folder"
            )
        if file is None:
            continue
        known = newest.setdefault(file.part, file)
        if known is not file:
            older, newer = sorted((known, file))
            superseded.append(older)
            newest[file.part] = newer
    return HeadFiles(
        compacted=manifest.files.get(head, ()),
        small=tuple(newest[part] for part in sorted(newest)),
        superseded=tuple(superseded),
    )


def compacted_name(generation: int, number: int = 0) -> str:
    """A new name below `compacted/`. `number`: of the file within its commit."""
    return f"g{generation:06d}-{number:04d}-{secrets.token_hex(3)}.parquet"


def last_generation(names: Iterable[str]) -> int:
    """The latest generation among the names of compacted files; 0 without any."""
    return max((int(found[1]) for name in names if (found := _GENERATION.fullmatch(name))), default=0)


def repair_of(root: Path) -> str:
    """The command that rebuilds the manifest below `root`; `root` is the folder of trajectories of a state."""
    return f"`{pipeline_line(StateDir(root.parent), 'rebuild-catalog')}`"


def _disagreement(root: Path, head: str, manifest: Manifest) -> str | None:
    folder = root / head / COMPACTED
    names = set(list_names(folder))
    newest = last_generation(names)
    if newest > manifest.generation:
        path = root / MANIFEST
        state = f"is of generation {manifest.generation}" if path.is_file() else "is missing"
        return (
            f"{path} {state}, but {folder} holds files of generation {newest}: without a manifest that names them "
            f"their rows would be lost; {repair_of(root)} rebuilds it from the parts"
        )
    lost = sorted(set(manifest.files.get(head, ())) - names)
    if lost:
        return (
            f"{folder / lost[0]} is missing, and the manifest names it ({len(lost)} such files): restore the folder "
            f"from a copy, or rebuild the manifest from the remaining parts with {repair_of(root)}"
        )
    return None


def has_parts(root: Path) -> bool:
    """Whether any head was written below `root`."""
    folders = (root / head / below for head in DETAILS_OF for below in ("", COMPACTED))
    return any(name != SEED for folder in folders for name in list_names(folder))


def begin_format(root: Path) -> None:
    """Writes the note of the format if there is none: the present format before the first part, else 1. Raises
    StoreError."""
    if not (root / NOTE).is_file():
        write_format(root, 1 if has_parts(root) else FORMAT)


def list_names(folder: Path) -> list[str]:
    """Names of the files in a folder, in no order; empty if there is no folder."""
    try:
        with os.scandir(folder) as entries:
            # Hidden files are temporary, or NFS's copies of removed open files.
            return [entry.name for entry in entries if entry.is_file() and not entry.name.startswith(".")]
    except FileNotFoundError:
        return []
