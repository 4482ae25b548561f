"""Writes an export's tables as Parquet files or Lance datasets, with the manifest entry of each file."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.columns import SCHEMA_KEY, SCHEMA_VERSION
from osworld_pipeline.errors import DependencyError, StoreError

LANCE_FORMAT = "2.2"
"""The first Lance file version that supports maps."""
LANCE_ROWS = 1_000_000
"""Maximum rows of a Lance file; its size may limit it further."""


@dataclass(frozen=True, kw_only=True)
class LakeFile:
    file: str
    """Relative to the export."""
    rows: int | None
    """None for a file without rows (Lance's manifests)."""
    bytes: int
    sha256: str


def write_parquet_table(
    root: Path, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch], max_file_bytes: int
) -> tuple[LakeFile, ...]:
    """Files `NAME/00000.parquet`, ... of about `max_file_bytes`; a table without rows is one file without rows."""
    folder = root / name
    folder.mkdir()
    schema = schema.with_metadata({**(schema.metadata or {}), SCHEMA_KEY: str(SCHEMA_VERSION).encode()})
    paths: list[Path] = []
    writer: pq.ParquetWriter | None = None
    try:
        for batch in batches:
            if writer is not None and paths[-1].stat().st_size >= max_file_bytes:
                writer.close()
                writer = None
            writer = writer or _next_writer(folder, schema, paths)
            writer.write_table(pa.Table.from_batches([batch]).cast(schema))
        writer = writer or _next_writer(folder, schema, paths)
    finally:
        if writer is not None:
            writer.close()
    return tuple(_described(root, path, pq.read_metadata(path).num_rows) for path in paths)


def _next_writer(folder: Path, schema: pa.Schema, paths: list[Path]) -> pq.ParquetWriter:
    paths.append(folder / f"{len(paths):05d}.parquet")
    return pq.ParquetWriter(paths[-1], schema, compression="zstd")


def write_lance_table(
    root: Path, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch], max_file_bytes: int
) -> tuple[LakeFile, ...]:
    """A dataset `NAME.lance`. Raises DependencyError, StoreError."""
    try:
        import lance
    except ImportError as error:
        raise DependencyError("export lance needs pylance: install the extra 'lance'") from error
    counted = _Counter()
    path = root / f"{name}.lance"
    try:
        lance.write_dataset(
            pa.RecordBatchReader.from_batches(schema, counted.over(batches)),
            path,
            mode="create",
            data_storage_version=LANCE_FORMAT,
            max_rows_per_file=LANCE_ROWS,
            max_bytes_per_file=max_file_bytes,
        )
        rows = {file.path: fragment.physical_rows for fragment in lance.dataset(path).get_fragments()
                for file in fragment.data_files()}  # fmt: skip
    except OSError as error:
        raise StoreError(
            f"Lance could not write {name}: {str(error).splitlines()[0]}; fix that and run again. "
            "No partial output remains"
        ) from error
    if sum(rows.values()) != counted.num_rows:
        raise StoreError(
            f"Lance kept {sum(rows.values()):,} of {counted.num_rows:,} rows of {name}: use export parquet"
        )
    found = sorted(file for file in path.rglob("*") if file.is_file())
    return tuple(_described(root, file, rows.get(file.name)) for file in found)


class _Counter:
    def __init__(self) -> None:
        self.num_rows = 0

    def over(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self.num_rows += batch.num_rows
            yield batch


def _described(root: Path, path: Path, rows: int | None) -> LakeFile:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return LakeFile(file=str(path.relative_to(root)), rows=rows, bytes=path.stat().st_size, sha256=sha256)
