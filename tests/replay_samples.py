"""Replay buffers to write and groups to serve, by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

from episode_samples import make_episode, make_step

from osworld_pipeline.domain.episode import Episode, EpisodePurpose, Outcome, Reward, StepSignals
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import ReplayVerification, base_task_id
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.owned import write_table


def make_row(row_id: str, original_task_id: str = "t", **changes: Any) -> dict[str, Any]:
    """A row of the replay buffer: one turn, no image."""
    row = {
        "row_id": row_id,
        "task_id": base_task_id(original_task_id),
        "original_task_id": original_task_id,
        "source_dataset": "sft_clean",
        "quality_rank": 1,
        "reward": 1.0,
        "is_reward_assumed": True,
        "num_steps": 1,
        "messages": [
            {"role": role, "content": [{"type": "text", "text": text}]}
            for role, text in (("system", "s"), ("user", "u"), ("assistant", f"Action: {row_id}"))
        ],
        "images": [],
        "action_types": ["click"],
        "source_path": "file.jsonl",
        "source_line": 1,
        "source_sha256": "5a" * 32,
    }
    return row | changes


def write_rows(state: StateDir, *rows: dict[str, Any]) -> StateDir:
    write_table(state, "replay_buffer", rows)
    return state


def write_verification(state: StateDir, row_id: str, reward: float | None, *, attempt: int = 0) -> None:
    """What re-executing the row earned; None for a fault."""
    write_verifications(state, {row_id: reward}, attempt=attempt)


def write_verifications(state: StateDir, rewards: Mapping[str, float | None], *, attempt: int = 0) -> None:
    """By row id, in one part."""
    if not rewards:
        return
    verifications = [
        ReplayVerification(
            verification_id=f"{row_id}-{attempt}",
            row_id=row_id,
            task_id="t",
            task_digest="d",
            outcome=_outcome(reward),
            reward=reward,
            started_at=float(attempt),
        )
        for row_id, reward in rewards.items()
    ]
    TrajectoryStore(state).write_verifications(f"verify-{min(rewards)}-{attempt}", verifications)


def rollout(
    name: str, reward: float | None = 0.0, *, task_id: str = "t", action_types: Sequence[str] = ("click",), **changes
) -> Episode:
    """An episode for training; a reward of None is a fault."""
    outcome = _outcome(reward)
    steps = tuple(
        make_step(index, signals=StepSignals(action_type=kind, action_parsed=True, action_executed=True))
        for index, kind in enumerate(action_types)
    )
    fields: dict[str, Any] = {
        "task_id": task_id,
        "purpose": EpisodePurpose.TRAIN,
        "outcome": outcome,
        "reward": None if reward is None else Reward(task=reward, shaped=reward),
        "steps": steps,
        "stage_key": "stage",
        "update": 0,
    }
    return make_episode(name, **fields | changes)


def group_of(*episodes: Episode, group_id: str = "g", task_id: str = "t", update: int = 0, **changes) -> RolloutGroup:
    fields: dict[str, Any] = {"stage_key": "stage", "episodes": episodes}
    return RolloutGroup(group_id=group_id, task_id=task_id, update=update, **fields | changes)


def failed_group(task_id: str = "t", *, group_id: str = "g") -> RolloutGroup:
    return group_of(rollout(f"{group_id}-s0", task_id=task_id), group_id=group_id, task_id=task_id)


def _outcome(reward: float | None) -> Outcome:
    if reward is None:
        return Outcome.ENV_FAULT
    return Outcome.SUCCESS if reward >= 1 else Outcome.FAILURE
