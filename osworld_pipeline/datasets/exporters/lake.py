"""Exports the tables of the store for other engines: Parquet files or Lance datasets, the views over them as SQL, and a
manifest (`export.json`) with row count and SHA-256 of each file, and the sources and licences of the rows."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import duckdb
import pyarrow as pa

from osworld_pipeline.columns import OWNED_TABLES, PART_TABLES, SCHEMA_VERSION, stored
from osworld_pipeline.datasets.exporters.folder import export_folder, write_manifest
from osworld_pipeline.datasets.exporters.lake_files import LakeFile, write_lance_table, write_parquet_table
from osworld_pipeline.datasets.exporters.selection import OnProgress, export_views, stream
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.version import installed_version
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.tables.views import DERIVED

LakeFormat = Literal["parquet", "lance"]
TABLES = (*OWNED_TABLES, *PART_TABLES)
VIEWS_FILE = "views.sql"
BATCH_ROWS = 2_048
"""Rows in memory at once and per row group: DuckDB's vector size, the smallest batch that it streams."""
STORED = "stored_"
"""Prefix under which a client registers a Lance dataset, for the views."""
_WRITERS = {"parquet": write_parquet_table, "lance": write_lance_table}
_HEADERS: Mapping[LakeFormat, str] = {
    "parquet": "-- In DuckDB: SET file_search_path = 'this folder'; then these statements.",
    "lance": f"-- In DuckDB's Python client: register('{STORED}NAME', lance.dataset('NAME.lance')) for each\n"
    "-- table; then these statements.",
}
_OWN = "this pipeline"


@dataclass(frozen=True, kw_only=True)
class LakeExport:
    """Summary of the export."""

    num_rows: dict[str, int]
    """Number of rows by table."""
    num_files: int
    num_bytes: int
    num_unknown_licence: int
    """Rows of a source without a recorded licence; without `own_licence` also the rows of this pipeline."""


def export_lake(
    state: StateDir,
    target: Path,
    *,
    form: LakeFormat = "parquet",
    own_licence: str | None = None,
    max_file_bytes: int = 500_000_000,
    replace: bool = False,
    on_progress: OnProgress | None = None,
) -> LakeExport:
    """Writes one snapshot of all tables into a new folder `target`. `own_licence` is that of the rows of this pipeline.

    Raises:
        DatasetError: no table has a row.
        DependencyError: the package of the format is not installed.
        TableError: a table cannot be read.
        StoreError: `target` exists, or the file system refused.
    """
    with export_views(state) as connection, export_folder(target, replace=replace) as folder:
        num_rows = {name: _count(connection, name) for name in TABLES}
        if not any(num_rows.values()):
            raise DatasetError(f"no table in {state.root} has a row: nothing to export")
        progress = _Progress(sum(num_rows.values()), on_progress)
        files: dict[str, tuple[LakeFile, ...]] = {}
        for name in TABLES:
            schema = _schema(connection, name)
            rows = (batch.cast(schema) for batch in stream(connection, f"FROM {name}", batch_rows=BATCH_ROWS))
            files[name] = _WRITERS[form](folder, name, schema, progress.over(rows), max_file_bytes)
        (folder / VIEWS_FILE).write_text(_views(connection, form), encoding="utf-8")
        licences = _licences(connection, own_licence)
        every = [file for of_table in files.values() for file in of_table]
        done = LakeExport(
            num_rows=num_rows,
            num_files=len(every),
            num_bytes=sum(file.bytes for file in every),
            num_unknown_licence=sum(row["rows"] for row in licences if row["licence"] is None),
        )
        write_manifest(folder, form, {
            "schema_version": SCHEMA_VERSION,
            "program_version": installed_version(),
            "tables": {name: {"rows": num_rows[name], "files": list(map(asdict, files[name]))} for name in TABLES},
            "views": {"file": VIEWS_FILE, "names": list(DERIVED)},
            "licences": licences,
            "sources": _rows(connection, "SELECT * FROM raw_counts ORDER BY ALL"),
            "checkpoints": _rows(connection, _CHECKPOINTS),
            "counts": asdict(done),
        })  # fmt: skip
    return done


_CHECKPOINTS = """
SELECT checkpoint_id, stage, parent_id, recipe_digest, data_digest, weights_digest, code_version
FROM checkpoints ORDER BY checkpoint_id
"""
_LICENCES = """
SELECT 'replay_buffer' AS "table", source_dataset AS source, nullif(lower(licence), '') AS licence, count(*) AS rows
FROM replay_buffer GROUP BY ALL
UNION ALL
SELECT 'episodes', coalesce(nullif(source_dataset, ''), $own),
       coalesce(nullif(lower(licence), ''),
                CASE WHEN coalesce(source_dataset, '') = '' AND purpose <> 'import' THEN $licence END), count(*)
FROM episodes GROUP BY ALL
UNION ALL
SELECT 'raw_counts', source_dataset, nullif(lower(licence), ''), count(*) FROM raw_counts WHERE is_present GROUP BY ALL
UNION ALL
SELECT 'union_tasks', 'no recorded source', NULL, count(*)
FROM union_tasks HAVING count(*) > 0 AND (SELECT count(*) FROM raw_counts WHERE is_present) = 0
ORDER BY ALL
"""


def _licences(connection: duckdb.DuckDBPyConnection, own_licence: str | None) -> list[dict[str, Any]]:
    """Licences of the tables whose rows have a source; each row of another table belongs to a row of one of these. A
    task may be of any raw source, so all raw sources need a licence."""
    return _rows(connection, _LICENCES, {"own": _OWN, "licence": own_licence})


def _rows(
    connection: duckdb.DuckDBPyConnection, sql: str, parameters: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    cursor = connection.execute(sql, parameters or {})
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _count(connection: duckdb.DuckDBPyConnection, name: str) -> int:
    return connection.execute(f"SELECT count(*) FROM {name}").fetchall()[0][0]  # noqa: S608 - our own names


def _schema(connection: duckdb.DuckDBPyConnection, name: str) -> pa.Schema:
    """The schema as DuckDB streams the table, with the meaning of each column."""
    known = stored(name) if name in PART_TABLES else OWNED_TABLES[name]
    found = connection.sql(f"FROM {name} LIMIT 0").to_arrow_table().schema
    fields = [
        pa.field(field.name, field.type, metadata=known.field(field.name).metadata)
        if field.name in known.names
        else pa.field(field.name, field.type)
        for field in found
    ]
    return pa.schema(fields)


def _views(connection: duckdb.DuckDBPyConnection, form: LakeFormat) -> str:
    """SQL of all views of the catalog over the exported tables, with the same column types."""
    statements = [_HEADERS[form]]
    for name in TABLES:
        columns = connection.execute(f"DESCRIBE {name}").fetchall()
        casts = ", ".join(f'CAST("{column}" AS {kind}) AS "{column}"' for column, kind, *_ in columns)
        source = f"read_parquet('{name}/*.parquet')" if form == "parquet" else f"{STORED}{name}"
        statements.append(f"CREATE VIEW {name} AS SELECT {casts} FROM {source};")  # noqa: S608 - our own names
    statements += [f"{sql.strip()};" for sql in DERIVED.values()]
    return "\n".join(statements) + "\n"


class _Progress:
    def __init__(self, total: int, on_progress: OnProgress | None) -> None:
        self._done, self._total, self._on_progress = 0, total, on_progress

    def over(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            self._done += batch.num_rows
            if self._on_progress is not None:
                self._on_progress(self._done, self._total)
