"""The columns of the trajectory parts: episodes and their steps, groups and their injections, verifications.

`update` is 1 for the first update of a stage in every view. In the files of these tables it starts at 0; the views add
1 (tables/views.py)."""

import pyarrow as pa

from osworld_pipeline.columns.fields import (
    FLAG,
    FLOAT,
    INT32,
    INT64,
    NATS,
    NUM_BYTES,
    NUMBERS,
    PIXELS,
    RUN_IDS,
    SECONDS,
    SHARE,
    TEXT,
    TEXTS,
    TIME,
    TOKENS,
    UNIX_TIME,
    UTC,
    column,
)

EPISODES = pa.schema(
    [
        column(
            "episode_id",
            TEXT,
            "Deterministic id from stage, update, group, sample and attempt: a rerun replaces the row.",
        ),
        column("task_id", TEXT, "The task that was attempted."),
        column("task_digest", TEXT, "SHA-256 of the task's config."),
        column(
            "purpose",
            TEXT,
            "train, evaluate, demonstrate, import; superseded: rolled out for updates that a resumed stage made again.",
        ),
        column(
            "checkpoint_id",
            TEXT,
            "Checkpoint of its policy: in training the one being trained, else the one that played.",
        ),
        column("stage_key", TEXT, "Key of the stage run: the checkpoint being trained, or the evaluation's key."),
        column(
            "update",
            INT32,
            "The update that its group trains, from 1; -1 outside training. `-u0007` in an id is the number of "
            "previous updates: update 8.",
        ),
        column("group_id", TEXT, "Its rollout group; NULL outside training."),
        column("seed", INT64, "Distinguishes attempts at one task under one policy."),
        column("attempt", INT32, "0, increased by one for each attempt after a fault."),
        column(
            "outcome", TEXT, "success, failure, truncated, tampering, timeout, or a fault: env, policy or grader_fault."
        ),
        column("error", TEXT, "One sentence if the outcome is a fault, a timeout or tampering."),
        column("is_valid", FLAG, "No fault and no timeout: the episode counts in a denominator."),
        column("is_success", FLAG, "The outcome is success."),
        column("task_reward", FLOAT, "The grader's score; NULL if there is none. A fault is NULL, not 0.", SHARE),
        column("partial_reward", FLOAT, "Weighted sum of the partial terms.", SHARE),
        column("penalty", FLOAT, "Sum of the penalties.", SHARE),
        column("shaped_reward", FLOAT, "Reward used for training: task plus partial less penalties, clamped.", SHARE),
        column("num_steps", INT32, "Number of its rows in `steps`."),
        column("max_turns", INT32, "Its step budget; 0 if unknown."),
        column("engine", TEXT, "The policy engine: transformers, sglang, ..."),
        column("temperature", FLOAT, "Sampling temperature."),
        column("top_p", FLOAT, "Top-p of the sampling.", SHARE),
        column("max_new_tokens", INT32, "Limit of one response.", TOKENS),
        column("stop", TEXTS, "Stop strings: a response ends after the first of these."),
        column("sampling_seed", INT64, "Seed of the sampling."),
        column("replica_id", TEXT, "The desktop it ran on."),
        column("provider", TEXT, "Provider of the desktop: local, qemu, ..."),
        column("image_digest", TEXT, "Digest of the desktop's image."),
        column("grader_version", TEXT, "Version of the evaluators."),
        column("processor_digest", TEXT, "Digest of tokenizer, image processor and chat template."),
        column("source_dataset", TEXT, "Name of the import, for an imported episode."),
        column("licence", TEXT, "Licence of an imported episode."),
        column("started_at", FLOAT, "Start time.", UNIX_TIME),
        column("times_s", NUMBERS, "By part: reset, model, step, evaluate, total.", SECONDS),
        column("reward_parts", NUMBERS, "The terms of partial_reward and of penalty, by name.", SHARE),
        column("run_ids", RUN_IDS, "Runs in Dagster and MLflow, by system."),
        column("context_mode", TEXT, "append: one growing sequence; window: each turn is a sequence; NULL: append."),
        column("earlier_faults", TEXTS, "Faults of the earlier attempts."),
        column("token_ids", pa.list_(pa.int32()), "Its sequences, concatenated, with placeholders expanded."),
        column("response_mask", pa.list_(pa.int8()), "1 if the policy sampled the token; aligned with token_ids."),
        column(
            "sampled_logprobs",
            pa.list_(pa.float64()),
            "Log-probability of each token in softmax(logits / logprob_temperature) without the banned ids; "
            "0.0 outside the mask.",
            NATS,
        ),
        column("logprob_temperature", FLOAT, "Temperature of sampled_logprobs; NULL: 1, including the banned ids."),
        column(
            "policy_versions",
            pa.list_(pa.int32()),
            "Number of updates of the weights that sampled each token; -1 outside the mask.",
        ),
        column(
            "sequence_lengths", pa.list_(pa.int32()), "Lengths at which token_ids is split; NULL: one sequence.", TOKENS
        ),
        column("sequence_image_counts", pa.list_(pa.int32()), "Images of each sequence."),
        column("image_steps", pa.list_(pa.int32()), "Steps whose screenshots are in the sequences, concatenated."),
        column("stage", TEXT, "Stage of checkpoint_id: gspo_phase1, sft, ...; NULL before version 6."),
        column(
            "weights_id",
            TEXT,
            "The weights at its start: a checkpoint; in training the parent, after 7 updates <checkpoint_id>-u0007.",
        ),
        column("suite", TEXT, "Suite of an evaluation: the built-in suite of its tasks, osworld, or a user's suite."),
        column("suite_name", TEXT, "Suite of an evaluation as commands name it: heldout, osworld-chrome, ..."),
        column("domain", TEXT, "Domain of the task; with task_id its identity; NULL before version 6."),
        column(
            "weights_update",
            INT32,
            "Number of updates of the training stage that produced these weights; NULL outside training.",
        ),
        column(
            "advantage",
            FLOAT,
            "Advantage in its update; 0 if its group had no signal; NULL outside training, for faults and in "
            "dropped groups.",
        ),
        column(
            "prompt_tokens",
            INT64,
            "Prompt tokens read over all turns, counted at every turn; NULL if the engine reports none.",
            TOKENS,
        ),
        column("response_tokens", INT64, "Tokens sampled over all turns; NULL if the engine reports none.", TOKENS),
        column("image_tokens", INT64, "Image placeholders in its sequences; NULL without sequences.", TOKENS),
        column("num_images", INT32, "Screenshots in its sequences; NULL without sequences."),
        column("mean_logprob", FLOAT, "Mean of sampled_logprobs over the sampled tokens; NULL without any.", NATS),
        column("started_utc", TIME, "started_at as a timestamp.", UTC),
        column("ended_utc", TIME, "When its desktop was released.", UTC),
        column(
            "parity_num_tokens",
            INT64,
            "Tokens of the parity probe of its engine, before the first episode of its session; NULL: not probed, "
            "probed by rollout actors on sglang servers (see `updates`), or before version 8.",
            TOKENS,
        ),
        column(
            "parity_mean_diff",
            FLOAT,
            "Mean difference of the log-probabilities of those tokens between engine and checkpoint.",
            NATS,
        ),
        column("parity_max_diff", FLOAT, "The largest of these differences.", NATS),
    ]
)

STEPS = pa.schema(
    [
        column("episode_id", TEXT, "Its episode."),
        column("step_index", INT32, "From 0, in order."),
        column("task_id", TEXT, "As in the episode."),
        column("checkpoint_id", TEXT, "As in the episode; for training episodes before version 6 the stage's parent."),
        column("purpose", TEXT, "As in the episode."),
        column("update", INT32, "As in the episode."),
        column("screenshot_sha256", TEXT, "The blob with the exact bytes that the model saw."),
        column("screenshot_width", INT32, "Width of the screenshot that the model saw.", PIXELS),
        column("screenshot_height", INT32, "Height of the screenshot that the model saw.", PIXELS),
        column("screenshot_format", TEXT, "png, jpeg or webp."),
        column("screenshot_num_bytes", INT64, "Size of the blob.", NUM_BYTES),
        column("observation_text", TEXT, "Text that the model read with the screenshot."),
        column("response_text", TEXT, "The model's response."),
        column("action", TEXT, "The parsed arguments as canonical JSON; NULL if parsing failed."),
        column("command", TEXT, "Command sent to the desktop: a pyautogui call, or WAIT, DONE, FAIL."),
        column(
            "policy_version",
            INT32,
            "Number of updates of the weights that sampled this turn; on-policy it is `update` - 1.",
        ),
        column("prompt_num_tokens", INT32, "Prompt tokens of this turn.", TOKENS),
        column("response_num_tokens", INT32, "Response tokens of this turn.", TOKENS),
        column("model_s", FLOAT, "Time of the engine.", SECONDS),
        column("step_s", FLOAT, "Time of the desktop.", SECONDS),
        column("action_type", TEXT, "left_click, type, key, scroll, wait, terminate, unknown, ..."),
        column("action_parsed", FLAG, "The response contained an action."),
        column("action_executed", FLAG, "The desktop executed the action."),
        column("action_error", TEXT, "Why the action was not executed."),
        column("target_element", TEXT, "Target element that the action named."),
        column("fallback_used", FLAG, "Only the fallback parser could parse the response."),
        column("coordinate_x", INT64, "Horizontal position of the action; clamped to 64 bits.", PIXELS),
        column("coordinate_y", INT64, "Vertical position of the action; clamped to 64 bits.", PIXELS),
        column("a11y_grounded", FLAG, "The target was in the accessibility tree before the action."),
        column("screen_diff", FLOAT, "Mean absolute difference of 64x64 greyscale images.", SHARE),
        column("screen_changed", FLAG, "screen_diff reached the threshold."),
        column("screen_hash", TEXT, "Hash of the small greyscale image."),
        column("a11y_delta", FLOAT, "Relative change of the tree's length.", SHARE),
        column("a11y_changed", FLAG, "The accessibility tree changed."),
        column("terminal_changed", FLAG, "The terminal's text changed."),
    ]
)

ROLLOUT_GROUPS = pa.schema(
    [
        column("group_id", TEXT, "Sibling episodes of one task in one update."),
        column("task_id", TEXT, "Their task."),
        column("checkpoint_id", TEXT, "Checkpoint of the episodes: the one being trained."),
        column("stage_key", TEXT, "The checkpoint being trained."),
        column("update", INT32, "The update that they train, from 1."),
        column("num_episodes", INT32, "Siblings, including faults."),
        column("num_valid", INT32, "Valid siblings."),
        column("num_successes", INT32, "Siblings that succeeded."),
        column("episode_ids", TEXTS, "The siblings."),
        column("outcomes", TEXTS, "Aligned with episode_ids."),
        column("task_rewards", pa.list_(pa.float64()), "Aligned with episode_ids; NULL for a fault.", SHARE),
        column("shaped_rewards", pa.list_(pa.float64()), "Aligned with episode_ids; NULL for a fault.", SHARE),
        column("replay_row_id", TEXT, "The row of `replay` that joined; NULL if none did."),
        column(
            "fate",
            TEXT,
            "trained, zero_variance, too_few_valid, stale, held, not_kept or superseded; NULL in groups older than "
            "this column.",
        ),
        column("reason", TEXT, "Why it was not trained on, in one sentence."),
        column(
            "oldest_policy_version",
            INT32,
            "Number of updates of the oldest weights that sampled one of its turns.",
        ),
    ]
)

INJECTIONS = pa.schema(
    [
        column("injection_id", TEXT, "One replay row in one group."),
        column("group_id", TEXT, "The group that it joined."),
        column("row_id", TEXT, "The row of `replay`."),
        column("task_id", TEXT, "Task of both."),
        column("source_dataset", TEXT, "Source of the row; online for an episode."),
        column("reward", FLOAT, "The reward with which it counted.", SHARE),
        column("advantage", FLOAT, "The advantage with which it counted, in the group's standard deviations."),
        column("weight", FLOAT, "Factor of its loss."),
        column("kind", TEXT, "demonstration or episode."),
        column("strategy", TEXT, "Strategy that chose it among its task's rows."),
        column("verified_reward", FLOAT, "Best reward of re-executing it until then; NULL if not tried.", SHARE),
        column("stage_key", TEXT, "As in the group."),
        column("update", INT32, "As in the group."),
        column("source_path", TEXT, "The file of the row at that time; NULL for an episode."),
        column("source_line", INT64, "The line in that file, from 1."),
        column("source_sha256", TEXT, "SHA-256 of the bytes of that line."),
        column("licence", TEXT, "Licence of the source."),
    ]
)

REPLAY_VERIFICATIONS = pa.schema(
    [
        column("verification_id", TEXT, "One re-execution: deterministic id from row and attempt."),
        column("row_id", TEXT, "The row of `replay`."),
        column("task_id", TEXT, "Its task."),
        column("task_digest", TEXT, "SHA-256 of the task's config."),
        column("outcome", TEXT, "success or failure by the grader's score; else the fault."),
        column("reward", FLOAT, "The grader's score; NULL if there is none.", SHARE),
        column("error", TEXT, "One sentence if the outcome is a fault."),
        column("num_steps", INT32, "Actions executed."),
        column("replica_id", TEXT, "The desktop it ran on."),
        column("provider", TEXT, "Provider of the desktop."),
        column("image_digest", TEXT, "Digest of the desktop's image."),
        column("grader_version", TEXT, "Version of the evaluators."),
        column("started_at", FLOAT, "Start time.", UNIX_TIME),
        column("duration_s", FLOAT, "Duration.", SECONDS),
    ]
)

UPDATES = pa.schema(
    [
        column("stage_key", TEXT, "The checkpoint being trained."),
        column("update", INT32, "Number of the update in its stage, from 1."),
        column("stage", TEXT, "sft, flywheel, gspo_phase1 or gspo_phase2."),
        column("checkpoint_id", TEXT, "Equal to stage_key, as in `episodes`."),
        column("parent_id", TEXT, "The checkpoint that the stage started from."),
        column(
            "weights_id", TEXT, "The weights after it: after update 7 <stage_key>-u0007, whether or not they were kept."
        ),
        column("loss", FLOAT, "Loss, a mean over its optimiser steps."),
        column("kl", FLOAT, "KL divergence from the stage's parent; NULL in supervised stages.", NATS),
        column("grad_norm", FLOAT, "Gradient norm before clipping, a mean over its optimiser steps."),
        column("entropy", FLOAT, "Entropy of the policy, a mean over the sampled tokens.", NATS),
        column("clipped_share", FLOAT, "Share of the ratios that the loss clips.", SHARE),
        column("ratio_mean", FLOAT, "Mean ratio of the policy to the one before the update."),
        column(
            "effective_share", FLOAT, "Effective sample size by the importance weights, as a share of the batch.", SHARE
        ),
        column("learning_rate", FLOAT, "Learning rate of its optimiser steps."),
        column("success_rate", FLOAT, "Success rate of the valid episodes rolled out for it.", SHARE),
        column("task_reward", FLOAT, "Mean raw reward of the valid episodes.", SHARE),
        column("shaped_reward", FLOAT, "Mean shaped reward of the valid episodes.", SHARE),
        column("num_episodes", INT32, "Episodes rolled out for it, including faults."),
        column("num_faults", INT32, "Faults and timeouts among these."),
        column("fault_share", FLOAT, "num_faults / num_episodes.", SHARE),
        column(
            "staleness_mean", FLOAT, "Updates between the weights that sampled a token and those before this update."
        ),
        column("staleness_max", FLOAT, "The same for the oldest token."),
        column("is_held", FLAG, "No optimiser step was made, although there was data to train on."),
        column("held_reason", TEXT, "faults or staleness; NULL if it was not held."),
        column("num_held_tries", INT32, "Earlier tries of this update that were held."),
        column("is_skipped", FLAG, "No optimiser step was made, because no episode had a signal."),
        column("num_tokens", INT64, "Tokens trained on, including prompts.", TOKENS),
        column("num_response_tokens", INT64, "Response tokens trained on.", TOKENS),
        column("tokens_per_s", FLOAT, "num_tokens per second of the trainer's time."),
        column("rollout_s", FLOAT, "Time waiting for rollouts.", SECONDS),
        column("score_s", FLOAT, "Time of the log-probabilities before the update.", SECONDS),
        column("forward_s", FLOAT, "Time of forward and backward passes.", SECONDS),
        column("optimizer_s", FLOAT, "Time of optimiser steps.", SECONDS),
        column("update_s", FLOAT, "Time of the trainer, from the batch to the new weights.", SECONDS),
        column("started_utc", TIME, "When it started to collect its batch.", UTC),
        column("ended_utc", TIME, "When its weights were ready.", UTC),
        column("metrics", NUMBERS, "All figures of the update, by their names in MLflow."),
        column("run_ids", RUN_IDS, "Runs in Dagster and MLflow, by system."),
    ]
)

STAGE_ATTEMPTS = pa.schema(
    [
        column("attempt_id", TEXT, "One start of a stage's program."),
        column("stage_key", TEXT, "The checkpoint being trained."),
        column("stage", TEXT, "sft, flywheel, gspo_phase1 or gspo_phase2."),
        column("parent_id", TEXT, "The checkpoint that the stage started from."),
        column("first_update", INT32, "The first update of this attempt, from 1; above 1 the stage was resumed."),
        column("num_planned", INT32, "Updates of the whole stage."),
        column(
            "status",
            TEXT,
            "running, finished, stopped (by its budget, a signal, or lack of data) or failed. A killed program "
            "leaves running.",
        ),
        column("error", TEXT, "Why it stopped or failed, in one sentence."),
        column("host", TEXT, "Host name."),
        column("process_id", INT64, "Process id on the host."),
        column("started_utc", TIME, "When the program started.", UTC),
        column("ended_utc", TIME, "When it ended; NULL while it runs.", UTC),
        column("run_ids", RUN_IDS, "Runs in Dagster and MLflow, by system."),
    ]
)

BOOKKEEPING = pa.schema(
    [
        column("part", TEXT, "The part that contains the row."),
        column(
            "part_version", INT64, "Orders the versions of a part: milliseconds << 20, plus the compaction's number."
        ),
        column("part_digest", TEXT, "Links detail rows to head rows in files from before part_version."),
    ]
)
"""In the files, after a table's own columns; views do not show them."""
