"""The columns of the small tables, each owned by one asset."""

import json
from dataclasses import asdict

import pyarrow as pa

from osworld_pipeline.columns.fields import (
    DUPLICATES,
    FLAG,
    FLOAT,
    INT32,
    INT64,
    MESSAGES,
    TEXT,
    TEXTS,
    TRAINED_ROWS,
    column,
)
from osworld_pipeline.columns.records import Row, columns_of, row_of, values_of
from osworld_pipeline.domain.checkpoint import Checkpoint
from osworld_pipeline.domain.digest import canonical_json
from osworld_pipeline.domain.replay import TrainedRow
from osworld_pipeline.domain.stored import NUM_BYTES, SHARE

UNION_TASKS = pa.schema(
    [
        column("task_id", TEXT, "The base id; `union_tasks` has one row for each domain of an id."),
        column("prompt", TEXT, "Equal to task_id, as in Slime-OSWorld."),
        column(
            "domain", TEXT, "Domain from the config, else the source, the repository's tree, or the first related app."
        ),
        column("config_domain", TEXT, "Domain from the config, else its first related app."),
        column("instruction", TEXT, "Instruction for the agent."),
        column("task_config", TEXT, "The task's config as JSON; {} if unknown."),
        column("task_config_source", TEXT, "distill_data, osworld_repo, import or missing."),
        column("has_task_config", FLAG, "A config is known."),
        column("platform", TEXT, "ubuntu, windows, or unknown without a config."),
    ]
)

REPLAY_BUFFER = pa.schema(
    [
        column(
            "row_id",
            TEXT,
            "Digest of the demonstration: task, turns and images, without our system turn.",
        ),
        column("task_id", TEXT, "The base id."),
        column("original_task_id", TEXT, "The task id with the chunk's number, if it is a chunk."),
        column("source_dataset", TEXT, "The raw source, or the import's name."),
        column("quality_rank", INT32, "Of equal demonstrations the one with the higher rank is kept."),
        column("reward", FLOAT, "As recorded in the row or a duplicate; or assumed.", SHARE),
        column("is_reward_assumed", FLAG, "The source has no reward; a success is assumed."),
        column("num_steps", INT32, "Assistant turns."),
        column("messages", MESSAGES, "Chat turns."),
        column("images", TEXTS, "SHA-256 of the blobs, in placeholder order."),
        column("dialect", TEXT, "Dialect in which its actions parse."),
        column("action_types", TEXTS, "Types of its actions, in order."),
        column("licence", TEXT, "Licence of the source."),
        column("source_path", TEXT, "The file of the record."),
        column("source_line", INT64, "The line in that file, from 1."),
        column("source_sha256", TEXT, "SHA-256 of the bytes of the line; for an import, of the import's line."),
        column("former_row_id", TEXT, "Its row_id before version 6, which older injections and verifications name."),
        column("duplicates", DUPLICATES, "Other records of the same demonstration, with their recorded rewards."),
    ]
)

REJECTS = pa.schema(
    [
        column("source_dataset", TEXT, "The raw source, or the import's name."),
        column("source_path", TEXT, "The file."),
        column("source_line", INT64, "The line in that file, from 1; 0 for a whole file."),
        column("kind", TEXT, "Kind of the problem, in a word."),
        column("reason", TEXT, "The problem, in a sentence."),
        column("task_id", TEXT, "The task id, if readable."),
    ]
)

RAW_COUNTS = pa.schema(
    [
        column("source_dataset", TEXT, "The raw source."),
        column("source_path", TEXT, "Its file."),
        column("licence", TEXT, "Licence of the source."),
        column("revision", TEXT, "Revision of the source, if pinned."),
        column("sha256", TEXT, "SHA-256 of the file; for a tree, over the names, sizes and contents of its files."),
        column("is_present", FLAG, "The file exists; a source is optional."),
        column("num_bytes", INT64, "Size of the file.", NUM_BYTES),
        column("num_records", INT64, "Readable records."),
        column("num_rejects", INT64, "Rejected records."),
    ]
)

CHECKPOINTS = pa.schema(
    [
        *columns_of(Checkpoint),
        column("recipe", TEXT, "The whole resolved recipe of the run, as JSON."),
        column("sources", TRAINED_ROWS, "The rows of row_ids as they were at that time; NULL before version 6."),
    ]
)


def checkpoint_row(checkpoint: Checkpoint) -> Row:
    return row_of(checkpoint) | {
        "code_version": checkpoint.code_version or None,
        "recipe": canonical_json(checkpoint.recipe) if checkpoint.recipe else None,
        "sources": [asdict(one) for one in checkpoint.sources],
    }


def checkpoint_from(row: Row) -> Checkpoint:
    return Checkpoint(
        **values_of(Checkpoint, row),
        recipe=json.loads(row["recipe"] or "{}"),
        sources=tuple(TrainedRow(**one) for one in row["sources"] or ()),
    )
