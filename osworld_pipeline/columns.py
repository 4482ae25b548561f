"""The columns of every table, in Arrow's types. Trajectory parts, small tables, the catalog and its views are all made
from this one definition, so that a column exists in one place and old parts can be read beside new ones."""

from collections.abc import Mapping

import pyarrow as pa

TEXT = pa.string()
TEXTS = pa.list_(pa.string())
NUMBERS = pa.map_(pa.string(), pa.float64())
RUN_IDS = pa.map_(pa.string(), pa.string())
MESSAGES = pa.list_(
    pa.struct([("role", TEXT), ("content", pa.list_(pa.struct([("type", TEXT), ("text", TEXT)])))]),
)

EPISODES = pa.schema(
    [
        ("episode_id", TEXT),
        ("task_id", TEXT),
        ("task_digest", TEXT),
        ("purpose", TEXT),
        ("checkpoint_id", TEXT),
        ("stage_key", TEXT),
        ("update", pa.int32()),
        ("group_id", TEXT),
        ("seed", pa.int64()),
        ("attempt", pa.int32()),
        ("outcome", TEXT),
        ("error", TEXT),
        ("is_valid", pa.bool_()),
        ("is_success", pa.bool_()),
        ("task_reward", pa.float64()),
        ("partial_reward", pa.float64()),
        ("penalty", pa.float64()),
        ("shaped_reward", pa.float64()),
        ("num_steps", pa.int32()),
        ("max_turns", pa.int32()),
        ("engine", TEXT),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("max_new_tokens", pa.int32()),
        ("stop", TEXTS),
        ("sampling_seed", pa.int64()),
        ("replica_id", TEXT),
        ("provider", TEXT),
        ("image_digest", TEXT),
        ("grader_version", TEXT),
        ("processor_digest", TEXT),
        ("source_dataset", TEXT),
        ("licence", TEXT),
        ("started_at", pa.float64()),
        ("times_s", NUMBERS),
        ("reward_parts", NUMBERS),
        ("run_ids", RUN_IDS),
        ("token_ids", pa.list_(pa.int32())),
        ("response_mask", pa.list_(pa.int8())),
        ("sampled_logprobs", pa.list_(pa.float64())),
        ("part_digest", TEXT),
    ]
)

STEPS = pa.schema(
    [
        ("episode_id", TEXT),
        ("step_index", pa.int32()),
        ("task_id", TEXT),
        ("checkpoint_id", TEXT),
        ("purpose", TEXT),
        ("update", pa.int32()),
        ("screenshot_sha256", TEXT),
        ("screenshot_width", pa.int32()),
        ("screenshot_height", pa.int32()),
        ("screenshot_format", TEXT),
        ("screenshot_num_bytes", pa.int64()),
        ("observation_text", TEXT),
        ("response_text", TEXT),
        ("action", TEXT),
        ("command", TEXT),
        ("policy_version", pa.int32()),
        ("prompt_num_tokens", pa.int32()),
        ("response_num_tokens", pa.int32()),
        ("model_s", pa.float64()),
        ("step_s", pa.float64()),
        ("action_type", TEXT),
        ("action_parsed", pa.bool_()),
        ("action_executed", pa.bool_()),
        ("action_error", TEXT),
        ("target_element", TEXT),
        ("fallback_used", pa.bool_()),
        ("coordinate_x", pa.int64()),
        ("coordinate_y", pa.int64()),
        ("a11y_grounded", pa.bool_()),
        ("screen_diff", pa.float64()),
        ("screen_changed", pa.bool_()),
        ("screen_hash", TEXT),
        ("a11y_delta", pa.float64()),
        ("a11y_changed", pa.bool_()),
        ("terminal_changed", pa.bool_()),
        ("part_digest", TEXT),
    ]
)

ROLLOUT_GROUPS = pa.schema(
    [
        ("group_id", TEXT),
        ("task_id", TEXT),
        ("checkpoint_id", TEXT),
        ("stage_key", TEXT),
        ("update", pa.int32()),
        ("num_episodes", pa.int32()),
        ("num_valid", pa.int32()),
        ("num_successes", pa.int32()),
        ("episode_ids", TEXTS),
        ("outcomes", TEXTS),
        ("task_rewards", pa.list_(pa.float64())),
        ("shaped_rewards", pa.list_(pa.float64())),
        ("replay_row_id", TEXT),
        ("part_digest", TEXT),
    ]
)

INJECTIONS = pa.schema(
    [
        ("injection_id", TEXT),
        ("group_id", TEXT),
        ("row_id", TEXT),
        ("task_id", TEXT),
        ("source_dataset", TEXT),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("weight", pa.float64()),
        ("kind", TEXT),
        ("strategy", TEXT),
        ("verified_reward", pa.float64()),
        ("stage_key", TEXT),
        ("update", pa.int32()),
        ("part_digest", TEXT),
    ]
)

UNION_TASKS = pa.schema(
    [
        ("task_id", TEXT),
        ("prompt", TEXT),
        ("domain", TEXT),
        ("config_domain", TEXT),
        ("instruction", TEXT),
        ("task_config", TEXT),
        ("task_config_source", TEXT),
        ("has_task_config", pa.bool_()),
        ("platform", TEXT),
    ]
)

REPLAY_BUFFER = pa.schema(
    [
        ("row_id", TEXT),
        ("task_id", TEXT),
        ("original_task_id", TEXT),
        ("source_dataset", TEXT),
        ("quality_rank", pa.int32()),
        ("reward", pa.float64()),
        ("is_reward_assumed", pa.bool_()),
        ("num_steps", pa.int32()),
        ("messages", MESSAGES),
        ("images", TEXTS),
        ("dialect", TEXT),
        ("action_types", TEXTS),
        ("licence", TEXT),
        ("source_path", TEXT),
        ("source_line", pa.int64()),
    ]
)

REJECTS = pa.schema(
    [
        ("source_dataset", TEXT),
        ("source_path", TEXT),
        ("source_line", pa.int64()),
        ("kind", TEXT),
        ("reason", TEXT),
        ("task_id", TEXT),
    ]
)

RAW_COUNTS = pa.schema(
    [
        ("source_dataset", TEXT),
        ("source_path", TEXT),
        ("licence", TEXT),
        ("revision", TEXT),
        ("sha256", TEXT),
        ("is_present", pa.bool_()),
        ("num_bytes", pa.int64()),
        ("num_records", pa.int64()),
        ("num_rejects", pa.int64()),
    ]
)

REPLAY_VERIFICATIONS = pa.schema(
    [
        ("verification_id", TEXT),
        ("row_id", TEXT),
        ("task_id", TEXT),
        ("task_digest", TEXT),
        ("outcome", TEXT),
        ("reward", pa.float64()),
        ("error", TEXT),
        ("num_steps", pa.int32()),
        ("replica_id", TEXT),
        ("provider", TEXT),
        ("image_digest", TEXT),
        ("grader_version", TEXT),
        ("started_at", pa.float64()),
        ("duration_s", pa.float64()),
        ("part_digest", TEXT),
    ]
)

CHECKPOINTS = pa.schema(
    [
        ("checkpoint_id", TEXT),
        ("stage", TEXT),
        ("parent_id", TEXT),
        ("path", TEXT),
        ("num_updates", pa.int32()),
        ("recipe_digest", TEXT),
        ("data_digest", TEXT),
        ("weights_digest", TEXT),
        ("metrics", NUMBERS),
        ("run_ids", RUN_IDS),
    ]
)

PART_TABLES: Mapping[str, pa.Schema] = {
    "episodes": EPISODES,
    "steps": STEPS,
    "rollout_groups": ROLLOUT_GROUPS,
    "injections": INJECTIONS,
    "replay_verifications": REPLAY_VERIFICATIONS,
}
"""Append-only, many writers: one folder of Parquet parts each."""

OWNED_TABLES: Mapping[str, pa.Schema] = {
    "union_tasks": UNION_TASKS,
    "replay_buffer": REPLAY_BUFFER,
    "train_tasks": UNION_TASKS,
    "rejects": REJECTS,
    "raw_counts": RAW_COUNTS,
    "checkpoints": CHECKPOINTS,
}
"""Small, one owner: one Parquet file each."""


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` with exactly the columns of `schema`: what an older writer did not know is null, what we do not know is
    left out."""
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
