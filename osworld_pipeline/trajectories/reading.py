"""Files of parts as Arrow tables of today's columns, whoever wrote them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from osworld_pipeline.columns import conform, stored
from osworld_pipeline.errors import StoreError
from osworld_pipeline.part_files import DETAIL_OF, PartFile

compute: Any = pyarrow.compute
"""Its functions are made when it is imported, so that a type checker knows none of them."""


def read_part_table(
    path: Path, table: str, *, columns: Sequence[str] = (), filters: list[tuple] | None = None
) -> pa.Table:
    """A file of `table` (or of it `columns`, where any are named), the rows that pass `filters`.

    Raises:
        StoreError: it is not there, or damaged.
    """
    schema = stored(table)
    if columns:
        schema = pa.schema([schema.field(name) for name in columns])
    try:
        with pq.ParquetFile(path) as file:
            present = set(file.schema_arrow.names)
            known = [name for name in schema.names if name in present]
            if filters is None:
                found = file.read(columns=known)
                return conform(found, schema)
        found = pq.read_table(
            path,
            columns=known,
            filters=filters,
            partitioning=None,  # pyright: ignore[reportArgumentType]
        )
        return conform(found, schema)
    except FileNotFoundError as error:
        raise StoreError(f"{path} is gone: restore it from a copy, or run its stage again") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is damaged ({error}): remove it and run its stage again") from error


def details_path(root: Path, head: str, file: PartFile, rows: pa.Table) -> Path | None:
    """The file with the details of a small head; None where it has none."""
    detail = DETAIL_OF[head]
    if detail is None:
        return None
    if file.version:
        return root / detail / file.name
    digest = rows["part_digest"][0].as_py() if rows.num_rows else None
    return None if digest is None else root / detail / f"{file.part}.{digest}.parquet"
