"""The views over the trajectory parts, as SQL that reads a snapshot's files where its variables are set, and
whatever the folders hold where they are not (a notebook that opens the catalog by itself).

A view holds no path: it reads the folders next to the catalog, wherever a copy or a mount of the state is. In a view,
DuckDB tells a table function the database's place in one way: the temporary folder that it would make next to the file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.columns import PART_TABLES, TIME, marked, stored
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import FAMILY_OF_TASK, SUITE_OF_TASK
from osworld_pipeline.durable import write_parquet
from osworld_pipeline.part_files import (
    COMPACTED,
    DETAIL_OF,
    HEAD_OF,
    KEY_OF,
    SEED,
    legacy_details,
    take_snapshot,
)
from osworld_pipeline.tables.lineage import LINEAGE_VIEWS, NAMED_ROWS
from osworld_pipeline.tables.stages import STAGES

_HERE = """CASE
    WHEN getvariable('osworld_state') IS NOT NULL THEN concat(getvariable('osworld_state'), '/')
    WHEN regexp_matches(current_setting('temp_directory'), '/[^/]+[.]tmp$')
        THEN regexp_replace(current_setting('temp_directory'), '[^/]+$', '')
    ELSE error('open osworld.duckdb as the database, or say where it is: SET VARIABLE osworld_state = its folder')
END"""
"""The state folder, with a slash."""
TASKS = """
CREATE VIEW tasks AS
SELECT *, EXISTS (FROM train_tasks t WHERE t.task_id = u.task_id AND t.domain = u.domain) AS is_train FROM union_tasks u
"""
REPLAY = f"""
CREATE VIEW replay AS
WITH proven AS (
    SELECT r.row_id, max(v.reward) AS verified_reward, max(v.started_at) FILTER (v.reward IS NOT NULL) AS verified_at,
           count(*) AS num_verifications
    FROM ({NAMED_ROWS}) r JOIN replay_verifications v ON v.row_id = r.name GROUP BY r.row_id
)
SELECT
    r.row_id, 'demonstration' AS kind, r.task_id, r.original_task_id, r.source_dataset, r.quality_rank, r.reward,
    r.is_reward_assumed, r.num_steps, r.messages, r.images, r.dialect, r.action_types, r.licence, r.source_path,
    r.source_line, r.source_sha256, NULL::VARCHAR AS episode_id, NULL::VARCHAR AS checkpoint_id,
    NULL::DOUBLE AS recorded_at,
    v.verified_reward, v.verified_at, coalesce(v.num_verifications, 0) AS num_verifications
FROM replay_buffer r LEFT JOIN proven v USING (row_id)
UNION ALL BY NAME
SELECT
    e.episode_id AS row_id, 'episode' AS kind, e.task_id, e.task_id AS original_task_id, 'online' AS source_dataset,
    e.task_reward AS reward, false AS is_reward_assumed, e.num_steps, e.episode_id, e.checkpoint_id,
    e.started_at AS recorded_at, e.task_reward AS verified_reward, e.started_at AS verified_at,
    0 AS num_verifications
FROM episodes e WHERE e.purpose = 'train' AND e.is_valid AND e.is_success
"""  # noqa: S608 - our own words
# A fault has no success and no reward (NULL), so that an average over `success` has the right denominator.
# A task outside the built-in suites has its domain as its family.
# Tokens that an engine did not count are 0 in its steps, and none at all in an import: both are NULL here.
# A grader's score holds for its desktop image and its own version: `desktops` names those of all graded episodes of an
# evaluation, so that rows with the same key and the same `desktops` can be compared, faults included.
_DESKTOPS = """replace(concat_ws('/', coalesce(nullif(image_digest[:12], ''), 'unknown image'),
        'grader ' || coalesce(nullif(grader_version, ''), 'unknown')), ',', ';')"""
DESKTOPS_OF_EVALUATION = f"""coalesce(array_to_string(list_sort(list(DISTINCT {_DESKTOPS}) FILTER (WHERE is_valid)
    OVER (PARTITION BY checkpoint_id, stage_key)), ', '), '')"""
"""Over the rows of evaluations, one for each task and seed."""
NAMED_TASKS = """
SELECT task_id, domain, instruction, count(*) OVER (PARTITION BY task_id) = 1 AS is_only FROM union_tasks
"""
"""An episode from before schema version 6 knows no domain: it is of the only task of its id, or of an unknown one."""
EVALS = f"""
CREATE VIEW evals AS
WITH named AS (
SELECT *, CASE WHEN min(domain) OVER same_id <> max(domain) OVER same_id
    THEN concat(domain, '/', task_id) ELSE task_id END AS task_key
FROM episodes WHERE purpose = 'evaluate'
WINDOW same_id AS (PARTITION BY checkpoint_id, stage_key, task_id)
),
played AS (
SELECT
    e.checkpoint_id, c.stage, e.task_id,
    e.task_key, e.seed,
    coalesce(nullif(regexp_extract(e.task_id, '{FAMILY_OF_TASK}', 1), ''), nullif(t.domain, ''), nullif(e.domain, ''),
        'unknown') AS family,
    coalesce(nullif(e.suite, ''), nullif(regexp_extract(e.task_id, '{SUITE_OF_TASK}', 1), ''), 'osworld') AS suite,
    nullif(e.suite_name, '') AS suite_name,
    coalesce(t.domain, nullif(e.domain, '')) AS domain, t.instruction, e.outcome,
    CASE WHEN e.is_valid THEN e.task_reward END AS reward,
    CASE WHEN e.is_valid THEN e.is_success END AS success,
    e.is_valid, CASE WHEN e.is_valid THEN e.shaped_reward END AS shaped_reward,
    e.num_steps AS turns, e.max_turns, e.attempt, e.episode_id, e.stage_key,
    CASE WHEN starts_with(e.stage_key, concat('eval-', e.checkpoint_id, '-'))
        THEN substr(e.stage_key, length(e.checkpoint_id) + 7) ELSE '' END AS evaluation_key,
    e.engine, e.temperature,
    e.provider, e.image_digest, e.grader_version, e.error, e.started_at, e.started_utc, e.ended_utc, e.source_dataset,
    CASE WHEN coalesce(e.source_dataset, '') <> '' THEN NULL WHEN e.num_steps = 0 THEN 0 ELSE s.prompt_tokens END
        AS prompt_tokens,
    CASE WHEN coalesce(e.source_dataset, '') <> '' THEN NULL WHEN e.num_steps = 0 THEN 0 ELSE s.response_tokens END
        AS response_tokens,
    e.times_s['total'] AS wall_s, e.times_s['reset'] AS reset_s, e.times_s['model'] AS model_s,
    e.times_s['step'] AS step_s, e.times_s['evaluate'] AS evaluate_s
FROM named e
LEFT JOIN ({NAMED_TASKS}) t ON t.task_id = e.task_id AND (t.is_only OR t.domain = e.domain)
LEFT JOIN checkpoints c ON c.checkpoint_id = e.checkpoint_id
LEFT JOIN (
    SELECT episode_id,
           CASE WHEN bool_and(prompt_num_tokens > 0) THEN sum(prompt_num_tokens)::BIGINT END AS prompt_tokens,
           CASE WHEN bool_and(prompt_num_tokens > 0) THEN sum(response_num_tokens)::BIGINT END AS response_tokens
    FROM steps WHERE purpose = 'evaluate' GROUP BY episode_id
) s ON s.episode_id = e.episode_id
QUALIFY row_number() OVER (
    PARTITION BY e.checkpoint_id, e.stage_key, e.task_key, e.seed
    ORDER BY e.started_at DESC, e.attempt DESC, e.episode_id DESC
) = 1
)
SELECT *, {DESKTOPS_OF_EVALUATION} AS desktops FROM played
"""  # noqa: S608 - our own words
DERIVED: Mapping[str, str] = {"tasks": TASKS, "replay": REPLAY, "evals": EVALS, **LINEAGE_VIEWS, "stages": STAGES}


def create_part_views(connection: duckdb.DuckDBPyConnection, state: StateDir) -> None:
    """Views named as PART_TABLES; creating them reads no part."""
    seed_tables(state)
    set_variables(connection, {name: [] for name in _VARIABLES}, state)
    for table in PART_TABLES:
        connection.execute(f"CREATE VIEW {table} AS {_view(state, table)}")


def pin_snapshot(connection: duckdb.DuckDBPyConnection, state: StateDir) -> None:
    """From here on the views of `connection` read the files of this moment, in all queries. Raises StoreError."""
    lists: dict[str, Sequence[str]] = {}
    for head, detail in DETAIL_OF.items():
        files = take_snapshot(state.trajectories, head)
        for table in filter(None, (head, detail)):
            lists[f"{table}_compacted"] = [f"{COMPACTED}/{name}" for name in files.compacted]
            lists[f"{table}_small"] = [file.name for file in files.versioned]
        lists[f"{head}_rewritten"] = sorted(files.rewritten)
        lists[f"{head}_any"] = [file.name for file in files.legacy]
        if detail is not None:
            lists[f"{detail}_any"] = legacy_details(state.trajectories, detail, files.legacy)
    set_variables(connection, lists, state)


def set_variables(connection: duckdb.DuckDBPyConnection, lists: Mapping[str, Sequence[str]], state: StateDir) -> None:
    for name, values in lists.items():
        table, _, kind = name.rpartition("_")
        if kind != "rewritten":
            folder = _folder(state, table)
            values = [f"{folder}/{file}" for file in (SEED, *values)]
        quoted = ", ".join("'" + value.replace("'", "''") + "'" for value in values)
        connection.execute(f"SET VARIABLE osworld_{name} = [{quoted}]::VARCHAR[]")


def seed_tables(state: StateDir) -> None:
    """A file without rows beside the parts: an empty glob is an error, and missing columns of older parts become NULL
    beside it. Raises StoreError."""
    for table in PART_TABLES:
        schema = stored(table)
        for folder in (state.trajectories / table, state.trajectories / table / COMPACTED):
            path = folder / SEED
            if not set(schema.names) <= set(_columns_of(path)):  # a newer program's has more
                write_parquet(path, marked(schema.empty_table()))


_VARIABLES = tuple(
    f"{table}_{kind}"
    for table in PART_TABLES
    for kind in ("compacted", "small", "any", *(("rewritten",) if table in DETAIL_OF else ()))
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


def _quoted(column: str) -> str:
    return f'p."{column}"'


def _view(state: StateDir, table: str) -> str:
    """What compaction made, but parts written again since; parts of their own; and files of which only their rows tell
    whether they count: those from before versions, or all where no snapshot was taken."""
    columns = ", ".join(
        f'CAST({_AS_READ.get((table, field.name)) or _quoted(field.name)} AS {_sql_type(field.type)}) AS "{field.name}"'
        for field in PART_TABLES[table]
    )
    head = HEAD_OF.get(table, table)
    rewritten = f"SELECT unnest(coalesce(getvariable('osworld_{head}_rewritten'), []::VARCHAR[])) AS part"
    return (  # our own names
        f"SELECT {columns} FROM {_scan(state, table, 'compacted', ())} p ANTI JOIN ({rewritten}) USING (part)"  # noqa: S608
        f" UNION ALL SELECT {columns} FROM {_scan(state, table, 'small', ())} p"
        f" UNION ALL SELECT {columns} FROM {_newest(state, table)}"
    )


def _newest(state: StateDir, table: str) -> str:
    head = HEAD_OF.get(table, table)
    patterns = ("*.parquet", f"{COMPACTED}/*.parquet")
    part = "coalesce(part, regexp_extract(filename, '([^/~]+)[.]parquet$', 1))"
    heads = (  # our own names
        f"(SELECT *, coalesce(part_version, 0) AS version FROM {_scan(state, head, 'any', patterns)}"  # noqa: S608
        f" QUALIFY version = max(version) OVER (PARTITION BY {part}))"
    )
    if head == table:
        return f"{heads} p"
    key = KEY_OF[head]
    # The heads come first, so that their folder is listed first: what they refer to is there by then.
    return (
        f"{heads} h JOIN {_scan(state, table, 'any', patterns)} p ON p.{key} = h.{key}"
        " AND coalesce(p.part_version, 0) = h.version AND p.part_digest IS NOT DISTINCT FROM h.part_digest"
    )


def _scan(state: StateDir, table: str, kind: str, patterns: Sequence[str]) -> str:
    folder = f"{state.trajectories.relative_to(state.root)}/{table}"
    globs = ", ".join(f"{_HERE} || '{folder}/{pattern}'" for pattern in patterns or (SEED,))
    options = "union_by_name = true" + (", filename = true" if kind == "any" else "")
    return f"read_parquet(coalesce(getvariable('osworld_{table}_{kind}'), [{globs}]), {options})"


def _folder(state: StateDir, table: str) -> str:
    return str((state.trajectories / table).resolve())


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
