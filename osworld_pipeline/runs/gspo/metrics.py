"""Metrics of an update's rollouts, by the names that they are reported under. Raw success and shaped reward are kept
separate."""

import itertools
from collections.abc import Sequence

from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.group import GroupStatus, RolloutGroup
from osworld_pipeline.rollout.batch import GspoBatch
from osworld_pipeline.tables.replay.rows import ReplayCoverage


def group_metrics(batch: GspoBatch, *, update: int) -> dict[str, float]:
    episodes = batch.episodes
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    num_valid = max(1, len(rewards))
    return {
        "task_reward": sum(reward.task for reward in rewards) / num_valid,
        "shaped_reward": sum(reward.shaped for reward in rewards) / num_valid,
        "success_rate": sum(episode.is_success for episode in episodes) / num_valid,
        "num_episodes": float(len(episodes)),
        "num_faults": float(sum(not episode.outcome.is_valid for episode in episodes)),
        "fault_share": batch.fault_share,
        "num_retries": float(sum(episode.attempt for episode in episodes)),
        "turns_mean": sum(len(episode.steps) for episode in episodes) / max(1, len(episodes)),
        **fate_metrics(batch, update=update),
        **replay_metrics(batch),
    }


def fate_metrics(batch: GspoBatch, *, update: int) -> dict[str, float]:
    """Number of groups by status, and the age in updates of the oldest token of each trained group."""
    ages = [
        update - group.oldest_policy_version
        for group in batch.groups
        if group.status is GroupStatus.TRAINED and group.oldest_policy_version is not None
    ]
    return {
        **{f"num_{status}_groups": float(batch.num_groups(status)) for status in GroupStatus},
        "group_staleness_mean": sum(ages) / max(1, len(ages)),
        "group_staleness_max": float(max(ages, default=0)),
    }


def replay_metrics(batch: GspoBatch) -> dict[str, float]:
    return {
        "num_injections": float(len(batch.injections)),
        "num_replay_checks": float(batch.replay.num_checks),
        "num_failed_groups": float(batch.replay.num_failed),
        "num_replay_online": float(batch.replay.num_online),
        "num_replay_verified": float(batch.replay.num_verified),
        "num_replay_skipped": float(batch.replay.num_skipped),
        "replay_rate": batch.replay.rate,
    }


def coverage_metrics(coverage: ReplayCoverage) -> dict[str, float]:
    """The share of the training tasks that the demonstrations cover, and the share that verified ones cover."""
    return {"replay_coverage": coverage.share, "replay_verified_coverage": coverage.verified_share}


def reward_lines(groups: Sequence[RolloutGroup], *, limit: int) -> list[str]:
    """The rewards of the first graded episodes with all parts, one line each (OSWORLD_REWARD_DEBUG_LIMIT)."""
    graded = (episode for group in groups for episode in group.episodes if episode.reward is not None)
    return [_reward_line(episode) for episode in itertools.islice(graded, limit)]


def _reward_line(episode: Episode) -> str:
    reward = episode.reward
    assert reward is not None, f"{episode.episode_id} has no grader's score"
    parts = ", ".join(f"{name} {value:.3f}" for name, value in reward.parts.items())
    return (
        f"{episode.episode_id}: task {reward.task:g}, partial {reward.partial:.3f}, penalty {reward.penalty:.3f}, "
        f"shaped {reward.shaped:.3f}" + (f" ({parts})" if parts else "")
    )
