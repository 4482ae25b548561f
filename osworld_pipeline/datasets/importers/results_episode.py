"""An OSWorld attempt as an episode: the same columns as our own; values that were not recorded are empty."""

from collections.abc import Sequence
from dataclasses import dataclass

from osworld_pipeline.datasets.importers.calls import Arguments
from osworld_pipeline.datasets.importers.folder import ImportOptions
from osworld_pipeline.datasets.importers.results_reader import ResultAttempt, ResultStep
from osworld_pipeline.datasets.importers.turns import step_text
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.episode import (
    Episode,
    EpisodePurpose,
    Outcome,
    Reward,
    SamplingParams,
    Step,
    StepSignals,
)
from osworld_pipeline.domain.task import Task

SUCCESS_THRESHOLD = 0.5


@dataclass(frozen=True, kw_only=True)
class StepActions:
    actions: tuple[Arguments, ...] = ()
    """One or several, in our dialect; empty if and only if there is a problem."""
    problem: str = ""


def attempt_episode(
    attempt: ResultAttempt,
    task: Task | None,
    actions: Sequence[StepActions],
    *,
    relative: str,
    options: ImportOptions,
) -> Episode:
    """`relative`: the attempt's folder below the results, which names the episode, so that a second import replaces it.
    The model is recorded as the engine; it is not a checkpoint of ours, so checkpoint_id is empty."""
    outcome, error = _outcome(attempt)
    known = task or Task(task_id=attempt.task_id, instruction="", domain=attempt.domain, config={})
    steps = [
        _step(index, step, found, known) for index, (step, found) in enumerate(zip(attempt.steps, actions, strict=True))
    ]
    return Episode(
        episode_id=f"import-{options.name}-{digest_json([attempt.model, relative])[:24]}",
        task_id=attempt.task_id,
        domain=known.domain,
        task_digest=task.config_digest if task is not None else "",
        purpose=EpisodePurpose.IMPORT,
        checkpoint_id="",
        engine=attempt.model,
        sampling=SamplingParams(
            temperature=_number(attempt, "temperature", 0.0),
            top_p=_number(attempt, "top_p", 1.0),
            max_new_tokens=_count(attempt, "max_tokens"),
            stop=(),
        ),
        outcome=outcome,
        error=error,
        reward=None if attempt.score is None else Reward(task=attempt.score, shaped=attempt.score),
        steps=tuple(steps),
        source_dataset=options.name,
        licence=options.licence,
        max_turns=_count(attempt, "max_steps"),
        started_at=attempt.started_at,
    )


def _outcome(attempt: ResultAttempt) -> tuple[Outcome, str | None]:
    """The outcome by the grader's score if there is one. Otherwise the model ended the task and it was not graded, or
    the run did not finish."""
    if attempt.score is not None:
        if attempt.score >= SUCCESS_THRESHOLD:
            return Outcome.SUCCESS, None
        return (Outcome.FAILURE if attempt.has_ended else Outcome.TRUNCATED), None
    if attempt.log_error:
        is_time = "time limit" in attempt.log_error.lower()
        return (Outcome.TIMEOUT if is_time else Outcome.ENV_FAULT), attempt.log_error[:500]
    if attempt.has_ended:
        return Outcome.GRADER_FAULT, attempt.score_problem
    if attempt.score_problem.startswith("no "):
        return Outcome.ENV_FAULT, f"the run was cut short after {len(attempt.steps)} steps: {attempt.score_problem}"
    return Outcome.GRADER_FAULT, attempt.score_problem


def _number(attempt: ResultAttempt, key: str, default: float) -> float:
    value = attempt.settings.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


def _count(attempt: ResultAttempt, key: str) -> int:
    """0 if it is unknown, or more than a column of 32 bits holds."""
    number = _number(attempt, key, 0)
    return int(number) if 0 <= number < 2**31 else 0


def _step(index: int, step: ResultStep, found: StepActions, task: Task) -> Step:
    screen = step.screen
    last = found.actions[-1] if found.actions else None
    point = (last.get("coordinate") or last.get("end_coordinate")) if last else None
    return Step(
        step_index=index,
        screenshot_sha256=screen.sha256 if screen else "",
        screenshot_width=screen.width if screen else 0,
        screenshot_height=screen.height if screen else 0,
        screenshot_format=screen.suffix if screen else "",
        screenshot_num_bytes=screen.num_bytes if screen else 0,
        observation_text=step_text(task, index),
        response_text=step.response,
        # Our steps have one action; a step of several has its whole code in `command`.
        action=last if len(found.actions) == 1 else None,
        command=step.action,
        signals=StepSignals(
            action_type=last["action"] if last else "unknown",
            action_parsed=last is not None,
            action_executed=True,
            coordinate=(point[0], point[1]) if point else None,
        ),
        policy_version=0,
        prompt_num_tokens=0,
        response_num_tokens=0,
        model_s=0.0,
        step_s=0.0,
    )
