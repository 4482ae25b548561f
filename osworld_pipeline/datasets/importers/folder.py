"""An import on disk: a folder of demonstrations, tasks, rejects and images, written to a hidden folder and renamed into
place. The next import removes the hidden folder of a killed one."""

import errno
import hashlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from osworld_pipeline.atomic_io import locked, write_file
from osworld_pipeline.datasets.importers.images import ProvenImage
from osworld_pipeline.datasets.imports import DEMONSTRATIONS, REJECTS, SOURCE_FILE, TASKS
from osworld_pipeline.datasets.rejects import BadRecord
from osworld_pipeline.domain.digest import canonical_json
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError, StoreError

LOCK_TIMEOUT_S = 5.0
_NAME = re.compile(r"[a-z0-9_]{1,64}")
_HIDDEN = re.compile(r"\.(?P<name>[a-z0-9_]+)\.(?P<kind>new|old)")


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    name: str
    """Name of the import and its rows' source_dataset: 1 to 64 lower-case letters, digits and `_`."""
    licence: str
    """The licence of the data, as text."""
    revision: str = ""
    """Revision of the origin: a commit, a date, a version; empty if unknown."""
    quality_rank: int = -1
    """The demonstration with the higher rank is kept if two are equal."""


@dataclass(frozen=True, kw_only=True)
class ImportSummary:
    """The content of `source.json`."""

    name: str
    importer: str
    licence: str
    revision: str
    origin: str
    quality_rank: int
    num_demonstrations: int
    num_tasks: int
    num_rejects: int
    sha256: str
    """SHA-256 of demonstrations and tasks; images have theirs in the name."""
    num_episodes: int = 0
    num_rejects_by_kind: Mapping[str, int]


def check_options(options: ImportOptions) -> None:
    """Raises DatasetError for an invalid name or a missing licence."""
    if not _NAME.fullmatch(options.name):
        raise DatasetError(f"'{options.name}' cannot name an import: use 1 to 64 lower-case letters, digits and '_'")
    if not options.licence.strip():
        raise DatasetError(f"import {options.name} has no licence: name the licence of the data, or 'unknown'")


class ImportWriter:
    """Writes into the hidden folder of one import. Created by `open_import`."""

    def __init__(self, folder: Path, *, importer: str, origin: str, options: ImportOptions) -> None:
        self.folder = folder
        self.options = options
        self._importer = importer
        self._origin = origin
        self._digest = hashlib.sha256()
        self._tasks: set[tuple[str, str]] = set()
        """Domain and id."""
        self._num_demonstrations = 0
        self._rejects: Counter[str] = Counter()
        (folder / "images").mkdir(parents=True)
        self._files: dict[str, IO[bytes]] = {}
        for name in (DEMONSTRATIONS, TASKS, REJECTS):
            self._files[name] = (folder / name).open("wb")

    def add_image(self, image: ProvenImage) -> None:
        """Stores the image at its `name`: a hard link to the origin's file if possible, else a copy."""
        target = self.folder / image.name
        if target.exists():
            return
        if image.path is not None:
            # Another file system, too many links, or links forbidden: copy instead.
            with suppress(OSError):
                os.link(image.path, target)
                return
        with target.open("wb") as file:
            file.write(image.read())
            file.flush()
            os.fsync(file.fileno())

    def add_demonstration(
        self,
        *,
        task_id: str,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[str],
        reward: float | None,
        source_path: str,
        source_line: int,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """`images`: names of added images, in placeholder order; `extra`: provenance recorded by the origin."""
        record = {
            "task_id": task_id,
            "messages": messages,
            "images": images,
            **({} if reward is None else {"reward": reward}),
            "source_path": source_path,
            "source_line": source_line,
            **(extra or {}),
        }
        self._write(DEMONSTRATIONS, record)
        self._num_demonstrations += 1

    def add_task(self, *, task_id: str, instruction: str, domain: str, config: Mapping[str, Any] | None = None) -> None:
        """Adds each task once; the first call for a domain and id counts."""
        if (domain, task_id) in self._tasks:
            return
        self._tasks.add((domain, task_id))
        text = None if config is None else canonical_json(config)
        self._write(TASKS, {"task_id": task_id, "instruction": instruction, "domain": domain, "task_config": text})

    def add_reject(self, bad: BadRecord, *, path: str, line: int, task_id: str = "") -> None:
        """`path`: relative to the origin; `line`: from 1, or 0 for the whole file."""
        self._write(REJECTS, {"path": path, "line": line, "kind": bad.kind, "reason": bad.reason, "task_id": task_id})
        self._rejects[bad.kind] += 1

    def finish(self, *, num_episodes: int) -> ImportSummary:
        """Syncs everything and writes `source.json`."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.close()
        summary = ImportSummary(
            name=self.options.name,
            importer=self._importer,
            licence=self.options.licence,
            revision=self.options.revision,
            origin=self._origin,
            quality_rank=self.options.quality_rank,
            num_demonstrations=self._num_demonstrations,
            num_tasks=len(self._tasks),
            num_rejects=self._rejects.total(),
            sha256=self._digest.hexdigest(),
            num_episodes=num_episodes,
            num_rejects_by_kind=dict(sorted(self._rejects.items())),
        )
        write_file(self.folder / SOURCE_FILE, orjson.dumps(asdict(summary), option=orjson.OPT_INDENT_2) + b"\n")
        return summary

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _write(self, name: str, record: Mapping[str, Any]) -> None:
        line = orjson.dumps(record) + b"\n"
        self._files[name].write(line)
        if name != REJECTS:
            self._digest.update(line)


@contextmanager
def open_import(state: StateDir, *, importer: str, origin: str, options: ImportOptions) -> Iterator[ImportWriter]:
    """Yields a writer into a hidden folder, which is removed at the end unless `publish` has renamed it.

    Raises:
        DatasetError: bad options, or another import runs.
        StoreError: the file system refused.
    """
    check_options(options)
    root = state.imports
    with locked(root / ".lock", timeout_s=LOCK_TIMEOUT_S, error=DatasetError, what="the imports folder"):
        remove_unfinished(root)
        folder = root / f".{options.name}.new"
        try:
            writer = ImportWriter(folder, importer=importer, origin=origin, options=options)
            try:
                yield writer
            finally:
                writer.close()
        except OSError as error:
            space = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "fix that"
            raise StoreError(
                f"cannot write import {options.name} in {root}: {error.strerror or error}; {space} and run again. "
                "No partial output remains"
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def publish(state: StateDir, writer: ImportWriter) -> None:
    """Replaces an older import of that name with the finished folder."""
    name = writer.options.name
    target, aside = state.imports / name, state.imports / f".{name}.old"
    if target.exists():
        os.rename(target, aside)
    os.rename(writer.folder, target)
    shutil.rmtree(aside, ignore_errors=True)


def remove_unfinished(root: Path) -> None:
    """Removes the folders of killed imports. If one died between the two renames of `publish`, the older import is
    restored. Call it with the lock held."""
    for path in root.glob(".*"):
        match = _HIDDEN.fullmatch(path.name)
        if match is None:
            continue
        if match["kind"] == "old" and not (root / match["name"]).exists():
            os.rename(path, root / match["name"])
        else:
            shutil.rmtree(path, ignore_errors=True)
