"""Combines getters and metrics as OSWorld's env.evaluate does: infeasible tasks, single metrics, and lists with and/or.
A crash is an EvaluatorError and never a reward."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from env_server.evaluators.episode_cache import EpisodeCache
from env_server.guest_client import GuestClient
from osworld_pipeline.errors import EvaluatorError, PipelineError, ReplicaError
from osworld_pipeline.task_schema.getters import GETTERS
from osworld_pipeline.task_schema.reading import Check, Grader

RunMetric = Callable[[str, Sequence[Any], Mapping[str, Any]], Awaitable[float]]
"""Computes the named metric from arguments and options. Raises EvaluatorError, or the metric's own error."""


async def grade(
    grader: Grader, guest: GuestClient, cache: EpisodeCache, *, last_action: str | None, run_metric: RunMetric
) -> float:
    """The reward in 0..1; `last_action` is the agent's last: FAIL succeeds only for an infeasible task.

    Raises:
        EvaluatorError: a getter or a metric crashed, or the score is not a number in 0..1.
        ReplicaError: the desktop died meanwhile.
    """
    has_given_up = last_action == "FAIL"
    if grader.is_infeasible or has_given_up:
        return float(grader.is_infeasible and has_given_up)
    scores: list[float] = []
    for check in grader.checks:
        async with cache.check():
            score = await _score(check, guest, cache, run_metric)
        if grader.is_list and grader.conj == "and" and score == 0.0:
            return 0.0
        if grader.is_list and grader.conj == "or" and score == 1.0:
            return 1.0
        scores.append(score)
    return sum(scores) / len(scores) if grader.conj == "and" else max(scores)


async def _score(check: Check, guest: GuestClient, cache: EpisodeCache, run_metric: RunMetric) -> float:
    try:
        arguments = []
        for config in (check.result, check.expected):
            if config is not None:
                parameters = {key: value for key, value in config.items() if key != "type"}
                arguments.append(await GETTERS[config["type"]](guest, cache, **parameters))
        score = await run_metric(check.func, arguments, check.options)
    except (ReplicaError, EvaluatorError):
        raise
    except PipelineError as error:
        raise EvaluatorError(f"the evaluator {check.func} could not read its desktop: {error}") from error
    except Exception as error:
        raise EvaluatorError(f"the evaluator {check.func} crashed: {type(error).__name__}: {error}") from error
    if not math.isfinite(score) or not 0.0 <= score <= 1.0:
        raise EvaluatorError(f"the evaluator {check.func} returned {score}, which is not a score in 0..1")
    return score
