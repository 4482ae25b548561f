"""Which files hold the trajectories at one moment: the names of parts, the compaction's manifest, and a snapshot of
both that a reader takes before it reads, so that all tables of one query are of the same moment.

Every file is written once and never changed. `episodes/<part>~<version>.parquet` (a head) is committed by its rename;
its details, `steps/<part>~<version>.parquet`, were there before. `compacted.json` lists the files that compaction made
and the heads that they replace; its rename commits a compaction. Whatever a snapshot may name is deleted only after a
grace period.

A compaction first commits a manifest with its own generation, which the names of its files begin with. So a file of a
later generation than the manifest's means that the manifest was lost or is an older copy; nothing is read or deleted
then, because rows would be missing.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from osworld_pipeline.domain.shown_commands import pipeline_line
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError

DETAIL_OF: Mapping[str, str | None] = {
    "episodes": "steps",
    "rollout_groups": "injections",
    "replay_verifications": None,
    "updates": None,
    "stage_attempts": None,
}
"""The head tables; a head's commit is its details' commit."""
HEAD_OF: Mapping[str, str] = {detail: head for head, detail in DETAIL_OF.items() if detail}
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
_LEGACY = re.compile(r"(?P<part>[A-Za-z0-9][A-Za-z0-9._-]*)\.parquet")
_GENERATION = re.compile(r"g(\d+)-\d+-[0-9a-f]+\.parquet")
_NUM_LOOKS = 3
"""How often a manifest and a folder are compared before they are said to disagree: a compaction may commit between."""


@dataclass(frozen=True, kw_only=True, order=True)
class PartFile:
    """A head's file, and by the same name its details'."""

    part: str
    version: int
    """0 in a file from before versions: its rows name their details' digest instead."""
    name: str

    @classmethod
    def parse(cls, name: str) -> "PartFile | None":
        if found := _NAME.fullmatch(name):
            return cls(part=found["part"], version=int(found["version"], 16), name=name)
        if found := _LEGACY.fullmatch(name):
            return cls(part=found["part"], version=0, name=name)
        return None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What compaction has made of the parts so far."""

    generation: int = 0
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By head table: names below `compacted/`, each with details of the same name."""
    retired: Mapping[str, float] = field(default_factory=dict)
    """Heads that compacted files replace, as `<table>/<name>` or `<table>/compacted/<name>`, and when (Unix time)."""
    retired_in: Mapping[str, int] = field(default_factory=dict)
    """In which generation, for those of `retired` that a program of before did not write: who has listed the folders
    before a compaction and reads the manifest after it takes what was retired in that generation."""

    @classmethod
    def read(cls, root: Path) -> "Manifest":
        """Raises StoreError where it is damaged."""
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
            raise StoreError(f"{path} is damaged ({error}): {repair_of(root)} makes it again from the parts") from error

    @classmethod
    def checked(cls, root: Path, heads: Iterable[str] = tuple(DETAIL_OF)) -> "Manifest":
        """The manifest, which agrees with the compacted files of `heads`.

        Raises:
            StoreError: it is damaged, missing, or older than the files; or files that it names are gone.
        """
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
    """The files that hold the rows of a head table, and of its details, at one moment."""

    compacted: tuple[str, ...]
    """Names below `compacted/`; their rows count unless the part is among `small`."""
    small: tuple[PartFile, ...]
    """The newest writing of each part that no compaction has taken in."""
    superseded: tuple[PartFile, ...]
    """Older writings of those."""

    @property
    def rewritten(self) -> frozenset[str]:
        return frozenset(file.part for file in self.small)

    @property
    def versioned(self) -> tuple[PartFile, ...]:
        return tuple(file for file in self.small if file.version)

    @property
    def legacy(self) -> tuple[PartFile, ...]:
        return tuple(file for file in self.small if not file.version)


def take_snapshot(root: Path, head: str) -> HeadFiles:
    """The files of `head` as of now; each stays for the grace period at least.

    The manifest is read before the folder is listed: what a later compaction replaces is still listed then.

    Raises:
        StoreError: the manifest is damaged, lost, or older than the compacted files.
    """
    manifest = Manifest.checked(root, [head])
    newest: dict[str, PartFile] = {}
    superseded: list[PartFile] = []
    for name in list_names(root / head):
        file = PartFile.parse(name)
        if file is None or f"{head}/{name}" in manifest.retired:
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


def last_generation(names: Iterable[str]) -> int:
    """The latest generation among the names of compacted files; 0 without any."""
    return max((int(found[1]) for name in names if (found := _GENERATION.fullmatch(name))), default=0)


def repair_of(root: Path) -> str:
    """The command that makes the manifest below `root` again; `root` is the folder of trajectories of a state."""
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
            f"their rows would be lost; {repair_of(root)} makes it again from the parts"
        )
    lost = sorted(set(manifest.files.get(head, ())) - names)
    if lost:
        return (
            f"{folder / lost[0]} is gone, and the manifest names it ({len(lost)} such files): restore the folder from "
            f"a copy, or let {repair_of(root)} make the manifest again from the parts that are there"
        )
    return None


def legacy_details(root: Path, detail: str, heads: Iterable[PartFile]) -> list[str]:
    """Names of the details that heads from before versions may mean: `<part>.<digest>.parquet`."""
    parts = {file.part for file in heads}
    if not parts:
        return []
    pattern = re.compile(r"(.+)\.[0-9a-f]{12}\.parquet")
    matches = (pattern.fullmatch(name) for name in list_names(root / detail))
    return sorted(match[0] for match in matches if match and match[1] in parts)


def list_names(folder: Path) -> list[str]:
    """Names of the files in a folder, in no order; none where there is no folder."""
    try:
        with os.scandir(folder) as entries:
            # Hidden ones are temporary, or what NFS keeps of an open file that was removed.
            return [entry.name for entry in entries if entry.is_file() and not entry.name.startswith(".")]
    except FileNotFoundError:
        return []
