"""Imported demonstrations as further sources of the union build: one folder each under `imports/`, complete or absent,
with a `source.json` that states their origin."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from osworld_pipeline.datasets.lines import lines_of, read_blocks
from osworld_pipeline.datasets.records import read_object
from osworld_pipeline.datasets.rejects import BadRecord, Reject
from osworld_pipeline.datasets.sources import Source

SOURCE_FILE = "source.json"
DEMONSTRATIONS, TASKS, REJECTS = "demonstrations.jsonl", "tasks.jsonl", "rejects.jsonl"
_NAME = r"[a-z0-9_]+"


class ImportManifest(BaseModel):
    """The fields of `source.json` that are read."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str = Field(pattern=_NAME)
    licence: str | None = None
    revision: str | None = None
    quality_rank: int = -1
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class ImportFolder:
    folder: Path
    manifest: ImportManifest

    @property
    def demonstrations(self) -> Source:
        return self._source(DEMONSTRATIONS, "demonstrations")

    @property
    def tasks(self) -> Source:
        return self._source(TASKS, "task_ids")

    def _source(self, file: str, kind: str) -> Source:
        return Source(
            name=self.manifest.name,
            path=f"imports/{self.folder.name}/{file}",
            kind=kind,  # type: ignore[arg-type] - one of two literals above
            description=f"Imported as {self.manifest.name}",
            quality_rank=self.manifest.quality_rank,
            has_config=True,
        )

    def rejects(self) -> Iterator[Reject]:
        """The records that the import rejected, as it recorded them."""
        path = self.folder / REJECTS
        for block in read_blocks(path) if path.is_file() else ():
            for _, line in lines_of(b"" if block.fault else block.read()):
                if line.strip():
                    yield self._reject(line)

    def _reject(self, line: bytes) -> Reject:
        try:
            found = read_object(line)
        except BadRecord as bad:
            found = {"path": f"imports/{self.folder.name}/{REJECTS}", "reason": bad.reason}
        line_no = found.get("line")
        return Reject(
            source=self.manifest.name,
            path=str(found.get("path") or ""),
            line_no=line_no if isinstance(line_no, int) else 0,
            kind=str(found.get("kind") or "malformed"),
            reason=str(found.get("reason") or "no reason given"),
            task_id=str(found.get("task_id") or ""),
        )


def find_imports(root: Path) -> tuple[list[ImportFolder], list[Reject]]:
    """The imports under `root` by name, and those that cannot be read."""
    found: list[ImportFolder] = []
    rejects: list[Reject] = []
    for folder in sorted(path for path in root.glob("*") if path.is_dir() and not path.name.startswith(".")):
        path = folder / SOURCE_FILE
        try:
            manifest = ImportManifest.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            what = error.strerror if isinstance(error, OSError) else f"validation errors: {error.error_count()}"
            reason = f"an import without a valid {SOURCE_FILE} ({what}): import it again, or remove the folder"
            place = f"imports/{folder.name}/{SOURCE_FILE}"
            rejects.append(Reject(source=folder.name, path=place, line_no=0, kind="unreadable", reason=reason))
            continue
        found.append(ImportFolder(folder=folder, manifest=manifest))
    return found, rejects
