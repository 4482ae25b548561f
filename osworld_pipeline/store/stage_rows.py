"""Updates and attempts of training stages as table rows."""

from collections.abc import Mapping

from osworld_pipeline.domain.hold import HoldReason
from osworld_pipeline.domain.stage_record import StageAttempt, UpdateRecord
from osworld_pipeline.store.rows import Row, utc_time

_METRIC_OF: Mapping[str, str] = {
    "clipped_share": "clip_fraction",
    "effective_share": "importance_effective_share",
    "task_reward": "task_reward_mean",
    "shaped_reward": "shaped_reward_mean",
} | {
    name: name
    for name in (
        "loss", "kl", "grad_norm", "entropy", "ratio_mean", "learning_rate", "success_rate", "fault_share",
        "staleness_mean", "staleness_max", "tokens_per_s", "rollout_s", "score_s", "forward_s", "optimizer_s",
        "update_s",
    )
}  # fmt: skip
_COUNTS = ("num_episodes", "num_faults", "num_held_tries", "num_tokens", "num_response_tokens")
_FLAGS = ("is_held", "is_skipped")


def update_row(record: UpdateRecord) -> Row:
    stage, metrics = record.stage, record.metrics
    reason = next((reason for reason in HoldReason if metrics.get(f"is_held_by_{reason}")), None)
    return {
        "stage_key": stage.stage_key,
        "update": record.update,
        "stage": stage.stage,
        "checkpoint_id": stage.stage_key,
        "parent_id": stage.parent_id,
        "weights_id": record.weights_id,
        **{column: metrics.get(name) for column, name in _METRIC_OF.items()},
        **{name: int(metrics[name]) if name in metrics else None for name in _COUNTS},
        **{name: bool(metrics[name]) if name in metrics else None for name in _FLAGS},
        "held_reason": str(reason) if reason else None,
        "started_utc": utc_time(record.started_at),
        "ended_utc": utc_time(record.ended_at),
        "metrics": [(name, float(value)) for name, value in sorted(metrics.items())],
        "run_ids": list(stage.run_ids.items()),
    }


def attempt_row(attempt: StageAttempt) -> Row:
    return {
        "attempt_id": attempt.attempt_id,
        "stage_key": attempt.stage.stage_key,
        "stage": attempt.stage.stage,
        "parent_id": attempt.stage.parent_id,
        "first_update": attempt.first_update,
        "num_planned": attempt.stage.num_planned,
        "status": str(attempt.status),
        "error": attempt.error,
        "host": attempt.host,
        "process_id": attempt.process_id,
        "started_utc": utc_time(attempt.started_at),
        "ended_utc": utc_time(attempt.ended_at),
        "run_ids": list(attempt.stage.run_ids.items()),
    }
