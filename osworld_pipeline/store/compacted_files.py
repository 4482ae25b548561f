"""The files that a compaction writes: rows of several units, sorted by id, in row groups that fit look-ups."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.atomic_io import replacing
from osworld_pipeline.columns import marked, stored
from osworld_pipeline.store.compaction_plan import Unit
from osworld_pipeline.store.part_files import COMPACTED, DETAILS_OF, HEAD_OF, INCOMING, KEY_OF, VERSION_SHIFT, PartFile
from osworld_pipeline.store.reading import compute, read_part_table

NUM_ROWS = {"episodes": 8_000, "sequences": 250}
DEFAULT_NUM_ROWS = 10_000
"""Rows of a row group, by table: a look-up decodes a whole group (token lists are long), a scan prefers large ones."""
_ORDER = {"steps": "step_index", "sequences": "sequence_index", "injections": "injection_id"}
"""The column that orders the rows of one head, by table of details."""
_GENERATIONS = (1 << VERSION_SHIFT) - 1


def write_compacted(
    root: Path, head: str, batch: Sequence[Unit], name: str, generation: int, hidden: Iterable[str]
) -> int:
    """Writes a batch as one file of `head` and one of each of its details; returns the number of rows of `head`.
    `hidden`: parts whose rows in compacted files are replaced. Raises StoreError."""
    gone = pa.array(sorted(hidden), pa.string())

    def write(table: str, paths: Iterable[Path]) -> int:
        taken = [_taken(path, table, unit.part, generation, gone) for path, unit in zip(paths, batch, strict=True)]
        rows = pa.concat_tables(taken)
        write_rows(root, table, name, rows)
        return rows.num_rows

    for table in DETAILS_OF[head]:
        write(table, [unit.details[table] for unit in batch])
    return write(head, [unit.head for unit in batch])


def write_rows(root: Path, table: str, name: str, rows: pa.Table) -> None:
    """Writes one file below `compacted/` of `table`, sorted. Raises StoreError."""
    key = KEY_OF[HEAD_OF.get(table, table)]
    order = [key, _ORDER[table]] if table in _ORDER else [key]
    rows = rows.sort_by([(column, "ascending") for column in order])
    num_rows = NUM_ROWS.get(table, DEFAULT_NUM_ROWS)
    _write_sorted(root / table / COMPACTED / name, rows, root / INCOMING, num_rows, key)


def _taken(path: Path, table: str, part: PartFile | None, generation: int, hidden: pa.Array) -> pa.Table:
    """The rows of a file to store; those of a compacted file without the ones rewritten since."""
    rows = read_part_table(path, table)
    schema = stored(table)
    if part is None:
        rows = rows.filter(compute.invert(compute.is_in(rows["part"], hidden)))
    # The copy's version is above that of its source and below that of the part's next version.
    index = schema.get_field_index("part_version")
    base = compute.bit_wise_and(rows["part_version"], ~_GENERATIONS)
    return rows.set_column(index, schema.field(index), compute.add(base, generation & _GENERATIONS))


def _write_sorted(path: Path, table: pa.Table, temp_folder: Path, num_rows: int, key: str) -> None:
    table = marked(table)
    with replacing(path, temp_folder=temp_folder) as temp:
        pq.write_table(
            table,
            temp,
            compression="zstd",
            row_group_size=num_rows,
            write_statistics=[key, "part", *_narrow(table.schema)],  # pyright: ignore[reportArgumentType]
            write_page_index=True,
            # Files overlap in their ids: a look-up skips the row groups of the others.
            bloom_filter_options={key: {"ndv": min(num_rows, max(1, table.num_rows)), "fpp": 0.01}},
        )


def _narrow(schema: pa.Schema) -> list[str]:
    """Columns with useful minimum and maximum; long text would only enlarge the footer."""
    return [field.name for field in schema if not pa.types.is_nested(field.type) and not pa.types.is_string(field.type)]
