"""Parquet files as the `datasets` library reads them: images inside, and the features in the schema's metadata."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.store import BlobStore

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_SUFFIXES = ((b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpeg"), (b"RIFF", "webp"))


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """One kind of rows."""

    name: str
    view: str
    """The view whose columns the filters use."""
    sql: str
    batch_rows: int
    """Rows in memory at once, with their images; also the size of a row group."""
    image_column: str | None = None
    """`screenshot`, made of screenshot_sha256; or `images`, a list of SHA-256 that becomes a list of images."""


class ShardWriter:
    """Writes batches as row groups, and starts a new file when one is large enough. At the end each file's name
    includes the number of files."""

    def __init__(self, folder: Path, config: DatasetConfig, blobs: BlobStore, max_bytes: int) -> None:
        self._folder = folder
        self._config = config
        self._blobs = blobs
        self._max_bytes = max_bytes
        self._files: list[Path] = []
        self._writer: pq.ParquetWriter | None = None
        folder.mkdir(exist_ok=True)

    def write(self, batch: pa.RecordBatch) -> int:
        """Returns the number of images."""
        table, num_images = self._with_images(pa.Table.from_batches([batch]))
        if self._writer is not None and self._files[-1].stat().st_size >= self._max_bytes:
            self._writer.close()
            self._writer = None
        if self._writer is None:
            self._files.append(self._folder / f"{self._config.name}-{len(self._files):05d}.parquet")
            self._writer = pq.ParquetWriter(self._files[-1], table.schema, compression="zstd")
        self._writer.write_table(table, row_group_size=self._config.batch_rows)
        return num_images

    def close(self) -> list[Path]:
        """Returns the files under their final names; no file without rows, which the `datasets` library cannot read."""
        if self._writer is not None:
            self._writer.close()
        total = len(self._files)
        names = [f"{self._config.name}-{index:05d}-of-{total:05d}.parquet" for index in range(total)]
        return [file.rename(file.with_name(name)) for file, name in zip(self._files, names, strict=True)]

    def _with_images(self, table: pa.Table) -> tuple[pa.Table, int]:
        column = self._config.image_column
        num_images = 0
        if column == "screenshot":
            images = [self._image(sha256) for sha256 in table.column("screenshot_sha256").to_pylist()]
            num_images = sum(image is not None for image in images)
            table = table.append_column(pa.field(column, IMAGE), pa.array(images, IMAGE))
        elif column == "images":
            shas = table.column(column)
            lists = [[self._image(sha256) for sha256 in row or ()] for row in shas.to_pylist()]
            num_images = sum(map(len, lists))
            index = table.schema.get_field_index(column)
            table = table.set_column(index, column, pa.array(lists, pa.list_(IMAGE)))
            table = table.append_column("image_sha256s", shas)
        return table.replace_schema_metadata(_metadata(table.schema)), num_images

    def _image(self, sha256: str) -> dict[str, Any] | None:
        """None if no screen was recorded, as in some imports."""
        if not sha256:
            return None
        data = self._blobs.read(sha256)
        suffix = next((suffix for magic, suffix in _SUFFIXES if data.startswith(magic)), "png")
        return {"bytes": data, "path": f"{sha256}.{suffix}"}


def _metadata(schema: pa.Schema) -> dict[str, str]:
    features = {field.name: _feature(field.type) for field in schema}
    return {"huggingface": json.dumps({"info": {"features": features}})}


def _feature(kind: pa.DataType) -> Any:
    if kind == IMAGE:
        return {"_type": "Image"}
    if pa.types.is_list(kind):
        return [_feature(kind.value_type)]
    if pa.types.is_struct(kind):
        return {field.name: _feature(field.type) for field in kind}
    names = {"double": "float64", "float": "float32"}
    return {"dtype": names.get(str(kind), str(kind)), "_type": "Value"}
