"""The result of one evaluation as one JSON document: Slime-OSWorld's fields, and in addition the outcome of each
episode, both denominators, and faults separately from failures."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.evaluation.scores import CheckpointScore
from osworld_pipeline.evaluation.suite_files import EvalSuite


def result_document(
    checkpoint_id: str,
    suite: EvalSuite,
    episodes: Sequence[Episode],
    score: CheckpointScore,
    *,
    max_turns: int,
    seeds: Sequence[int],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """`episodes`: only of this evaluation; `score`: their score; `settings`: their settings in addition to turns and
    seeds.

    `success_rate` is over the valid episodes, None without one; a fault's `success` is None.
    """
    order = {(task.domain, task.task_id): index for index, task in enumerate(suite.tasks)}
    by_id = {task_id: index for (_, task_id), index in order.items()}

    def place(episode: Episode) -> tuple[int, int]:
        return order.get((episode.domain, episode.task_id), by_id[episode.task_id]), episode.seed

    in_order = sorted(episodes, key=place)
    return {
        "checkpoint": checkpoint_id,
        "tasks": [suite.name_of(task) for task in suite.tasks],
        "max_turns": max_turns,
        "seeds": list(seeds),
        "success_rate": score.success_rate if score.n else None,
        "results": [episode_result(episode) for episode in in_order],
        "suite": {"name": suite.name, "digest": suite.digest},
        "stage_key": score.stage_key,
        "desktops": score.desktops,
        "settings": dict(settings),
        "interval": {"confidence": score.confidence, "low": score.low, "high": score.high} if score.n else None,
        "num_valid": score.n,
        "num_success": score.successes,
        "num_faults": score.num_faults,
        "num_run": score.strict.n,
        "strict_success_rate": score.strict.value,
        "outcomes": dict(score.outcomes),
        "parity": None if score.parity is None else asdict(score.parity),
    }


def episode_result(episode: Episode) -> dict[str, Any]:
    reward = episode.reward
    return {
        "task_id": episode.task_id,
        "domain": episode.domain,
        "seed": episode.seed,
        "success": episode.is_success if episode.outcome.is_valid else None,
        "turns": len(episode.steps),
        "process_signals": [asdict(step.signals) for step in episode.steps],
        "outcome": str(episode.outcome),
        "error": episode.error,
        "reward": reward.task if reward is not None else None,
        "shaped_reward": reward.shaped if reward is not None else None,
        "reward_parts": dict(reward.parts) if reward is not None else None,
        "engine": episode.engine,
        "episode_id": episode.episode_id,
    }
