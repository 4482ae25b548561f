"""The tables and views as a document, made from their columns: `python -m osworld_pipeline.tables.describe >
docs/tables.md`."""

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa

from osworld_pipeline.columns import (
    CHECKPOINTS,
    EPISODES,
    OWNED_TABLES,
    PART_TABLES,
    REPLAY_BUFFER,
    SCHEMA_VERSION,
    UNION_TASKS,
    doc_of,
    unit_of,
)
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.tables.catalog import fresh_views
from osworld_pipeline.tables.views import DERIVED

ABOUT: Mapping[str, str] = {
    "episodes": "One attempt at one task; many writers.",
    "steps": "One observation and the action that answered it.",
    "rollout_groups": "Sibling episodes of one task, as an update trained them.",
    "injections": "A replay row that joined a group.",
    "replay_verifications": "A demonstration re-executed on a fresh desktop.",
    "union_tasks": "Every task seen anywhere.",
    "train_tasks": "Those of union_tasks that can be trained on; the same columns.",
    "replay_buffer": "Every demonstration whose turns all parse, once.",
    "rejects": "What no table took, and why.",
    "raw_counts": "The raw sources, as they were read.",
    "checkpoints": "Weights, with what made them.",
    "tasks": "union_tasks, and whether they are trained on.",
    "replay": "All that can be used again: demonstrations, and our own successes in training.",
    "evals": "One row for each checkpoint, task and seed: the last attempt.",
}
BASES: Mapping[str, tuple[pa.Schema, ...]] = {
    "tasks": (UNION_TASKS,),
    "replay": (REPLAY_BUFFER,),
    "evals": (EPISODES, CHECKPOINTS, UNION_TASKS),
}
"""Where a view's column says what it says there, unless VIEW_DOCS says more."""
UNITS: Mapping[str, str] = {"recorded_at": "s since 1970", "verified_at": "s since 1970", "verified_reward": "0..1"}
VIEW_DOCS: Mapping[str, Mapping[str, str]] = {
    "tasks": {"is_train": "It is in train_tasks."},
    "replay": {
        "kind": "demonstration (a row of replay_buffer) or episode (a valid success with purpose train).",
        "row_id": "Of replay_buffer, or the episode_id.",
        "source_dataset": "Of replay_buffer; online for an episode.",
        "episode_id": "NULL for a demonstration.",
        "checkpoint_id": "NULL for a demonstration.",
        "recorded_at": "When the episode began; NULL for a demonstration.",
        "verified_reward": "The best grader's word of its verifications; an episode's own task_reward.",
        "verified_at": "When the last verification with a grader's word began.",
        "num_verifications": "Tries, faults included.",
    },
    "evals": {
        "stage": "Of the checkpoint.",
        "family": "Of a task of a built-in suite; else the domain.",
        "suite": "Of a task of a built-in suite; else osworld.",
        "reward": "task_reward; NULL for a fault, so that an average has the right denominator.",
        "success": "is_success; NULL for a fault.",
        "shaped_reward": "NULL for a fault.",
        "turns": "num_steps.",
    },
}


def describe_tables() -> str:
    """docs/tables.md, whole."""
    lines = [
        "# Tables and views",
        "",
        "Made from the columns in the code (`python -m osworld_pipeline.tables.describe`); a test holds it up to date.",
        "",
        f"Schema version {SCHEMA_VERSION}, in the key-value metadata of every Parquet file (`osworld_schema_version`). "
        "A file of an older version reads with NULL for the columns that it lacks. A file of a newer version reads "
        "without the columns that this program does not know, and compaction leaves it alone.",
        "",
        "Every column may be NULL in rows of older files. Shares are 0..1. Ids and digests are text.",
    ]
    for title, tables in (("Trajectories", PART_TABLES), ("Small tables", OWNED_TABLES)):
        lines += ["", f"## {title}"]
        for name, schema in tables.items():
            lines += _section(
                name, ((field.name, _type(field.type), unit_of(field), doc_of(field)) for field in schema)
            )
    lines += ["", "## Views over them"]
    with tempfile.TemporaryDirectory() as folder, fresh_views(StateDir(Path(folder))) as connection:
        for name in DERIVED:
            columns = connection.execute(f"DESCRIBE {name}").fetchall()
            lines += _section(name, [_described(name, *column[:2]) for column in columns])
    return "\n".join(lines) + "\n"


def _section(name: str, rows: Iterable[tuple[str, str, str, str]]) -> list[str]:
    table = ["| column | type | unit | what it says |", "|---|---|---|---|"]
    return ["", f"### {name}", ABOUT[name], "", *table, *(f"| {' | '.join(row)} |" for row in rows)]


def _described(view: str, column: str, kind: str) -> tuple[str, str, str, str]:
    fields = [schema.field(column) for schema in BASES[view] if column in schema.names]
    doc = VIEW_DOCS[view].get(column) or (doc_of(fields[0]) if fields else "")
    if not fields:
        return column, _TYPES.get(kind, kind.lower()), UNITS.get(column, ""), doc
    return column, _type(fields[0].type), unit_of(fields[0]), doc


_TYPES: Mapping[str, str] = {
    "VARCHAR": "text",
    "DOUBLE": "float64",
    "BIGINT": "int64",
    "INTEGER": "int32",
    "BOOLEAN": "bool",
}


def _type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"list of {_type(kind.value_type)}"
    if pa.types.is_map(kind):
        return f"map of {_type(kind.key_type)} to {_type(kind.item_type)}"
    if pa.types.is_struct(kind):
        return "struct(" + ", ".join(f"{field.name} {_type(field.type)}" for field in kind) + ")"
    return {"string": "text", "double": "float64"}.get(str(kind), str(kind))


if __name__ == "__main__":
    print(describe_tables(), end="")
