"""The columns of the small tables that one asset each owns."""

import pyarrow as pa

from osworld_pipeline.columns.fields import (
    DUPLICATES,
    FLAG,
    FLOAT,
    INT32,
    INT64,
    MESSAGES,
    NUM_BYTES,
    NUMBERS,
    RUN_IDS,
    SHARE,
    TEXT,
    TEXTS,
    TIME,
    TRAINED_ROWS,
    UTC,
    column,
)

UNION_TASKS = pa.schema(
    [
        column("task_id", TEXT, "The base id: one row for each seen in any source."),
        column("prompt", TEXT, "Equal to task_id, as the reference writes it."),
        column("domain", TEXT, "Of the repository's tree, else the config's first related app."),
        column("config_domain", TEXT, "What the config itself says."),
        column("instruction", TEXT, "What the agent is asked."),
        column("task_config", TEXT, "The task's config as JSON; NULL where none is known."),
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
            "Digest of the demonstration: task, turns and images, without the system turn, which is ours.",
        ),
        column("task_id", TEXT, "The base id."),
        column("original_task_id", TEXT, "With the chunk's number, where it is a chunk."),
        column("source_dataset", TEXT, "The raw source, or the import's name."),
        column("quality_rank", INT32, "Of equal demonstrations the one of the higher rank stays."),
        column("reward", FLOAT, "As recorded, here or in a duplicate; or assumed.", SHARE),
        column("is_reward_assumed", FLAG, "The source did not say; it was taken for a success."),
        column("num_steps", INT32, "Assistant turns."),
        column("messages", MESSAGES, "Chat turns."),
        column("images", TEXTS, "SHA-256 of the blobs, in placeholder order."),
        column("dialect", TEXT, "In which its actions parse."),
        column("action_types", TEXTS, "Of its actions, in order."),
        column("licence", TEXT, "Of the source."),
        column("source_path", TEXT, "The file that it came from."),
        column("source_line", INT64, "The line there, from 1."),
        column("source_sha256", TEXT, "Of the bytes of the line that was read; of an import, of its own line."),
        column("former_row_id", TEXT, "Its row_id before version 6, which older injections and verifications name."),
        column("duplicates", DUPLICATES, "Other records of the same demonstration, with the rewards that they record."),
    ]
)

REJECTS = pa.schema(
    [
        column("source_dataset", TEXT, "The raw source, or the import's name."),
        column("source_path", TEXT, "The file."),
        column("source_line", INT64, "The line there, from 1; NULL where the whole file is meant."),
        column("kind", TEXT, "What was wrong, in a word."),
        column("reason", TEXT, "What was wrong, in a sentence."),
        column("task_id", TEXT, "Where it could be read."),
    ]
)

RAW_COUNTS = pa.schema(
    [
        column("source_dataset", TEXT, "The raw source."),
        column("source_path", TEXT, "Its file."),
        column("licence", TEXT, "Of the source."),
        column("revision", TEXT, "Of the source, where it is pinned."),
        column("sha256", TEXT, "Of the file; of a tree over the names, sizes and contents of its files."),
        column("is_present", FLAG, "The file is there; a source is optional."),
        column("num_bytes", INT64, "Of the file.", NUM_BYTES),
        column("num_records", INT64, "Records that could be read."),
        column("num_rejects", INT64, "Records that could not be used."),
    ]
)

CHECKPOINTS = pa.schema(
    [
        column("checkpoint_id", TEXT, "Stage and a digest of what made it."),
        column("stage", TEXT, "base, external, sft, flywheel, gspo_phase1, gspo_phase2."),
        column("parent_id", TEXT, "The checkpoint that it was trained from; NULL for a base or an external one."),
        column("path", TEXT, "Of the weights: below the state folder, or absolute; of an endpoint its address."),
        column("num_updates", INT32, "Number of updates that produced these weights."),
        column("recipe_digest", TEXT, "Of the recipe's sections that it depends on."),
        column("data_digest", TEXT, "Of what it was trained on."),
        column("weights_digest", TEXT, "Of the weights."),
        column("metrics", NUMBERS, "The last update's, by name."),
        column("run_ids", RUN_IDS, "Of Dagster and MLflow, by system."),
        column("recipe", TEXT, "The whole resolved recipe of the run, as JSON."),
        column("code_version", TEXT, "Of the program that made it: a git commit, or the distribution and its version."),
        column("is_code_dirty", FLAG, "Its sources differed from that commit; NULL outside a git checkout."),
        column("row_ids", TEXTS, "Rows of `replay` that it was fine-tuned on by themselves."),
        column("sources", TRAINED_ROWS, "The same rows with what they were then; NULL before version 6."),
        column("saved_utc", TIME, "When its stage wrote it; NULL before version 7.", UTC),
    ]
)
