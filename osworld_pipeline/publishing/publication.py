"""A publication: the files of one repository, with the content of its card; everything in it has a licence."""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from osworld_pipeline.errors import DatasetError
from osworld_pipeline.progress import BYTES, OnProgress, Tally

RepoType = Literal["dataset", "model"]
RECORD = "publication.json"
"""A file in the root of every published repository: its files with their hashes, licences and lineage."""
CARD = "README.md"
UNKNOWN = "unknown"
"""The licence of an import whose licence is not known."""
NOT_LISTED = 20
"""Number of sources without a licence that are listed by name."""


@dataclass(frozen=True, kw_only=True)
class LicensedRows:
    """Rows of one source under one licence."""

    what: str
    """A table, or a kind of training data."""
    source: str
    licence: str | None
    """None if no licence is recorded; an import may also name it `unknown`."""
    rows: int


@dataclass(frozen=True, kw_only=True)
class PublishedFile:
    path: str
    """Path in the repository."""
    content: Path | bytes
    sha256: str
    num_bytes: int

    @classmethod
    def of(cls, path: str, content: Path | bytes) -> "PublishedFile":
        if isinstance(content, bytes):
            return cls(path=path, content=content, sha256=hashlib.sha256(content).hexdigest(), num_bytes=len(content))
        with content.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(path=path, content=content, sha256=sha256, num_bytes=content.stat().st_size)


def read_files(folder: Path, paths: Collection[Path], on_progress: OnProgress | None) -> tuple[PublishedFile, ...]:
    """The files with these paths below `folder`."""
    hashed = Tally(on_progress, "hashing files", sum(path.stat().st_size for path in paths), BYTES)
    files: list[PublishedFile] = []
    for path in paths:
        files.append(PublishedFile.of(path.relative_to(folder).as_posix(), path))
        hashed.add(files[-1].num_bytes)
    return tuple(files)


@dataclass(frozen=True, kw_only=True)
class Publication:
    repo_type: RepoType
    kind: str
    title: str
    licence: str
    """Licence of the whole, as in the hub's front matter; several are separated by commas."""
    licences: tuple[LicensedRows, ...]
    files: tuple[PublishedFile, ...]
    """All files except the card and the record."""
    facts: Mapping[str, Any]
    """Digests and lineage, for programs; JSON."""
    front_matter: Mapping[str, Any]
    """Further front matter."""
    text: str
    """The specific part of the card, in Markdown."""

    @property
    def data_digest(self) -> str:
        """Digest of the names and hashes of the files."""
        lines = "".join(f"{file.path} {file.sha256}\n" for file in sorted(self.files, key=lambda file: file.path))
        return hashlib.sha256(lines.encode()).hexdigest()

    def all_files(self) -> tuple[PublishedFile, ...]:
        """All files, including the card and the record; the same publication gives the same bytes."""
        record = {
            "kind": self.kind,
            "licence": self.licence,
            "licences": [asdict(row) for row in self.licences],
            "files": {file.path: {"sha256": file.sha256, "num_bytes": file.num_bytes} for file in self.files},
            "data_digest": self.data_digest,
            **self.facts,
        }
        text = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        return (
            *self.files,
            PublishedFile.of(CARD, self._card().encode()),
            PublishedFile.of(RECORD, text.encode()),
        )

    def _card(self) -> str:
        names = self.licence.split(", ")
        # JSON is YAML.
        front = {"license": names[0] if len(names) == 1 else names, **self.front_matter}
        head = "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in front.items())
        licences = markdown_table(
            ("what", "source", "licence", "rows"),
            [(row.what, row.source, row.licence, f"{row.rows:,}") for row in self.licences],
        )
        hashes = markdown_table(
            ("file", "bytes", "SHA-256"),
            [(f"`{file.path}`", f"{file.num_bytes:,}", f"`{file.sha256}`") for file in self.files],
        )
        return (
            f"---\n{head}---\n# {self.title}\n\n{self.text}\n## Licences\n\n{self.licence}\n\n{licences}\n"
            f"## Hashes\n\nData digest `{self.data_digest}`; `{RECORD}` has all of this as JSON.\n\n{hashes}"
        )


def need_licences(rows: Iterable[LicensedRows], *, remedy: str) -> None:
    """Raises DatasetError that names the sources without a licence (or with an `unknown` one), at most NOT_LISTED of
    them, and their rows."""
    missing = [row for row in rows if _is_unknown(row.licence)]
    if not missing:
        return
    named = [f"{row.source} ({row.rows:,} rows of {row.what})" for row in missing[:NOT_LISTED]]
    more = f" and {len(missing) - NOT_LISTED} more" if len(missing) > NOT_LISTED else ""
    raise DatasetError(f"nothing is pushed, because these sources have no licence: {', '.join(named)}{more}; {remedy}")


def need_licence(licence: str | None, *, of: str) -> str:
    """Raises DatasetError if there is none."""
    if _is_unknown(licence):
        raise DatasetError(
            f"nothing is pushed, because {of} has no licence: name it with --licence, e.g. --licence apache-2.0"
        )
    return (licence or "").strip().lower()


def _is_unknown(licence: str | None) -> bool:
    return (licence or "").strip().lower() in ("", UNKNOWN)


def join_licences(names: Iterable[str | None]) -> str:
    return ", ".join(sorted({name.lower() for name in names if name}))


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)


def _cell(value: Any) -> str:
    return "" if value is None else " ".join(str(value).split()).replace("|", "\\|")
