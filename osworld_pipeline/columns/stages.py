"""The columns and rows of a training stage's updates and attempts."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from osworld_pipeline.columns.fields import FLAG, FLOAT, INT32, INT64, TEXT, column
from osworld_pipeline.columns.records import Row, columns_of, row_of
from osworld_pipeline.domain.hold import HoldReason
from osworld_pipeline.domain.stage_record import StageAttempt, UpdateRecord
from osworld_pipeline.domain.stored import NATS, SECONDS, SHARE, TOKENS


def _metric(name: str, kind: pa.DataType, doc: str, unit: str = "", *, of: str = "") -> tuple[pa.Field, str]:
    """A column, and the metric with its value; `of`: the metric's name, if it differs."""
    return column(name, kind, doc, unit), of or name


_METRICS: Sequence[tuple[pa.Field, str]] = (
    _metric("loss", FLOAT, "Loss, a mean over its optimiser steps."),
    _metric("kl", FLOAT, "KL divergence from the stage's parent; NULL in supervised stages.", NATS),
    _metric("grad_norm", FLOAT, "Gradient norm before clipping, a mean over its optimiser steps."),
    _metric("entropy", FLOAT, "Entropy of the policy, a mean over the sampled tokens.", NATS),
    _metric("clipped_share", FLOAT, "Share of the ratios that the loss clips.", SHARE, of="clip_fraction"),
    _metric("ratio_mean", FLOAT, "Mean ratio of the policy to the one before the update."),
    _metric(
        "effective_share",
        FLOAT,
        "Effective sample size by the importance weights, as a share of the batch.",
        SHARE,
        of="importance_effective_share",
    ),
    _metric("learning_rate", FLOAT, "Learning rate of its optimiser steps."),
    _metric("success_rate", FLOAT, "Success rate of the valid episodes rolled out for it.", SHARE),
    _metric("task_reward", FLOAT, "Mean raw reward of the valid episodes.", SHARE, of="task_reward_mean"),
    _metric("shaped_reward", FLOAT, "Mean shaped reward of the valid episodes.", SHARE, of="shaped_reward_mean"),
    _metric("num_episodes", INT32, "Episodes rolled out for it, including faults."),
    _metric("num_faults", INT32, "Faults and timeouts among these."),
    _metric("fault_share", FLOAT, "num_faults / num_episodes.", SHARE),
    _metric("staleness_mean", FLOAT, "Updates between the weights that sampled a token and those before this update."),
    _metric("staleness_max", FLOAT, "The same for the oldest token."),
    _metric("is_held", FLAG, "No optimiser step was made, although there was data to train on."),
    _metric("num_held_tries", INT32, "Earlier tries of this update that were held."),
    _metric("is_skipped", FLAG, "No optimiser step was made, because no episode had a signal."),
    _metric("num_tokens", INT64, "Tokens trained on, including prompts.", TOKENS),
    _metric("num_response_tokens", INT64, "Response tokens trained on.", TOKENS),
    _metric("tokens_per_s", FLOAT, "num_tokens per second of the trainer's time."),
    _metric("rollout_s", FLOAT, "Time waiting for rollouts.", SECONDS),
    _metric("score_s", FLOAT, "Time of the log-probabilities before the update.", SECONDS),
    _metric("forward_s", FLOAT, "Time of forward and backward passes.", SECONDS),
    _metric("optimizer_s", FLOAT, "Time of optimiser steps.", SECONDS),
    _metric("update_s", FLOAT, "Time of the trainer, from the batch to the new weights.", SECONDS),
)

UPDATES = pa.schema(
    [
        *columns_of(UpdateRecord),
        column("checkpoint_id", TEXT, "Equal to stage_key, as in `episodes`."),
        column(
            "weights_id", TEXT, "The weights after it: after update 7 <stage_key>-u0007, whether or not they were kept."
        ),
        *(field for field, _ in _METRICS),
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
        **{field.name: _typed(metrics.get(name), field.type) for field, name in _METRICS},
        "held_reason": str(reason) if reason else None,
    }


def attempt_row(attempt: StageAttempt) -> Row:
    return row_of(attempt)


def _typed(value: float | None, kind: pa.DataType) -> Any:
    if value is None or kind == FLOAT:
        return value
    return bool(value) if kind == FLAG else int(value)
