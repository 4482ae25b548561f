"""Scores of evaluations: raw task success with its interval, over the valid episodes and over all episodes; faults are
shown, and a fault is never a zero."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.episode import Outcome, Parity
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.intervals import Rate, rate_over_tasks
from osworld_pipeline.tables.catalog import fresh_views

UNKNOWN_STAGE = "unknown"
MIXED = ", "
"""Separates the desktops of an evaluation that had several."""
ROWS_AT_ONCE = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRow:
    """One row of the `evals` view."""

    checkpoint_id: str
    stage: str | None
    task_id: str
    seed: int
    family: str
    suite: str
    outcome: str
    success: bool | None
    """None if the episode is not valid: a fault, a timeout or touched."""
    shaped_reward: float | None
    turns: int
    max_turns: int | None
    episode_id: str
    provider: str
    image_digest: str
    grader_version: str
    temperature: float
    error: str | None = None
    stage_key: str = ""
    """Key of the evaluation: checkpoint and settings. Rows with different settings are never scored together."""
    domain: str | None = None
    """None if the task is in no table of tasks."""
    reward: float | None = None
    """The grader's score, 0..1; None if the episode is not valid."""
    desktops: str = ""
    """Image and grader of the graded episodes of its evaluation; several, joined by MIXED, if they differ. Empty if
    none was graded."""
    source_dataset: str | None = None
    """The import that it belongs to; empty for an episode of our own."""
    prompt_tokens: int | None = None
    """Prompt tokens over all turns; a prompt counts each time. None if not counted, like the following counts and
    times."""
    response_tokens: int | None = None
    """Sampled tokens over all turns."""
    task_key: str = ""
    """Names the task within its evaluation: the id, with the domain if several domains have a task with that id."""
    wall_s: float | None = None
    """Time from before the reset to after the release. Episodes run in parallel: a sum of these is not elapsed time."""
    reset_s: float | None = None
    model_s: float | None = None
    step_s: float | None = None
    evaluate_s: float | None = None
    parity_num_tokens: int | None = None
    """Tokens of the parity probe of its engine; None if that was not probed, like the next two."""
    parity_mean_diff: float | None = None
    parity_max_diff: float | None = None

    @property
    def parity(self) -> Parity | None:
        num_tokens, mean_diff, max_diff = self.parity_num_tokens, self.parity_mean_diff, self.parity_max_diff
        if num_tokens is None or mean_diff is None or max_diff is None:
            return None
        return Parity(num_tokens=num_tokens, mean_diff=mean_diff, max_diff=max_diff)

    @property
    def task(self) -> str:
        """The same for all samples of a task."""
        return self.task_key or self.task_id

    @property
    def is_valid(self) -> bool:
        return Outcome(self.outcome).is_valid

    @property
    def has_reason(self) -> bool:
        return Outcome(self.outcome).has_reason

    @property
    def is_success(self) -> bool:
        """False for a fault too: check `is_valid` first."""
        return bool(self.success)

    @property
    def desktop_s(self) -> float | None:
        """Time of the desktop: reset, step and evaluate."""
        parts = (self.reset_s, self.step_s, self.evaluate_s)
        return None if None in parts else sum(part for part in parts if part is not None)

    @property
    def evaluation_key(self) -> str:
        """Key of the settings, the same for all checkpoints with these settings; empty if unknown."""
        prefix = f"eval-{self.checkpoint_id}-"
        return self.stage_key.removeprefix(prefix) if self.stage_key.startswith(prefix) else ""


@dataclass(frozen=True, kw_only=True)
class CheckpointScore:
    """Score of one checkpoint in one evaluation. Two denominators, never mixed: `lenient` counts valid episodes,
    `strict` all that were run, where a fault is not solved. A planned episode that never ran is in neither."""

    checkpoint_id: str
    stage: str
    stage_key: str
    lenient: Rate
    strict: Rate
    confidence: float
    num_tasks: int
    """Tasks with an episode, valid or not."""
    desktops: str
    """The same as in EvalRow."""
    num_planned: int | None
    """Episodes of the whole evaluation; None if unknown."""
    outcomes: Mapping[str, int]
    """Episodes that were run, by outcome."""
    mean_reward: float
    """Mean of the graders' raw scores over valid episodes, as printed by OSWorld's own script; NaN without one."""
    mean_shaped_reward: float
    mean_turns: float
    parity: Parity | None = None
    """Result of the probes before its episodes; None if no engine was probed."""

    @property
    def is_mixed(self) -> bool:
        """Its episodes were graded on several desktop images or by several versions of the grader: it has no rank."""
        return is_mixed(self.desktops)

    @property
    def n(self) -> int:
        """Valid episodes: the lenient denominator."""
        return self.lenient.n

    @property
    def successes(self) -> int:
        return self.lenient.successes

    @property
    def success_rate(self) -> float:
        """The lenient rate; NaN without a valid episode."""
        return self.lenient.value

    @property
    def low(self) -> float:
        return self.lenient.interval.low

    @property
    def high(self) -> float:
        return self.lenient.interval.high

    @property
    def faults(self) -> Mapping[str, int]:
        """Episodes outside the lenient denominator, by outcome."""
        return {outcome: count for outcome, count in self.outcomes.items() if not Outcome(outcome).is_valid}

    @property
    def num_faults(self) -> int:
        return sum(self.faults.values())

    @property
    def num_missing(self) -> int | None:
        """Planned episodes that were not run; None if the plan is unknown."""
        return None if self.num_planned is None else self.num_planned - self.strict.n


def summarise(rows: Sequence[EvalRow], *, confidence: float = 0.95, num_planned: int | None = None) -> CheckpointScore:
    """The score of one checkpoint from its rows in one evaluation.

    Raises:
        ValueError: no rows, rows of several checkpoints or evaluations, or more rows than were planned.
    """
    names = {row.checkpoint_id for row in rows}
    if len(names) != 1:
        raise ValueError(f"a score needs the rows of one checkpoint, not of {len(names)}")
    keys = {row.stage_key for row in rows}
    if len(keys) != 1:
        raise ValueError(f"a score needs the rows of one evaluation, not of {len(keys)}: {', '.join(sorted(keys))}")
    if num_planned is not None and len(rows) > num_planned:
        raise ValueError(f"{rows[0].stage_key} has {len(rows)} episodes, and {num_planned} were planned")
    valid = [row for row in rows if row.is_valid]
    return CheckpointScore(
        checkpoint_id=rows[0].checkpoint_id,
        stage=rows[0].stage or UNKNOWN_STAGE,
        stage_key=rows[0].stage_key,
        lenient=rate_over_tasks(list(successes_by_task(rows).values()), confidence=confidence),
        strict=rate_over_tasks(list(successes_by_task(rows, strict=True).values()), confidence=confidence),
        confidence=confidence,
        num_tasks=len({row.task for row in rows}),
        desktops=rows[0].desktops,
        num_planned=num_planned,
        outcomes=dict(sorted(Counter(row.outcome for row in rows).items())),
        mean_reward=_mean(row.reward for row in valid if row.reward is not None),
        mean_shaped_reward=_mean(row.shaped_reward for row in valid if row.shaped_reward is not None),
        mean_turns=_mean(row.turns for row in valid),
        parity=parity_of(rows),
    )


def is_mixed(desktops: str) -> bool:
    return MIXED in desktops


def not_ranked_together(scores: Iterable[CheckpointScore]) -> list[str]:
    """A sentence for each reason why these must not be compared; empty if they may be."""
    found = list(scores)
    keys = {score.stage_key.removeprefix(f"eval-{score.checkpoint_id}-") for score in found}
    desktops = sorted({score.desktops for score in found if score.desktops and not score.is_mixed})
    sentences = [
        f"{score.checkpoint_id} is not ranked: its episodes were graded on {score.desktops}"
        for score in found
        if score.is_mixed
    ]
    if len(desktops) > 1:
        sentences.append(f"not ranked together: other desktop image or grader ({'; '.join(desktops)})")
    if len(keys) > 1:
        sentences.append(f"not ranked together: other settings (evaluations {', '.join(sorted(keys))})")
    return sentences


def parity_of(rows: Iterable[EvalRow]) -> Parity | None:
    """Parity over the probes of all engines of these episodes; a session has one probe and many episodes. None without
    one."""
    probes = {row.parity for row in rows if row.parity is not None}
    if not probes:
        return None
    num_tokens = sum(probe.num_tokens for probe in probes)
    return Parity(
        num_tokens=num_tokens,
        mean_diff=math.fsum(probe.mean_diff * probe.num_tokens for probe in probes) / num_tokens,
        max_diff=max(probe.max_diff for probe in probes),
    )


def successes_by_task(rows: Iterable[EvalRow], *, strict: bool = False) -> dict[str, list[bool]]:
    """Whether each sample of a task succeeded, by task, in the order of the seeds. A fault is not a sample; with
    `strict` it is an unsolved one."""
    samples: dict[str, list[bool]] = {}
    for row in sorted(rows, key=lambda row: (row.task, row.seed, row.episode_id)):
        if row.is_valid or strict:
            samples.setdefault(row.task, []).append(row.is_success)
    return samples


def rates_by_seed(rows: Iterable[EvalRow]) -> list[float]:
    """The success rate of each seed, in order, over the tasks that have a valid episode with every seed, so that a
    fault does not make two seeds differ. Empty if there is no such task."""
    found = {(row.task, row.seed): row.is_success for row in rows if row.is_valid}
    seeds = sorted({seed for _, seed in found})
    tasks = [task for task in {task for task, _ in found} if all((task, seed) in found for seed in seeds)]
    return [sum(found[task, seed] for task in tasks) / len(tasks) for seed in seeds] if tasks else []


def score_checkpoints(rows: Iterable[EvalRow], *, confidence: float = 0.95) -> list[CheckpointScore]:
    """A score for each checkpoint in each of its evaluations, in the order of the stages."""
    by_evaluation: dict[tuple[str, str], list[EvalRow]] = {}
    for row in rows:
        by_evaluation.setdefault((row.checkpoint_id, row.stage_key), []).append(row)
    order = {str(stage): index for index, stage in enumerate(Stage)}
    scores = [summarise(group, confidence=confidence) for group in by_evaluation.values()]
    return sorted(scores, key=lambda score: (order.get(score.stage, len(order)), score.checkpoint_id, score.stage_key))


def read_evals(state: StateDir, *, stage_keys: Collection[str] | None = None) -> list[EvalRow]:
    """Current rows of `evals`: all, or those of the given evaluations. Raises TableError."""
    keys = [entry.name for entry in fields(EvalRow)]
    chosen = "" if stage_keys is None else "WHERE stage_key IN (SELECT unnest(?::VARCHAR[])) "
    sql = f"SELECT {', '.join(keys)} FROM evals {chosen}ORDER BY checkpoint_id, stage_key, task_id, domain, seed"  # noqa: S608
    known: dict[str, str] = {}
    """Most texts are the same in many rows; each is kept once."""
    found: list[EvalRow] = []
    with fresh_views(state, "evals") as connection:
        cursor = connection.execute(sql, [] if stage_keys is None else [list(stage_keys)])
        while rows := cursor.fetchmany(ROWS_AT_ONCE):
            for row in rows:
                values: list[Any] = [known.setdefault(one, one) if isinstance(one, str) else one for one in row]
                found.append(EvalRow(**dict(zip(keys, values, strict=True))))
    return found


def read_scores(
    state: StateDir, *, confidence: float = 0.95, stage_keys: Collection[str] | None = None
) -> list[CheckpointScore]:
    """The score of every evaluated checkpoint (in the given evaluations), base first. Raises TableError."""
    return score_checkpoints(read_evals(state, stage_keys=stage_keys), confidence=confidence)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else math.nan
