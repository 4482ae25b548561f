"""Joins getters and metrics as OSWorld's env.evaluate does: infeasible tasks, single metrics, and lists under and/or.
A crash is an EvaluatorError and never a reward."""

import asyncio
import math
from collections.abc import Callable, Mapping

from env_server.evaluators import desktop_metrics, file_metrics, text_metrics, windows_metrics
from env_server.evaluators.getters import GETTERS
from env_server.evaluators.result_file import EpisodeCache
from env_server.guest_client import GuestClient
from osworld_pipeline.domain.task_words.reading import Check, Grader
from osworld_pipeline.errors import EvaluatorError, PipelineError, ReplicaError

METRICS: Mapping[str, Callable[..., float]] = {
    function.__name__: function
    for function in (
        text_metrics.check_direct_json_object,
        text_metrics.check_include_exclude,
        text_metrics.exact_match,
        text_metrics.fuzzy_match,
        text_metrics.is_in_list,
        text_metrics.is_in_vm_clickboard,
        text_metrics.literal_match,
        text_metrics.match_in_list,
        file_metrics.check_csv,
        file_metrics.check_json,
        file_metrics.check_line_number,
        file_metrics.check_list,
        file_metrics.compare_result_files,
        file_metrics.compare_text_file,
        file_metrics.diff_text_file,
        file_metrics.file_contains,
        desktop_metrics.check_gnome_favorite_apps,
        desktop_metrics.check_moved_jpgs,
        desktop_metrics.check_text_enlarged,
        desktop_metrics.is_utc_0,
        windows_metrics.windows_date_format,
        windows_metrics.windows_exact_match,
        windows_metrics.windows_has_all,
        windows_metrics.windows_names_listed,
        windows_metrics.windows_non_empty,
    )
}


async def grade(grader: Grader, guest: GuestClient, cache: EpisodeCache, *, last_action: str | None) -> float:
    """The reward in 0..1; `last_action` is the agent's last, so that FAIL counts only for what cannot be done.

    Raises:
        EvaluatorError: a getter or a metric crashed, or the score is no number in 0..1.
        ReplicaError: the desktop died meanwhile.
    """
    has_given_up = last_action == "FAIL"
    if grader.is_infeasible or has_given_up:
        return float(grader.is_infeasible and has_given_up)
    scores: list[float] = []
    for check in grader.checks:
        score = await _score(check, guest, cache)
        if grader.is_list and grader.conj == "and" and score == 0.0:
            return 0.0
        if grader.is_list and grader.conj == "or" and score == 1.0:
            return 1.0
        scores.append(score)
    return sum(scores) / len(scores) if grader.conj == "and" else max(scores)


async def _score(check: Check, guest: GuestClient, cache: EpisodeCache) -> float:
    try:
        arguments = []
        if check.result is not None:
            arguments.append(await GETTERS[check.result["type"]](guest, cache, check.result))
        if check.expected is not None:
            arguments.append(await GETTERS[check.expected["type"]](guest, cache, check.expected))
        score = float(await asyncio.to_thread(METRICS[check.func], *arguments, **check.options))
    except (ReplicaError, EvaluatorError):
        raise
    except PipelineError as error:
        raise EvaluatorError(f"the evaluator {check.func} could not read its desktop: {error}") from error
    except Exception as error:
        raise EvaluatorError(f"the evaluator {check.func} crashed: {type(error).__name__}: {error}") from error
    if not math.isfinite(score) or not 0.0 <= score <= 1.0:
        raise EvaluatorError(f"the evaluator {check.func} answered {score}, which is no score in 0..1")
    return score
