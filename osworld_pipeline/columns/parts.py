"""The columns of the trajectory parts: episodes and their steps, groups and their injections, verifications.

`update` is 1 for the first update of a stage in every view. In the files of these tables it is one less, as it always
was, and the views add it (tables/views.py)."""

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
        column("episode_id", TEXT, "Deterministic (stage, update, group, sample, attempt): a rerun replaces."),
        column("task_id", TEXT, "The task that was attempted."),
        column("task_digest", TEXT, "SHA-256 of the task's config."),
        column(
            "purpose",
            TEXT,
            "train, evaluate, demonstrate, import; superseded: rolled out for updates that a resumed stage made again.",
        ),
        column(
            "checkpoint_id", TEXT, "Of its policy: in training the checkpoint being trained, else the one that played."
        ),
        column("stage_key", TEXT, "Key of the stage run: the checkpoint being trained, or the evaluation's key."),
        column(
            "update",
            INT32,
            "The update that its group trains, from 1; -1 outside training. `-u0007` in an id counts the updates "
            "before: it is of update 8.",
        ),
        column("group_id", TEXT, "Its rollout group; NULL outside training."),
        column("seed", INT64, "Tells apart attempts at one task under one policy."),
        column("attempt", INT32, "0, and one more for each attempt after a fault."),
        column(
            "outcome", TEXT, "success, failure, truncated, tampering, timeout, or a fault: env, policy or grader_fault."
        ),
        column("error", TEXT, "One sentence where the outcome is a fault, a timeout or tampering."),
        column("is_valid", FLAG, "No fault and no timeout: it counts in a denominator."),
        column("is_success", FLAG, "The outcome is success."),
        column("task_reward", FLOAT, "The grader's score; NULL where there is none, never 0 for a fault.", SHARE),
        column("partial_reward", FLOAT, "Weighted sum of the partial terms.", SHARE),
        column("penalty", FLOAT, "Sum of the penalties.", SHARE),
        column("shaped_reward", FLOAT, "What trains: task plus partial less penalties, clamped.", SHARE),
        column("num_steps", INT32, "Rows of `steps` it has."),
        column("max_turns", INT32, "Its step budget; 0 where it is unknown."),
        column("engine", TEXT, "The policy engine: transformers, sglang, ..."),
        column("temperature", FLOAT, "Of the sampling."),
        column("top_p", FLOAT, "Of the sampling.", SHARE),
        column("max_new_tokens", INT32, "Limit of one response.", TOKENS),
        column("stop", TEXTS, "A response ends after the first of these."),
        column("sampling_seed", INT64, "Of the sampling."),
        column("replica_id", TEXT, "The desktop it ran on."),
        column("provider", TEXT, "What made the desktop: local, qemu, ..."),
        column("image_digest", TEXT, "Of the desktop's image."),
        column("grader_version", TEXT, "Of the evaluators."),
        column("processor_digest", TEXT, "Of tokenizer, image processor and chat template."),
        column("source_dataset", TEXT, "Of an imported episode: the import's name."),
        column("licence", TEXT, "Of an imported episode."),
        column("started_at", FLOAT, "When it began.", UNIX_TIME),
        column("times_s", NUMBERS, "By part: reset, model, step, evaluate, total.", SECONDS),
        column("reward_parts", NUMBERS, "The terms of partial_reward and of penalty, by name.", SHARE),
        column("run_ids", RUN_IDS, "Of Dagster and MLflow, by system."),
        column("context_mode", TEXT, "append: one growing sequence; window: each turn is a sequence; NULL: append."),
        column("earlier_faults", TEXTS, "How the attempts before this one ended."),
        column("token_ids", pa.list_(pa.int32()), "Its sequences, one after the other, placeholders expanded."),
        column("response_mask", pa.list_(pa.int8()), "1 where the policy sampled the token; aligned with token_ids."),
        column(
            "sampled_logprobs",
            pa.list_(pa.float64()),
            "Of each token in softmax(logits / logprob_temperature) without the banned ids; 0.0 outside the mask.",
            NATS,
        ),
        column("logprob_temperature", FLOAT, "Of sampled_logprobs; NULL: 1, with the banned ids counted."),
        column(
            "policy_versions",
            pa.list_(pa.int32()),
            "Number of updates that produced what sampled each token; -1 outside the mask.",
        ),
        column("sequence_lengths", pa.list_(pa.int32()), "Where token_ids is to be cut; NULL: one sequence.", TOKENS),
        column("sequence_image_counts", pa.list_(pa.int32()), "Images of each sequence."),
        column("image_steps", pa.list_(pa.int32()), "Whose screenshots they are, one sequence after the other."),
        column("stage", TEXT, "Of checkpoint_id: gspo_phase1, sft, ...; NULL before version 6."),
        column(
            "weights_id",
            TEXT,
            "The weights that began it: a checkpoint; in training the parent, after 7 updates <checkpoint_id>-u0007.",
        ),
        column("suite", TEXT, "Of an evaluation: the built-in suite of its tasks, osworld, or a suite of the user's."),
        column("suite_name", TEXT, "Of an evaluation: its suite as commands name it: heldout, osworld-chrome, ..."),
        column("domain", TEXT, "Of the task: with task_id its identity; NULL before version 6."),
        column(
            "weights_update",
            INT32,
            "Number of updates of the training stage that produced these weights; NULL outside training.",
        ),
        column(
            "advantage",
            FLOAT,
            "As its update trained it; 0 where its group had no signal; NULL outside training, for faults and in "
            "dropped groups.",
        ),
        column(
            "prompt_tokens",
            INT64,
            "Read over all turns, a prompt each time; NULL where the engine reports none.",
            TOKENS,
        ),
        column("response_tokens", INT64, "Sampled over all turns; NULL where the engine reports none.", TOKENS),
        column("image_tokens", INT64, "Image placeholders in its sequences; NULL without sequences.", TOKENS),
        column("num_images", INT32, "Screenshots in its sequences; NULL without sequences."),
        column("mean_logprob", FLOAT, "Mean of sampled_logprobs over the sampled tokens; NULL without any.", NATS),
        column("started_utc", TIME, "started_at as a timestamp.", UTC),
        column("ended_utc", TIME, "When its desktop was given back.", UTC),
        column(
            "parity_num_tokens",
            INT64,
            "Of the parity probe of its engine, before the first episode of its session; NULL: not probed, by rollout "
            "actors on sglang servers (`updates` has it), or before version 8.",
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
        column("step_index", INT32, "From 0, in the order played."),
        column("task_id", TEXT, "Of the episode."),
        column("checkpoint_id", TEXT, "Of the episode; of one in training before version 6 its stage's parent."),
        column("purpose", TEXT, "Of the episode."),
        column("update", INT32, "Of the episode."),
        column("screenshot_sha256", TEXT, "The blob with the exact bytes that the model saw."),
        column("screenshot_width", INT32, "Of what the model saw.", PIXELS),
        column("screenshot_height", INT32, "Of what the model saw.", PIXELS),
        column("screenshot_format", TEXT, "png, jpeg or webp."),
        column("screenshot_num_bytes", INT64, "Size of the blob.", NUM_BYTES),
        column("observation_text", TEXT, "What the model read beside the screenshot."),
        column("response_text", TEXT, "What the model said."),
        column("action", TEXT, "The parsed arguments as canonical JSON; NULL where nothing could be parsed."),
        column("command", TEXT, "What went to the desktop: a pyautogui call, or WAIT, DONE, FAIL."),
        column(
            "policy_version",
            INT32,
            "Number of updates that produced the weights that sampled this turn: on-policy it is `update` - 1.",
        ),
        column("prompt_num_tokens", INT32, "Of this turn's prompt.", TOKENS),
        column("response_num_tokens", INT32, "Of this turn's response.", TOKENS),
        column("model_s", FLOAT, "Time the engine took.", SECONDS),
        column("step_s", FLOAT, "Time the desktop took.", SECONDS),
        column("action_type", TEXT, "left_click, type, key, scroll, wait, terminate, unknown, ..."),
        column("action_parsed", FLAG, "The response held an action."),
        column("action_executed", FLAG, "The desktop carried it out."),
        column("action_error", TEXT, "Why it did not."),
        column("target_element", TEXT, "What the action named."),
        column("fallback_used", FLAG, "Only the fallback parser understood it."),
        column("coordinate_x", INT64, "Where the action pointed; clamped to 64 bits.", PIXELS),
        column("coordinate_y", INT64, "Where the action pointed; clamped to 64 bits.", PIXELS),
        column("a11y_grounded", FLAG, "The target was named in the accessibility tree before."),
        column("screen_diff", FLOAT, "Mean absolute difference of 64x64 greyscale pictures.", SHARE),
        column("screen_changed", FLAG, "screen_diff reached the threshold."),
        column("screen_hash", TEXT, "Of the small greyscale picture."),
        column("a11y_delta", FLOAT, "Relative change of the tree's length.", SHARE),
        column("a11y_changed", FLAG, "The accessibility tree changed."),
        column("terminal_changed", FLAG, "The terminal's text changed."),
    ]
)

ROLLOUT_GROUPS = pa.schema(
    [
        column("group_id", TEXT, "Sibling episodes of one task in one update."),
        column("task_id", TEXT, "Their task."),
        column("checkpoint_id", TEXT, "Of the episodes: the checkpoint being trained."),
        column("stage_key", TEXT, "The checkpoint being trained."),
        column("update", INT32, "The update that they train, from 1."),
        column("num_episodes", INT32, "Siblings, faults included."),
        column("num_valid", INT32, "Siblings that count."),
        column("num_successes", INT32, "Siblings that succeeded."),
        column("episode_ids", TEXTS, "The siblings."),
        column("outcomes", TEXTS, "Aligned with episode_ids."),
        column("task_rewards", pa.list_(pa.float64()), "Aligned with episode_ids; NULL for a fault.", SHARE),
        column("shaped_rewards", pa.list_(pa.float64()), "Aligned with episode_ids; NULL for a fault.", SHARE),
        column("replay_row_id", TEXT, "The row of `replay` that joined; NULL where none did."),
        column(
            "fate",
            TEXT,
            "trained, zero_variance, too_few_valid, stale, held, not_kept or superseded; NULL in groups older than "
            "this column.",
        ),
        column("reason", TEXT, "One sentence where it was not trained on."),
        column(
            "oldest_policy_version",
            INT32,
            "Number of updates that produced the oldest weights that sampled a turn of it.",
        ),
    ]
)

INJECTIONS = pa.schema(
    [
        column("injection_id", TEXT, "One replay row in one group."),
        column("group_id", TEXT, "The group that it joined."),
        column("row_id", TEXT, "The row of `replay`."),
        column("task_id", TEXT, "Of both."),
        column("source_dataset", TEXT, "Where the row came from; online for an episode."),
        column("reward", FLOAT, "It counted with this reward.", SHARE),
        column("advantage", FLOAT, "And with this advantage, in the group's standard deviations."),
        column("weight", FLOAT, "Factor on its loss."),
        column("kind", TEXT, "demonstration or episode."),
        column("strategy", TEXT, "How it was chosen among its task's rows."),
        column("verified_reward", FLOAT, "What re-executing it had earned by then; NULL where untried.", SHARE),
        column("stage_key", TEXT, "Of the group."),
        column("update", INT32, "Of the group."),
        column("source_path", TEXT, "The file that the row came from, as it was then; NULL for an episode."),
        column("source_line", INT64, "The line there, from 1."),
        column("source_sha256", TEXT, "Of the bytes of that line."),
        column("licence", TEXT, "Of the source."),
    ]
)

REPLAY_VERIFICATIONS = pa.schema(
    [
        column("verification_id", TEXT, "One re-execution: deterministic (row, attempt)."),
        column("row_id", TEXT, "The row of `replay`."),
        column("task_id", TEXT, "Its task."),
        column("task_digest", TEXT, "SHA-256 of the task's config."),
        column("outcome", TEXT, "success or failure by the grader's score; else what fault."),
        column("reward", FLOAT, "The grader's score; NULL where there is none.", SHARE),
        column("error", TEXT, "One sentence where it is a fault."),
        column("num_steps", INT32, "Actions carried out."),
        column("replica_id", TEXT, "The desktop it ran on."),
        column("provider", TEXT, "What made the desktop."),
        column("image_digest", TEXT, "Of the desktop's image."),
        column("grader_version", TEXT, "Of the evaluators."),
        column("started_at", FLOAT, "When it began.", UNIX_TIME),
        column("duration_s", FLOAT, "How long it took.", SECONDS),
    ]
)

UPDATES = pa.schema(
    [
        column("stage_key", TEXT, "The checkpoint being trained."),
        column("update", INT32, "Of the stage, from 1."),
        column("stage", TEXT, "sft, flywheel, gspo_phase1 or gspo_phase2."),
        column("checkpoint_id", TEXT, "Equal to stage_key, as in `episodes`."),
        column("parent_id", TEXT, "The checkpoint that the stage started from."),
        column(
            "weights_id", TEXT, "The weights after it: after update 7 <stage_key>-u0007, whether or not it was kept."
        ),
        column("loss", FLOAT, "Of the update, a mean over its optimiser steps."),
        column("kl", FLOAT, "To the stage's parent; NULL in supervised stages.", NATS),
        column("grad_norm", FLOAT, "Before clipping, a mean over its optimiser steps."),
        column("entropy", FLOAT, "Of the policy, a mean over the sampled tokens.", NATS),
        column("clipped_share", FLOAT, "Of the ratios, those that the loss clips.", SHARE),
        column("ratio_mean", FLOAT, "Mean ratio of the policy to the one before the update."),
        column(
            "effective_share", FLOAT, "Effective sample size by the importance weights, as a share of the batch.", SHARE
        ),
        column("learning_rate", FLOAT, "Of its optimiser steps."),
        column("success_rate", FLOAT, "Of the valid episodes rolled out for it.", SHARE),
        column("task_reward", FLOAT, "Mean raw reward of the valid episodes.", SHARE),
        column("shaped_reward", FLOAT, "Mean shaped reward of the valid episodes.", SHARE),
        column("num_episodes", INT32, "Rolled out for it, faults included."),
        column("num_faults", INT32, "Of these, faults and timeouts."),
        column("fault_share", FLOAT, "num_faults / num_episodes.", SHARE),
        column(
            "staleness_mean", FLOAT, "Updates between the weights that sampled a token and those before this update."
        ),
        column("staleness_max", FLOAT, "The same, of the oldest token."),
        column("is_held", FLAG, "No optimiser step was made, although there was something to train on."),
        column("held_reason", TEXT, "faults or staleness; NULL where it was not held."),
        column("num_held_tries", INT32, "Tries of this update that were held before."),
        column("is_skipped", FLAG, "No optimiser step was made, for no episode had a signal."),
        column("num_tokens", INT64, "Trained on, prompts included.", TOKENS),
        column("num_response_tokens", INT64, "Trained on.", TOKENS),
        column("tokens_per_s", FLOAT, "num_tokens a second of the trainer's time."),
        column("rollout_s", FLOAT, "Waiting for rollouts.", SECONDS),
        column("score_s", FLOAT, "Log-probabilities before the update.", SECONDS),
        column("forward_s", FLOAT, "Forward and backward passes.", SECONDS),
        column("optimizer_s", FLOAT, "Optimiser steps.", SECONDS),
        column("update_s", FLOAT, "The trainer's part, from the batch to the new weights.", SECONDS),
        column("started_utc", TIME, "When it began to collect its batch.", UTC),
        column("ended_utc", TIME, "When its weights were there.", UTC),
        column("metrics", NUMBERS, "All figures of the update, under the names that MLflow has."),
        column("run_ids", RUN_IDS, "Of Dagster and MLflow, by system."),
    ]
)

STAGE_ATTEMPTS = pa.schema(
    [
        column("attempt_id", TEXT, "One start of a stage's program."),
        column("stage_key", TEXT, "The checkpoint being trained."),
        column("stage", TEXT, "sft, flywheel, gspo_phase1 or gspo_phase2."),
        column("parent_id", TEXT, "The checkpoint that the stage started from."),
        column("first_update", INT32, "The first update of this attempt, from 1: above 1 it was resumed."),
        column("num_planned", INT32, "Updates of the whole stage."),
        column(
            "status",
            TEXT,
            "running, finished, stopped (by its budget, a signal, or nothing to train on) or failed. A killed program "
            "leaves running.",
        ),
        column("error", TEXT, "Why it stopped or failed, in a sentence."),
        column("host", TEXT, "The machine."),
        column("process_id", INT64, "There."),
        column("started_utc", TIME, "When the program began.", UTC),
        column("ended_utc", TIME, "When it ended; NULL while it runs.", UTC),
        column("run_ids", RUN_IDS, "Of Dagster and MLflow, by system."),
    ]
)

BOOKKEEPING = pa.schema(
    [
        column("part", TEXT, "The part that the row was written in."),
        column(
            "part_version", INT64, "Orders the writings of a part: milliseconds << 20, plus the compaction's number."
        ),
        column("part_digest", TEXT, "Ties detail rows to head rows in files from before part_version."),
    ]
)
"""In the files, after a table's own columns; no view shows them."""
