"""An attempt of a result folder as an episode of an evaluation: a row of `evals`, with its own checkpoint and
evaluation. Values that an export of ours recorded next to the result are used."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from osworld_pipeline.datasets.importers.folder import ImportOptions
from osworld_pipeline.datasets.importers.results_reader import ResultAttempt
from osworld_pipeline.datasets.regular_files import read_regular_file
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.episode import Episode, EpisodePurpose, Outcome

EPISODE_FILE = "episode.json"
"""The file in which an export of ours describes an episode."""
KEY_LENGTH = 12
_KEY = re.compile(rf"[0-9a-f]{{{KEY_LENGTH}}}")
_SCORED_BY = (
    "action_space", "observation_type", "max_steps", "max_trajectory_length", "screen_width", "screen_height",
    "sleep_after_execution", "temperature", "top_p", "max_tokens", "stop_token",
)  # fmt: skip
"""Arguments of OSWorld's runner that two evaluations must share to be comparable; the others name the model or
paths."""


def tasks_by_model(folders: Sequence[Path]) -> dict[Path, tuple[str, ...]]:
    """The tasks that each model has an attempt at, by the model's folder."""
    found: dict[Path, set[str]] = {}
    for folder in folders:
        found.setdefault(folder.parent.parent, set()).add(f"{folder.parent.name}/{folder.name}")
    return {model: tuple(sorted(tasks)) for model, tasks in found.items()}


def with_original_task_id(attempt: ResultAttempt) -> ResultAttempt:
    """The attempt with the original task id, if an export of ours had to change it for the folder's name."""
    task_id = _recorded(attempt).get("task_id")
    return replace(attempt, task_id=task_id) if isinstance(task_id, str) and task_id else attempt


def as_evaluation(episode: Episode, attempt: ResultAttempt, *, options: ImportOptions, tasks: Iterable[str]) -> Episode:
    """`episode`: the attempt's, as an import makes it; `tasks`: all that the model has an attempt at."""
    settings, recorded = attempt.settings, _recorded(attempt)
    checkpoint_id = f"{options.name}-{_identifier(_policy(attempt))}"
    seed = recorded.get("seed", settings.get("seed"))
    outcome, error = _recorded_outcome(recorded, attempt) or (episode.outcome, episode.error)
    return replace(
        episode,
        purpose=EpisodePurpose.EVALUATE,
        checkpoint_id=checkpoint_id,
        stage_key=f"eval-{checkpoint_id}-{_evaluation_key(settings, checkpoint_id, tasks)}",
        seed=seed if isinstance(seed, int) and not isinstance(seed, bool) else 0,
        outcome=outcome,
        error=error,
        suite=_text(settings, "suite"),
        suite_name=_text(settings, "suite_name"),
        provider=_text(settings, "provider"),
        image_digest=_text(settings, "image_digest"),
        grader_version=_text(settings, "grader_version"),
    )


def _policy(attempt: ResultAttempt) -> str:
    """The checkpoint that an export of ours names, because the folder may be that of one of several seeds; else the
    model."""
    return _text(attempt.settings, "checkpoint_id") if _own_key(attempt.settings) else attempt.model


def _identifier(name: str) -> str:
    """A name that is valid in a partition, a path and a shell; different names stay different."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100]
    return cleaned if cleaned == name else f"{cleaned}-{digest_json(name)[:8]}"


def _evaluation_key(settings: Mapping[str, Any], checkpoint_id: str, tasks: Iterable[str]) -> str:
    """Equal for comparable evaluations: the key of an evaluation of ours, else a digest of the settings that affect a
    score and of the tasks. Attempts without recorded settings are comparable only with those of the same checkpoint."""
    own = _own_key(settings)
    if own:
        return own
    scored_by = {name: settings[name] for name in _SCORED_BY if name in settings} or {"unknown_of": checkpoint_id}
    return digest_json({"settings": scored_by, "tasks": sorted(tasks)})[:KEY_LENGTH]


def _own_key(settings: Mapping[str, Any]) -> str:
    """The key in an export of ours; empty if it is not one."""
    key = _text(settings, "stage_key").removeprefix(f"eval-{_text(settings, 'checkpoint_id')}-")
    return key if _KEY.fullmatch(key) else ""


def _recorded(attempt: ResultAttempt) -> Mapping[str, Any]:
    try:
        recorded = orjson.loads(read_regular_file(attempt.folder / EPISODE_FILE))
    except (OSError, orjson.JSONDecodeError):
        return {}
    return recorded if isinstance(recorded, dict) else {}


def _recorded_outcome(recorded: Mapping[str, Any], attempt: ResultAttempt) -> tuple[Outcome, str | None] | None:
    """None if nothing is recorded, or it does not agree with the grader's score, which may have been added later."""
    try:
        outcome = Outcome(recorded.get("outcome", ""))
    except ValueError:
        return None
    has_result = attempt.score is not None
    if outcome.is_valid != has_result or (has_result and recorded.get("reward") != attempt.score):
        return None
    error = recorded.get("error")
    return outcome, error if isinstance(error, str) and not has_result else None


def _text(settings: Mapping[str, Any], name: str) -> str:
    value = settings.get(name)
    return value if isinstance(value, str) else ""
