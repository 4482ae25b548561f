"""The views over the trajectory parts, as SQL that reads a snapshot's files where its variables are set, and the files
that count by the manifest where they are not (a notebook that opens the catalog by itself).

A view holds no path: it reads the folders next to the catalog, wherever a copy or a mount of the state is. In a view,
DuckDB tells a table function the database's place in one way: the temporary folder that it would make next to the file.
Such a client opens no file before it is known that it counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.columns import PART_TABLES, TIME, marked, stored
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.durable import write_file, write_parquet
from osworld_pipeline.part_files import (
    COMPACTED,
    DETAIL_OF,
    HEAD_OF,
    KEY_OF,
    SEED,
    HeadFiles,
    legacy_details,
    take_snapshot,
)
from osworld_pipeline.tables.live_files import MARKER, live_files_sql

_HERE = """CASE
    WHEN getvariable('osworld_state') IS NOT NULL THEN concat(getvariable('osworld_state'), '/')
    WHEN regexp_matches(current_setting('temp_directory'), '/[^/]+[.]tmp$')
        THEN regexp_replace(current_setting('temp_directory'), '[^/]+$', '')
    ELSE error('open osworld.duckdb as the database, or say where it is: SET VARIABLE osworld_state = its folder')
END"""
"""The state folder, with a slash."""
_PLACE = f"({_HERE} || 'trajectories/')"


def create_part_views(connection: duckdb.DuckDBPyConnection, state: StateDir) -> None:
    """Views named as PART_TABLES, which any client of the catalog can read; creating them reads no part."""
    seed_tables(state)
    _set_variables(connection, {name: [] for name in _VARIABLES}, state)
    for table in PART_TABLES:
        connection.execute(f"CREATE VIEW {table} AS {_view(table, is_always_pinned=False)}")


def create_pinned_views(connection: duckdb.DuckDBPyConnection, state: StateDir) -> None:
    """The same views for a connection of our own, pinned to the files of this moment; `pin_snapshot` moves them on.
    They lack the branches for plain clients, which take most of the time of creating them. Raises StoreError."""
    seed_tables(state)
    found = {head: take_snapshot(state.trajectories, head) for head in DETAIL_OF}
    pin_files(connection, state, found)
    for table in PART_TABLES:
        # No program writes such files any more: none can appear later.
        has_legacy = table in HEAD_OF and bool(found[HEAD_OF[table]].legacy)
        view = _view(table, is_always_pinned=True, has_legacy=has_legacy)
        connection.execute(f"CREATE VIEW {table} AS {view}")


def pin_snapshot(connection: duckdb.DuckDBPyConnection, state: StateDir) -> None:
    """From here on the views of `connection` read the files of this moment, in all queries. Raises StoreError."""
    pin_files(connection, state, {head: take_snapshot(state.trajectories, head) for head in DETAIL_OF})


def pin_files(connection: duckdb.DuckDBPyConnection, state: StateDir, found: Mapping[str, HeadFiles]) -> None:
    """From here on the views of `connection` read these files, by head table."""
    lists: dict[str, Sequence[str]] = {}
    for head, files in found.items():
        detail = DETAIL_OF[head]
        for table in filter(None, (head, detail)):
            lists[f"{table}_compacted"] = [f"{COMPACTED}/{name}" for name in files.compacted]
            lists[f"{table}_small"] = [file.name for file in files.versioned]
        lists[f"{head}_small"] = [file.name for file in files.small]
        lists[f"{head}_rewritten"] = sorted(files.rewritten)
        lists[f"{head}_legacy"] = [file.name for file in files.legacy]
        if detail is not None:
            lists[f"{detail}_legacy"] = legacy_details(state.trajectories, detail, files.legacy)
    _set_variables(connection, lists, state)


def _set_variables(connection: duckdb.DuckDBPyConnection, lists: Mapping[str, Sequence[str]], state: StateDir) -> None:
    for name, values in lists.items():
        table, _, kind = name.rpartition("_")
        if kind != "rewritten":
            folder = _folder(state, table)
            values = [f"{folder}/{file}" for file in (SEED, *values)]
        quoted = ", ".join("'" + value.replace("'", "''") + "'" for value in values)
        connection.execute(f"SET VARIABLE osworld_{name} = [{quoted}]::VARCHAR[]")


def seed_tables(state: StateDir) -> None:
    """A file without rows beside the parts of each table: an empty glob is an error. Raises StoreError."""
    for table in PART_TABLES:
        schema = stored(table)
        for folder in (state.trajectories / table, state.trajectories / table / COMPACTED):
            path = folder / SEED
            if not set(schema.names) <= set(_columns_of(path)):  # a newer program's has more
                write_parquet(path, marked(schema.empty_table()))
    marker = state.trajectories / MARKER
    if not marker.is_file():
        write_file(marker, b'{"format": 1}\n')


_VARIABLES = tuple(
    f"{table}_{kind}"
    for table in PART_TABLES
    for kind in ("compacted", "small", "legacy", *(("rewritten",) if table in DETAIL_OF else ()))
)


# Before schema version 6 the rows of a training stage named its parent.
_TRAINED = 'CASE WHEN {condition} p."update" >= 0 THEN p.stage_key ELSE p.checkpoint_id END'
# Files count updates from 0, views from 1, as reports, MLflow and messages do.
_UPDATE = 'p."update" + (p."update" >= 0)::INTEGER'
# Before schema version 7 there were no timestamps.
_UTC = "make_timestamp(CAST({unix_time} * 1000000 AS BIGINT))"
_AS_READ: Mapping[tuple[str, str], str] = {
    ("episodes", "checkpoint_id"): _TRAINED.format(condition="p.purpose = 'train' AND"),
    ("rollout_groups", "checkpoint_id"): _TRAINED.format(condition=""),
    **{(table, "update"): _UPDATE for table in ("episodes", "steps", "rollout_groups", "injections")},
    ("episodes", "started_utc"): f"coalesce(p.started_utc, {_UTC.format(unix_time='nullif(p.started_at, 0)')})",
    ("episodes", "ended_utc"): "coalesce(p.ended_utc, "
    + _UTC.format(unix_time="(nullif(p.started_at, 0) + p.times_s['total'])")
    + ")",
}
"""Columns that a view shows otherwise than the files have them."""


def _view(table: str, *, is_always_pinned: bool, has_legacy: bool = True) -> str:
    """What compaction made, but parts written again since, and parts of their own: of a snapshot; or else, unless
    `is_always_pinned`, as the manifest and the folders say. Details from before versions (`has_legacy`) are those that
    their heads name."""
    head = HEAD_OF.get(table, table)
    columns = ", ".join(
        f'CAST({_AS_READ.get((table, field.name)) or _quoted(field.name)} AS {_sql_type(field.type)}) AS "{field.name}"'
        for field in PART_TABLES[table]
    )
    rewritten = f"SELECT unnest(coalesce(getvariable('osworld_{head}_rewritten'), []::VARCHAR[])) AS part"
    seed = f"[{_PLACE} || '{table}/{SEED}']"
    compacted, small = (_scan(_listed(table, kind, seed)) for kind in ("compacted", "small"))
    branches = [f"{compacted} p ANTI JOIN ({rewritten}) USING (part)", f"{small} p"]
    if not is_always_pinned:
        branches.append(_living(table))
    if head != table and has_legacy:
        branches.append(_legacy(head, table) + ("" if is_always_pinned else f" WHERE {_counts(table)}"))
    return " UNION ALL ".join(f"SELECT {columns} FROM {branch}" for branch in branches)  # noqa: S608 - our own names


def _living(table: str) -> str:
    """Rows `p` of the files that count where no snapshot is pinned. These files come first in the join, so that their
    folders are listed first."""
    folder = f"{_PLACE} || '{table}'"
    everything = f"[{folder} || '/*.parquet', {folder} || '/{COMPACTED}/*.parquet']"
    nothing = _nothing(table)
    rows = _scan(f"CASE WHEN {_is_pinned(table)} THEN [{nothing}] ELSE {everything} END", stored(table))
    replaced = f"SELECT part FROM {_live(table)} WHERE NOT is_compacted"  # noqa: S608 - our own names
    counts = f"NOT (l.is_compacted AND p.part IN ({replaced}))"
    return f"{_live(table)} l JOIN {rows} p ON p.filename = l.file WHERE {counts}"


def _counts(table: str) -> str:
    """Whether a head `h` from before versions counts."""
    live = f"SELECT parse_filename(file) FROM {_live(table)}"  # noqa: S608 - our own names
    return f"{_is_pinned(table)} OR parse_filename(h.filename) IN ({live})"


def _live(table: str) -> str:
    folder = f"{_PLACE} || '{table}'"
    return f"({live_files_sql(table, folder, _PLACE, _nothing(table))})"


def _is_pinned(table: str) -> str:
    return f"getvariable('osworld_{table}_compacted') IS NOT NULL"


def _nothing(table: str) -> str:
    """The file without rows, where a snapshot is pinned."""
    return f"list_extract(getvariable('osworld_{table}_compacted'), 1)"


def _legacy(head: str, table: str) -> str:
    """Rows `p` of details from before versions, and `h` of their heads."""
    key = KEY_OF[head]
    names = [stored(head).field(name) for name in (key, "part_digest")]

    def old(name: str, schema: Iterable[pa.Field]) -> str:
        scan = _scan(_listed(name, "legacy", f"[{_PLACE} || '{name}/*.parquet']"), schema)
        return f"(SELECT * FROM {scan} WHERE NOT contains(parse_filename(filename), '~'))"  # noqa: S608 - our own names

    return (
        f"{old(head, names)} h JOIN {old(table, stored(table))} p"
        f" ON p.{key} = h.{key} AND p.part_digest IS NOT DISTINCT FROM h.part_digest"
    )


def _scan(files: str, schema: Iterable[pa.Field] | None = None) -> str:
    """`schema`: without it, each file is opened when the query is planned, which is quicker where all are read."""
    if schema is None:
        return f"read_parquet({files}, union_by_name = true)"
    columns = ", ".join(
        f"'{field.name}': {{'name': '{field.name}', 'type': '{_sql_type(field.type)}', 'default_value': NULL}}"
        for field in schema
    )
    return f"read_parquet({files}, filename = true, schema = MAP {{{columns}}})"


def _listed(table: str, kind: str, otherwise: str) -> str:
    return f"coalesce(getvariable('osworld_{table}_{kind}'), {otherwise})"


def _folder(state: StateDir, table: str) -> str:
    return str((state.trajectories / table).resolve())


def _quoted(column: str) -> str:
    return f'p."{column}"'


def _sql_type(kind: pa.DataType) -> str:
    if pa.types.is_map(kind):
        return f"MAP({_sql_type(kind.key_type)}, {_sql_type(kind.item_type)})"
    if pa.types.is_list(kind):
        return f"{_sql_type(kind.value_type)}[]"
    names = {pa.string(): "VARCHAR", pa.bool_(): "BOOLEAN", pa.float64(): "DOUBLE", TIME: "TIMESTAMP"}
    names |= {pa.int8(): "TINYINT", pa.int32(): "INTEGER", pa.int64(): "BIGINT"}
    return names[kind]


def _columns_of(path: Path) -> list[str]:
    try:
        return pq.read_schema(path).names
    except (pa.ArrowException, OSError):
        return []
