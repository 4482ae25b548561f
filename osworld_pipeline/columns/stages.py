"""The columns and rows of a training stage's updates and attempts."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from osworld_pipeline.columns.fields import FLAG, FLOAT, INT32, INT64, TEXT, column
from osworld_pipeline.columns.records import Row, columns_of, row_of
from osworld_pipeline.domain.hold import HoldReason
from osworld_pipeline.domain.stage_record import StageAttempt, UpdateRecord
from osworld_pipeline.domain.stored import NATS, SECONDS, SHARE, TOKENS

_METRICS: Sequence[pa.Field] = (
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
    column("staleness_mean", FLOAT, "Updates between the weights that sampled a token and those before this update."),
    column("staleness_max", FLOAT, "The same for the oldest token."),
    column("is_held", FLAG, "No optimiser step was made, although there was data to train on."),
    column("num_held_tries", INT32, "Earlier tries of this update that were held."),
    column("is_skipped", FLAG, "No optimiser step was made, because no episode had a signal."),
    column("num_tokens", INT64, "Tokens trained on, including prompts.", TOKENS),
    column("num_response_tokens", INT64, "Response tokens trained on.", TOKENS),
    column("tokens_per_s", FLOAT, "num_tokens per second of the trainer's time."),
    column("handover_s", FLOAT, "Time until the engine had the weights of this update.", SECONDS),
    column("rollout_s", FLOAT, "Time waiting for rollouts.", SECONDS),
    column("score_s", FLOAT, "Time of the log-probabilities before the update.", SECONDS),
    column(
        "canary_wait_s", FLOAT, "Time after scoring until the engine had the weights and had sampled a canary.", SECONDS
    ),
    column("forward_s", FLOAT, "Time of forward and backward passes.", SECONDS),
    column("optimizer_s", FLOAT, "Time of optimiser steps.", SECONDS),
    column("update_s", FLOAT, "Time of the trainer, from the batch to the new weights.", SECONDS),
)
"""The columns with the value of the metric of their name."""

UPDATES = pa.schema(
    [
        *columns_of(UpdateRecord),
        column("checkpoint_id", TEXT, "Equal to stage_key, as in `episodes`."),
        column(
            "weights_id", TEXT, "The weights after it: after update 7 <stage_key>-u0007, whether or not they were kept."
        ),
        *_METRICS,
        column("held_reason", TEXT, "faults or staleness; NULL if it was not held."),
    ]
)
STAGE_ATTEMPTS = pa.schema(columns_of(StageAttempt))


def update_row(record: UpdateRecord) -> Row:
    metrics = record.metrics
    reason = next((reason for reason in HoldReason if metrics.get(f"is_held_by_{reason}")), None)
    return row_of(record) | {
        "checkpoint_id": record.stage.stage_key,
        "weights_id": record.weights_id,
        **{field.name: _typed(metrics.get(field.name), field.type) for field in _METRICS},
        "held_reason": str(reason) if reason else None,
    }


def attempt_row(attempt: StageAttempt) -> Row:
    return row_of(attempt)


def _typed(value: float | None, kind: pa.DataType) -> Any:
    if value is None or kind == FLOAT:
        return value
    return bool(value) if kind == FLAG else int(value)
