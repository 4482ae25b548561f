"""The live files of parts as SQL, for a client that opens the catalog by itself; the counterpart of take_snapshot.

DuckDB lists the folders of a query when it binds it, and reads the manifest later. So the manifest may name files that
were not listed; then the query uses the state before their compaction, whose files are listed and kept for the grace
period.

The join with the names of the live files comes too late for DuckDB to skip the others, and it opens every file that it
lists. So a rebuild of the catalog stores the names of the files that are retired by then (`store_retired`). A condition
on them is constant for each file, so DuckDB applies it when it plans a query and opens only the remaining files.
"""

import duckdb

from osworld_pipeline.store.part_files import COMPACTED, DETAILS_OF, HEAD_OF, MANIFEST, Manifest

_GENERATION = "try_cast(regexp_extract({name}, '^g([0-9]+)-', 1) AS BIGINT)"
_PART = r"'^([A-Za-z0-9][A-Za-z0-9._-]*)~([0-9a-f]{16})-[0-9a-f]{6}[.]parquet$'"
_LATEST = "9223372036854775807"
_NUM_TELLING = 31
"""Characters at the end of a file's path that distinguish it: version, random suffix and extension of a part."""


def store_retired(connection: duckdb.DuckDBPyConnection, manifest: Manifest) -> None:
    """Stores what is retired in `manifest` as constants of the catalog. An older catalog stays correct: a retired file
    is never used again."""
    for head in DETAILS_OF:
        names = sorted(name[-_NUM_TELLING:] for name in manifest.retired if name.startswith(f"{head}/"))
        text = "|".join(names).replace("'", "''")
        connection.execute(f"CREATE OR REPLACE MACRO osworld_{head}_retired() AS '{text}'")
    connection.execute(f"CREATE OR REPLACE MACRO osworld_generation() AS {manifest.generation}")


def not_retired_sql(table: str, file: str) -> str:
    """A condition on the path `file`, which DuckDB applies before it opens files."""
    return f"NOT contains(osworld_{HEAD_OF.get(table, table)}_retired(), right({file}, {_NUM_TELLING}))"


def live_files_sql(table: str, folder: str, root: str) -> str:
    """A query of `file`, `is_compacted` and `part` (NULL if it is compacted): the live files of `table`.

    `folder`, `root`: SQL for the table's folder and that of all tables.
    """
    head = HEAD_OF.get(table, table)

    name = "parse_filename(file)"
    heads = f"{root} || '{head}'"
    repair = f"concat('osworld-pipeline rebuild-catalog --state ''', {root}, '..''')"
    damaged = f"concat('the manifest of the compactions is missing or old: run ', {repair})"
    first = "(SELECT min(name) FROM missing)"
    lost = f"concat('a file that the manifest names is gone: ', {first}, ': restore it from a copy, or run ', {repair})"
    return f"""
WITH manifest AS MATERIALIZED (
    SELECT any_value(decode(content)::JSON) AS j FROM read_blob({root} || '*.json')
    WHERE ends_with(filename, '/{MANIFEST}')
), named AS (
    SELECT name, {_GENERATION.format(name="name")} AS generation
    FROM (SELECT unnest((j->'files'->'{head}')::VARCHAR[]) AS name FROM manifest)
), dated AS (
    SELECT unnest(map_keys(m)) AS name, unnest(map_values(m)) AS generation
    FROM (SELECT (j->'retired_in')::MAP(VARCHAR, BIGINT) AS m FROM manifest)
), retired AS MATERIALIZED (
    SELECT name, coalesce(d.generation, 0) AS generation
    FROM (SELECT unnest(json_keys(j->'retired')) AS name FROM manifest) LEFT JOIN dated d USING (name)
), compacted AS MATERIALIZED (
    SELECT file, {name} AS name, {_GENERATION.format(name=name)} AS generation
    FROM glob({folder} || '/{COMPACTED}/*.parquet')
), missing AS MATERIALIZED (
    SELECT name, generation FROM named WHERE name NOT IN (SELECT name FROM compacted)
), state AS MATERIALIZED (
    SELECT CASE
        WHEN greatest((SELECT max(generation) FROM compacted), osworld_generation())
                > coalesce((SELECT (j->'generation')::BIGINT FROM manifest), 0)
            THEN error({damaged})
        WHEN EXISTS (FROM missing WHERE generation IS NULL OR generation NOT IN (SELECT generation FROM retired))
            THEN error({lost})
        ELSE coalesce((SELECT min(generation) - 1 FROM missing), {_LATEST}) END AS latest
), gone AS (
    SELECT name FROM retired, state WHERE generation <= latest
), parsed AS (
    SELECT {name} AS name, regexp_extract({name}, {_PART}, ['part', 'version']) AS p
    FROM glob({heads} || '/*.parquet')
    WHERE regexp_matches({name}, {_PART}) AND concat('{head}/', {name}) NOT IN (FROM gone)
), small AS (
    SELECT name, p.part AS part, p.version AS version FROM parsed
    QUALIFY row_number() OVER (PARTITION BY p.part ORDER BY p.version DESC, name DESC) = 1
)
SELECT file, true AS is_compacted, NULL AS part FROM compacted, state
WHERE generation <= latest AND concat('{head}/{COMPACTED}/', name) NOT IN (FROM gone)
  AND (name IN (SELECT name FROM named) OR concat('{head}/{COMPACTED}/', name) IN (SELECT name FROM retired))
UNION ALL
SELECT concat({folder}, '/', name), false, part FROM small
"""  # noqa: S608 - our own words
