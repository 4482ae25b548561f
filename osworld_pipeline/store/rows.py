"""Converts episodes and groups to flat, typed table rows and back, without loss."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from osworld_pipeline.domain.digest import canonical_json
from osworld_pipeline.domain.episode import (
    ContextMode,
    Episode,
    EpisodePurpose,
    Outcome,
    Parity,
    Reward,
    SamplingParams,
    Step,
    StepSignals,
    TokenSequence,
)
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import Injection, ReplayVerification

Row = dict[str, Any]
_INT64 = 2**63 - 1
_SIGNALS = (
    "action_type",
    "action_parsed",
    "action_executed",
    "action_error",
    "target_element",
    "fallback_used",
    "a11y_grounded",
    "screen_diff",
    "screen_changed",
    "screen_hash",
    "a11y_delta",
    "a11y_changed",
    "terminal_changed",
)
_STEP_FIELDS = (
    "step_index",
    "screenshot_sha256",
    "screenshot_width",
    "screenshot_height",
    "screenshot_format",
    "screenshot_num_bytes",
    "observation_text",
    "response_text",
    "command",
    "policy_version",
    "prompt_num_tokens",
    "response_num_tokens",
    "model_s",
    "step_s",
)
_EPISODE_FIELDS = (
    "episode_id",
    "task_id",
    "task_digest",
    "checkpoint_id",
    "stage_key",
    "update",
    "group_id",
    "seed",
    "attempt",
    "error",
    "max_turns",
    "engine",
    "replica_id",
    "provider",
    "image_digest",
    "grader_version",
    "processor_digest",
    "source_dataset",
    "licence",
    "started_at",
    "stage",
    "domain",
    "suite",
    "suite_name",
    "weights_id",
    "weights_update",
    "advantage",
)

_EMPTY_TEXTS = ("processor_digest", "source_dataset", "licence", "stage", "domain", "suite", "suite_name", "weights_id")
"""Default for NULL in an older part."""


def utc_time(unix_time: float | None) -> datetime | None:
    """The value for timestamp columns: UTC without a zone. None for 0, which is an unknown time, and for times out of
    range."""
    if not unix_time:
        return None
    try:
        return datetime.fromtimestamp(unix_time, UTC).replace(tzinfo=None)
    except (OverflowError, ValueError, OSError):
        return None


def episode_row(episode: Episode) -> Row:
    reward = episode.reward
    sampling = episode.sampling
    row: Row = {name: getattr(episode, name) for name in _EPISODE_FIELDS}
    row |= {
        "purpose": str(episode.purpose),
        "outcome": str(episode.outcome),
        "is_valid": episode.outcome.is_valid,
        "is_success": episode.is_success,
        "task_reward": reward.task if reward else None,
        "partial_reward": reward.partial if reward else None,
        "penalty": reward.penalty if reward else None,
        "shaped_reward": reward.shaped if reward else None,
        "reward_parts": list(reward.parts.items()) if reward else None,
        "num_steps": len(episode.steps),
        "temperature": sampling.temperature,
        "logprob_temperature": sampling.temperature or 1.0,
        "top_p": sampling.top_p,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop),
        "sampling_seed": sampling.seed,
        "times_s": list(episode.times_s.items()),
        "run_ids": list(episode.run_ids.items()),
        "context_mode": str(episode.context_mode),
        "earlier_faults": list(episode.earlier_faults),
    }
    total_s = episode.times_s.get("total")
    row |= {
        "started_utc": utc_time(episode.started_at),
        "ended_utc": utc_time(episode.started_at + total_s) if episode.started_at and total_s is not None else None,
        **_token_counts(episode),
        **_parity_columns(episode.parity),
    }
    return _clean(row | _sequence_columns(episode.sequences))


def _token_counts(episode: Episode) -> Row:
    """NULL if tokens were not counted: chat engines and imports leave 0 in their steps."""
    steps, sequences = episode.steps, episode.sequences
    is_counted = all(step.prompt_num_tokens > 0 for step in steps) and not episode.source_dataset
    logprobs = [
        logprob
        for sequence in sequences
        for logprob, is_sampled in zip(sequence.sampled_logprobs, sequence.response_mask, strict=True)
        if is_sampled
    ]
    return {
        "prompt_tokens": sum(step.prompt_num_tokens for step in steps) if is_counted else None,
        "response_tokens": sum(step.response_num_tokens for step in steps) if is_counted else None,
        "image_tokens": episode.image_num_tokens,
        "num_images": sum(len(sequence.image_steps) for sequence in sequences) if sequences else None,
        "mean_logprob": math.fsum(logprob / len(logprobs) for logprob in logprobs) if logprobs else None,
    }


def _parity_columns(parity: Parity | None) -> Row:
    return {
        "parity_num_tokens": parity.num_tokens if parity else None,
        "parity_mean_diff": parity.mean_diff if parity else None,
        "parity_max_diff": parity.max_diff if parity else None,
    }


def _parity_from(row: Mapping[str, Any]) -> Parity | None:
    if row["parity_num_tokens"] is None:
        return None
    return Parity(
        num_tokens=row["parity_num_tokens"], mean_diff=row["parity_mean_diff"], max_diff=row["parity_max_diff"]
    )


def step_rows(episode: Episode) -> list[Row]:
    rows: list[Row] = []
    for step in episode.steps:
        row: Row = {name: getattr(step, name) for name in _STEP_FIELDS}
        row |= {name: getattr(step.signals, name) for name in _SIGNALS}
        x, y = step.signals.coordinate or (None, None)
        row |= {
            "episode_id": episode.episode_id,
            "task_id": episode.task_id,
            "checkpoint_id": episode.checkpoint_id,
            "purpose": str(episode.purpose),
            "update": episode.update,
            "action": None if step.action is None else canonical_json(step.action),
            "coordinate_x": _fit(x),
            "coordinate_y": _fit(y),
        }
        rows.append(_clean(row))
    return rows


def _sequence_columns(sequences: Sequence[TokenSequence]) -> Row:
    """One flat list per column; the lengths split it."""
    flat = ("token_ids", "response_mask", "sampled_logprobs", "policy_versions", "image_steps")
    return {name: [value for sequence in sequences for value in getattr(sequence, name)] for name in flat} | {
        "sequence_lengths": [len(sequence.token_ids) for sequence in sequences],
        "sequence_image_counts": [len(sequence.image_steps) for sequence in sequences],
    }


def _sequences_from(row: Mapping[str, Any], steps: Sequence[Step]) -> tuple[TokenSequence, ...]:
    token_ids, mask, logprobs = row["token_ids"], row["response_mask"], row["sampled_logprobs"]
    lengths, counts = row["sequence_lengths"], row["sequence_image_counts"]
    versions, image_steps = row["policy_versions"], row["image_steps"]
    if lengths is None:
        # A part from before window mode: one sequence with every screenshot, and versions by turn.
        lengths, counts = ([len(token_ids)], [len(steps)]) if token_ids else ([], [])
        sampled_by = iter([step.policy_version for step in steps for _ in range(step.response_num_tokens or 0)])
        # Tokens without a recorded step belong to a turn that a fault cut off; they are not trained on.
        versions = [next(sampled_by, -1) if sampled else -1 for sampled in mask]
        image_steps = list(range(len(steps)))
    sequences: list[TokenSequence] = []
    start = first_image = 0
    for length, count in zip(lengths, counts, strict=True):
        end, last_image = start + length, first_image + count
        sequences.append(
            TokenSequence(
                token_ids=tuple(token_ids[start:end]),
                response_mask=tuple(mask[start:end]),
                sampled_logprobs=tuple(logprobs[start:end]),
                policy_versions=tuple(versions[start:end]),
                image_steps=tuple(image_steps[first_image:last_image]),
            )
        )
        start, first_image = end, last_image
    return tuple(sequences)


def group_row(group: RolloutGroup) -> Row:
    episodes = group.episodes
    return {
        "group_id": group.group_id,
        "task_id": group.task_id,
        "checkpoint_id": episodes[0].checkpoint_id if episodes else None,
        "stage_key": group.stage_key,
        "update": group.update,
        "num_episodes": len(episodes),
        "num_valid": len(group.valid_episodes),
        "num_successes": sum(episode.is_success for episode in episodes),
        "episode_ids": [episode.episode_id for episode in episodes],
        "outcomes": [str(episode.outcome) for episode in episodes],
        "task_rewards": [episode.reward.task if episode.reward else None for episode in episodes],
        "shaped_rewards": [episode.reward.shaped if episode.reward else None for episode in episodes],
        "replay_row_id": group.replay.row_id if group.replay else None,
        "fate": str(group.fate),
        "reason": group.reason,
        "oldest_policy_version": group.oldest_policy_version,
    }


def injection_row(injection: Injection, group: RolloutGroup | None) -> Row:
    return {
        "injection_id": injection.injection_id,
        "group_id": injection.group_id,
        "row_id": injection.row_id,
        "task_id": injection.task_id,
        "source_dataset": injection.source_dataset,
        "reward": injection.reward,
        "advantage": injection.advantage,
        "weight": injection.weight,
        "kind": injection.kind,
        "strategy": injection.strategy,
        "verified_reward": injection.verified_reward,
        "stage_key": group.stage_key if group else None,
        "update": group.update if group else None,
        "source_path": injection.source_path,
        "source_line": injection.source_line,
        "source_sha256": injection.source_sha256,
        "licence": injection.licence,
    }


def verification_row(verification: ReplayVerification) -> Row:
    row = {field.name: getattr(verification, field.name) for field in dataclasses.fields(verification)}
    return _clean(row | {"outcome": str(verification.outcome)})


def episode_from(row: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> Episode:
    """The inverse of `episode_row` and `step_rows`; `steps` in any order."""
    has_reward = row["task_reward"] is not None
    played = tuple(_step_from(step) for step in sorted(steps, key=lambda step: step["step_index"]))
    # Missing values of an older part are null.
    fields = {name: row[name] for name in _EPISODE_FIELDS}
    fields["max_turns"] = fields["max_turns"] or 0
    fields |= {name: fields[name] or "" for name in _EMPTY_TEXTS}
    return Episode(
        **fields,
        purpose=EpisodePurpose(row["purpose"]),
        outcome=Outcome(row["outcome"]),
        reward=Reward(
            task=row["task_reward"],
            partial=row["partial_reward"],
            penalty=row["penalty"],
            shaped=row["shaped_reward"],
            parts=dict(row["reward_parts"] or ()),
        )
        if has_reward
        else None,
        sampling=SamplingParams(
            temperature=row["temperature"],
            top_p=row["top_p"],
            max_new_tokens=row["max_new_tokens"],
            stop=tuple(row["stop"]),
            seed=row["sampling_seed"],
        ),
        steps=played,
        context_mode=ContextMode(row["context_mode"] or ContextMode.APPEND),
        earlier_faults=tuple(row["earlier_faults"] or ()),
        sequences=_sequences_from(row, played),
        image_num_tokens=row["image_tokens"],
        parity=_parity_from(row),
        times_s=dict(row["times_s"]),
        run_ids=dict(row["run_ids"]),
    )


def _step_from(row: Mapping[str, Any]) -> Step:
    x, y = row["coordinate_x"], row["coordinate_y"]
    fields = {name: row[name] for name in _STEP_FIELDS}
    fields["screenshot_num_bytes"] = fields["screenshot_num_bytes"] or 0
    return Step(
        **fields,
        action=None if row["action"] is None else json.loads(row["action"]),
        signals=StepSignals(
            **{name: row[name] for name in _SIGNALS}, coordinate=None if x is None or y is None else (x, y)
        ),
    )


def _fit(value: int | None) -> int | None:
    """A model may write a coordinate of any size; `action` has the exact value."""
    return None if value is None else max(-_INT64, min(_INT64, int(value)))


def _clean(row: Row) -> Row:
    """Text from models and desktops may contain a lone surrogate, which UTF-8 cannot encode: it becomes a `?`."""
    return {
        name: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for name, value in row.items()
    }
