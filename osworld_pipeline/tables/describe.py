"""The tables and views as a document, generated from their columns: `python -m osworld_pipeline.tables.describe >
docs/tables.md`."""

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa

from osworld_pipeline.columns import (
    CHECKPOINTS,
    EPISODES,
    OLDEST_READ,
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
    "steps": "One observation and the action taken.",
    "sequences": "One forward pass with its sampled tokens: one for each episode in `append` mode, one for each turn "
    "in `window` mode.",
    "rollout_groups": "Sibling episodes of one task in one update, and whether it trained on them.",
    "injections": "A replay row that joined a group.",
    "replay_verifications": "A demonstration re-executed on a fresh desktop.",
    "updates": "One update of a training stage, also if it was held or skipped; written by the trainer when it ends.",
    "stage_attempts": "One start of a training stage's program.",
    "union_tasks": "Every task of any source.",
    "train_tasks": "Those of union_tasks that can be trained on; the same columns.",
    "replay_buffer": "Every distinct demonstration whose turns all parse.",
    "rejects": "Rejected records and files, with reasons.",
    "raw_counts": "The raw sources, as they were read.",
    "checkpoints": "Weights, with their origin.",
    "tasks": "union_tasks, and whether they are trained on.",
    "replay": "All trajectories for reuse: demonstrations, and our own successes in training.",
    "evals": "One row for each evaluation of a checkpoint, task and seed: the last attempt.",
    "ancestry": "Each checkpoint with itself and all its ancestors.",
    "made_from": "The training data of each checkpoint, one row for each item and use.",
    "licences": "The licences of the demonstrations that a checkpoint or one of its ancestors was trained on, and of "
    "weights from elsewhere.",
    "stages": "Each training stage, with its status and progress.",
    "lineage": "The origin of each episode of an evaluation, one row for each item.",
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
"""The tables from which a view's columns get their description, unless VIEW_DOCS has one."""
UNITS: Mapping[str, str] = {"recorded_at": "s since 1970", "verified_at": "s since 1970", "verified_reward": "0..1"} | {
    "prompt_tokens": "tokens", "response_tokens": "tokens", "wall_s": "s", "reset_s": "s", "model_s": "s",
    "step_s": "s", "evaluate_s": "s",
}  # fmt: skip
VIEW_DOCS: Mapping[str, Mapping[str, str]] = {
    "tasks": {"is_train": "It is in train_tasks."},
    "replay": {
        "kind": "demonstration (a row of replay_buffer) or episode (a valid success with purpose train).",
        "row_id": "row_id of replay_buffer, or the episode_id.",
        "source_dataset": "As in replay_buffer; online for an episode.",
        "episode_id": "NULL for a demonstration.",
        "checkpoint_id": "NULL for a demonstration.",
        "recorded_at": "Start of the episode; NULL for a demonstration.",
        "verified_reward": "The highest score that a grader gave its verifications; an episode's own task_reward.",
        "verified_at": "Start of the last verification with a grader's score.",
        "num_verifications": "Verifications, including faults.",
    },
    "evals": {
        "stage": "Stage of the checkpoint.",
        "task_key": "The task within its evaluation: task_id, or domain/task_id if several domains have that id.",
        "domain": "Domain of the task.",
        "family": "Family of a task of a built-in suite; else the domain.",
        "suite": "As recorded; before version 6 that of a task of a built-in suite, else osworld.",
        "reward": "task_reward; NULL for a fault, so that an average has the right denominator.",
        "success": "is_success; NULL for a fault.",
        "shaped_reward": "NULL for a fault.",
        "turns": "num_steps.",
        "evaluation_key": "Key of the evaluation's settings: rows with equal keys can be compared; empty: unknown.",
        "desktops": "Image and grader of its evaluation's graded episodes: only rows with the same can be compared; "
        "several, comma-separated: mixed.",
        "source_dataset": "The import's name; empty for an episode of our own.",
        "prompt_tokens": "Tokens read over all turns, including each prompt; NULL if not counted.",
        "response_tokens": "Tokens sampled over all turns; NULL if not counted.",
        "wall_s": "From before the reset to after the release; episodes run in parallel.",
        "reset_s": "Time until the desktop was ready.",
        "model_s": "Time of the engine over all turns.",
        "step_s": "Time of the desktop over all turns.",
        "evaluate_s": "Time of the grader.",
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
        "group_id": "The group itself, or the one in which it was played or which it joined.",
        "task_id": "Its task.",
        "update": "The update that trained on the group, from 1; NULL if used for fine-tuning.",
        "source_dataset": "Dataset of a demonstration; online for an episode.",
        "path": "The file of a demonstration.",
        "line": "The line in that file, from 1.",
        "sha256": "SHA-256 of the bytes of that line.",
        "licence": "Licence of a demonstration's source.",
    },
    "licences": {
        "checkpoint_id": "The checkpoint to which they apply.",
        "licence": "Licence of the source or of the weights; unknown if it named none.",
        "source_dataset": "The raw source, or the import's name; NULL for weights.",
        "ancestor_id": "The checkpoint that was trained on it, or has the weights: itself, or an ancestor.",
        "generations": "0 for itself, 1 for its parent.",
        "how": "injected (joined a group), fine_tuned, or weights (made elsewhere).",
        "num_rows": "Demonstrations; 1 for weights.",
        "num_tasks": "Their tasks; 0 for weights.",
        "path": "One of their files; the folder or address of weights.",
    },
    "stages": {
        "status": "finished, stopped, failed or running; silent: no end is recorded, and no activity for 15 minutes "
        "or three times the duration of its slowest update, whichever is longer.",
        "num_updates": "Completed updates.",
        "num_planned": "Updates of the whole stage; NULL before version 7.",
        "checkpoint_id": "Its newest checkpoint: the final one, or a milestone; NULL before the first.",
        "num_attempts": "Starts of its program; above 1 it was resumed.",
        "started_utc": "When its first attempt began.",
        "last_sign_utc": "The last recorded start, update, save or end.",
        "ended_utc": "When its last attempt ended; NULL while it runs.",
        "error": "Why the last attempt stopped or failed.",
        "host": "Host of the last attempt.",
        "process_id": "Process of the last attempt.",
        "run_ids": "Runs of the last attempt in Dagster and MLflow, by system.",
    },
    "lineage": {
        "episode_id": "The evaluation's episode.",
        "reward": "task_reward; NULL for a fault.",
        "kind": "evaluation, task, screenshot, checkpoint; or as in made_from: group, episode, demonstration.",
        "source_id": "Id of the item: stage_key, task_id, SHA-256, checkpoint_id, group_id, episode_id, row_id.",
        "how": "As in made_from.",
        "generations": "Of the ancestor: 0 for the checkpoint that was scored. NULL for items of the episode itself.",
        "ancestor_id": "The checkpoint itself, or the one trained on the item.",
        "group_id": "As in made_from.",
        "index": "Step of a screenshot, from 0; update of a group, from 1.",
        "path": "Path of the weights, of a screenshot in a file of its own (below the state folder; cold images are "
        "in packs), or of the raw file of a demonstration.",
        "line": "The line of the raw file, from 1.",
        "sha256": "SHA-256 of the bytes of that line.",
        "licence": "Licence of a demonstration's source.",
        "dagster_run_id": "Dagster run of the evaluation, or of the checkpoint's training.",
        "mlflow_run_id": "MLflow run of the evaluation, or of the checkpoint's training.",
    },
}


def describe_tables() -> str:
    """The content of docs/tables.md."""
    lines = [
        "# Tables and views",
        "",
        "Generated from the columns in the code (`python -m osworld_pipeline.tables.describe`); a test checks it.",
        "",
        f"Schema version {SCHEMA_VERSION}, in the key-value metadata of every Parquet file (`osworld_schema_version`). "
        "A file of an older version reads with NULL for the columns that it lacks; before version "
        f"{OLDEST_READ} it needs [migrate](versions.md). A file of a newer version reads "
        "without the columns that this program does not know, and compaction skips it.",
        "",
        "Every column may be NULL in rows of older files. Shares are 0..1. Ids and digests are text. Timestamps are "
        "UTC.",
        "",
        "Updates are numbered from 1, as in reports, MLflow and messages; the files of episodes, steps, groups "
        "and injections have them from 0, and the views add 1. A column that counts updates (`num_updates`, "
        "`policy_version`, `weights_update`) is the number of updates made: weights with 7 updates are the "
        "result of update 7 and sample the data for update 8.",
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
    table = ["| column | type | unit | meaning |", "|---|---|---|---|"]
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
