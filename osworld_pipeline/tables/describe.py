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
    STAGE_ATTEMPTS,
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
    "updates": "One optimiser update of a training stage, written by the trainer when it is made.",
    "stage_attempts": "One start of a training stage's program.",
    "union_tasks": "Every task seen anywhere.",
    "train_tasks": "Those of union_tasks that can be trained on; the same columns.",
    "replay_buffer": "Every demonstration whose turns all parse, once.",
    "rejects": "What no table took, and why.",
    "raw_counts": "The raw sources, as they were read.",
    "checkpoints": "Weights, with what made them.",
    "tasks": "union_tasks, and whether they are trained on.",
    "replay": "All that can be used again: demonstrations, and our own successes in training.",
    "evals": "One row for each evaluation of a checkpoint, task and seed: the last attempt.",
    "ancestry": "Each checkpoint with itself and all that it descends from.",
    "made_from": "What each checkpoint was trained on, one row for each thing and use.",
    "licences": "The licences of the demonstrations that reach a checkpoint, through itself or an ancestor.",
    "stages": "Each training stage, with whether it runs and how far it is.",
    "lineage": "All that stands behind each episode of an evaluation, one row for each thing.",
}
BASES: Mapping[str, tuple[pa.Schema, ...]] = {
    "tasks": (UNION_TASKS,),
    "replay": (REPLAY_BUFFER,),
    "evals": (EPISODES, CHECKPOINTS, UNION_TASKS),
    "ancestry": (),
    "made_from": (),
    "licences": (),
    "stages": (STAGE_ATTEMPTS,),
    "lineage": (EPISODES, CHECKPOINTS),
}
"""Where a view's column says what it says there, unless VIEW_DOCS says more."""
UNITS: Mapping[str, str] = {"recorded_at": "s since 1970", "verified_at": "s since 1970", "verified_reward": "0..1"} | {
    "prompt_tokens": "tokens", "response_tokens": "tokens", "wall_s": "s", "reset_s": "s", "model_s": "s",
    "step_s": "s", "evaluate_s": "s",
}  # fmt: skip
VIEW_DOCS: Mapping[str, Mapping[str, str]] = {
    "tasks": {"is_train": "It is in train_tasks."},
    "replay": {
        "kind": "demonstration (a row of replay_buffer) or episode (a valid success with purpose train).",
        "row_id": "Of replay_buffer, or the episode_id.",
        "source_dataset": "Of replay_buffer; online for an episode.",
        "episode_id": "NULL for a demonstration.",
        "checkpoint_id": "NULL for a demonstration.",
        "recorded_at": "When the episode began; NULL for a demonstration.",
        "verified_reward": "The best grader's score of its verifications; an episode's own task_reward.",
        "verified_at": "When the last verification with a grader's score began.",
        "num_verifications": "Tries, faults included.",
    },
    "evals": {
        "stage": "Of the checkpoint.",
        "task_key": "Names the task in its evaluation: task_id, as domain/task_id where several domains have that id.",
        "domain": "Of the task.",
        "family": "Of a task of a built-in suite; else the domain.",
        "suite": "As recorded; before version 6 that of a task of a built-in suite, else osworld.",
        "reward": "task_reward; NULL for a fault, so that an average has the right denominator.",
        "success": "is_success; NULL for a fault.",
        "shaped_reward": "NULL for a fault.",
        "turns": "num_steps.",
        "evaluation_key": "Of the evaluation's settings: only rows with the same one can be compared; empty: unknown.",
        "desktops": "Image and grader of its evaluation's graded episodes: only rows with the same can be compared; "
        "several, with commas: mixed.",
        "source_dataset": "The import's name; empty for an episode of our own.",
        "prompt_tokens": "Read over all turns, a prompt each time; NULL where it was not counted.",
        "response_tokens": "Sampled over all turns; NULL where it was not counted.",
        "wall_s": "From before the reset to after the release; episodes run side by side.",
        "reset_s": "What the desktop took to be ready.",
        "model_s": "What the engine took, over all turns.",
        "step_s": "What the desktop took, over all turns.",
        "evaluate_s": "What the grader took.",
    },
    "ancestry": {
        "checkpoint_id": "The descendant.",
        "generations": "0 for itself, 1 for its parent.",
        "ancestor_id": "Itself, or a checkpoint that it descends from.",
    },
    "made_from": {
        "checkpoint_id": "The checkpoint that was trained.",
        "kind": "group, episode (of ours) or demonstration (a row of replay_buffer).",
        "source_id": "The group_id, episode_id or row_id.",
        "how": "rolled_out (a group that was trained on; its valid episodes), injected (joined a group) or fine_tuned.",
        "group_id": "The group that it is, was played in or joined.",
        "task_id": "Its task.",
        "update": "The update that the group trained, from 1; NULL where it was fine-tuned on.",
        "source_dataset": "Of a demonstration; online for an episode.",
        "path": "The file that a demonstration came from.",
        "line": "The line there, from 1.",
        "sha256": "Of the bytes of that line.",
        "licence": "Of a demonstration's source.",
    },
    "licences": {
        "checkpoint_id": "The checkpoint that they reach.",
        "licence": "Of the source; unknown where it named none.",
        "source_dataset": "The raw source, or the import's name.",
        "ancestor_id": "The checkpoint that was trained on it: itself, or one that it descends from.",
        "generations": "0 for itself, 1 for its parent.",
        "how": "injected (joined a group) or fine_tuned.",
        "num_rows": "Demonstrations.",
        "num_tasks": "Their tasks.",
        "path": "A file that they came from.",
    },
    "stages": {
        "status": "finished, stopped, failed or running; silent: no end is on record, and no sign for 15 minutes and "
        "three of its slowest updates.",
        "num_updates": "That are done.",
        "num_planned": "Updates of the whole stage; NULL before version 7.",
        "checkpoint_id": "Its newest: its end, or a milestone; NULL before the first.",
        "num_attempts": "Starts of its program; above 1 it was resumed.",
        "started_utc": "When its first attempt began.",
        "last_sign_utc": "The last start, update, save or end on record.",
        "ended_utc": "When its last attempt ended; NULL while it runs.",
        "error": "Why the last attempt stopped or failed.",
        "host": "Of the last attempt.",
        "process_id": "Of the last attempt.",
        "run_ids": "Of the last attempt: of Dagster and MLflow, by system.",
    },
    "lineage": {
        "episode_id": "The evaluation's episode.",
        "reward": "task_reward; NULL for a fault.",
        "kind": "evaluation, task, screenshot, checkpoint; then as made_from's: group, episode, demonstration.",
        "source_id": "What stands behind it: stage_key, task_id, SHA-256, checkpoint_id, group_id, episode_id, row_id.",
        "how": "As made_from's.",
        "generations": "Of the ancestor: 0 for the checkpoint that was scored. NULL for what the episode itself saw.",
        "ancestor_id": "The checkpoint that this is, or that was made from it.",
        "group_id": "As made_from's.",
        "index": "Step of a screenshot, from 0; update of what a group trained, from 1.",
        "path": "Below the state folder, of the weights or of the image while it has a file of its own (cold ones are "
        "in packs); of the raw file of a demonstration.",
        "line": "The line of the raw file, from 1.",
        "sha256": "Of the bytes of that line.",
        "licence": "Of a demonstration's source.",
        "dagster_run_id": "Of the evaluation, or of the checkpoint's training.",
        "mlflow_run_id": "Of the evaluation, or of the checkpoint's training.",
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
        "Every column may be NULL in rows of older files. Shares are 0..1. Ids and digests are text. Timestamps are "
        "UTC.",
        "",
        "Updates are numbered from 1, here as in reports, MLflow and messages; the files of episodes, steps, groups "
        "and injections have them from 0, and the views add 1. A column that counts updates (`num_updates`, "
        "`policy_version`, `weights_update`) says how many were made: weights of 7 updates are the result of update 7, "
        "and sample what update 8 trains on.",
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
    "TIMESTAMP": "timestamp",
}


def _type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"list of {_type(kind.value_type)}"
    if pa.types.is_map(kind):
        return f"map of {_type(kind.key_type)} to {_type(kind.item_type)}"
    if pa.types.is_struct(kind):
        return "struct(" + ", ".join(f"{field.name} {_type(field.type)}" for field in kind) + ")"
    return {"string": "text", "double": "float64", "timestamp[us]": "timestamp"}.get(str(kind), str(kind))


if __name__ == "__main__":
    print(describe_tables(), end="")
