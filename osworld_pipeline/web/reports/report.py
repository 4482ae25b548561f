"""The report of a pipeline: one self-contained HTML file with scores and their intervals, curves, filmstrips and
settings."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from osworld_pipeline.domain.checkpoint import Ancestor, Checkpoint
from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.changes import Change, Training, changes_of
from osworld_pipeline.evaluation.effect import RULE
from osworld_pipeline.evaluation.intervals import Rate, rate_over_tasks
from osworld_pipeline.evaluation.scores import (
    CheckpointScore,
    EvalRow,
    not_ranked_together,
    parity_of,
    read_evals,
    score_checkpoints,
    successes_by_task,
)
from osworld_pipeline.evaluation.training_record import MetricPoint
from osworld_pipeline.tables.catalog import fresh_views
from osworld_pipeline.web.charts.metrics import stage_charts
from osworld_pipeline.web.evaluation_names import name_of, read_evaluation_names
from osworld_pipeline.web.pages import write_page
from osworld_pipeline.web.reports.filmstrips import FilmstripOf, read_filmstrips

REPORT_FILE = "report.html"
MAX_FILMSTRIPS = 6


@dataclass(frozen=True, kw_only=True)
class Cell:
    rate: Rate
    num_faults: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """Evaluations on one suite with the same settings; only these are compared."""

    title: str
    scores: Sequence[CheckpointScore]
    num_tasks: int
    apart: Sequence[str]
    """Sentences about scores that are not ranked together."""
    families: Mapping[str, Sequence[Cell]]
    faults: Sequence[tuple[str, int, EvalRow]]
    changes: Sequence[Change]
    facts: Mapping[str, str]
    """The settings of the evaluations."""


def write_report(
    state: StateDir,
    *,
    metrics: Sequence[MetricPoint] = (),
    suite_digest: str = "",
    recipe_name: str = "",
    confidence: float = 0.95,
    stage_keys: Collection[str] | None = None,
    checkpoints: Sequence[Checkpoint] = (),
) -> Path:
    """Write `reports/report.html` from the current tables; curves of the two rewards come from the training
    episodes, others from `metrics`. `stage_keys` names the evaluations with the recipe's settings, which come first and
    whose suite has `suite_digest`; evaluations with other settings follow, each group with its own tables. None shows
    all as one group. `checkpoints`: all of the state, with their parents.

    Raises TableError, StoreError.
    """
    rows, training = read_evals(state), Training(checkpoints)
    own = [row for row in rows if stage_keys is None or row.stage_key in stage_keys]
    about = {"Recipe": recipe_name or "not recorded", "Suite hash": suite_digest or "not recorded"}
    groups = [_group("Success on held-out tasks", own, training, about=about, confidence=confidence)] if own else []
    if stage_keys is not None:
        groups += _other_groups(state, rows, {row.evaluation_key for row in own}, training, confidence=confidence)
    shown = own or (rows if groups else [])
    return write_page(
        state.reports / REPORT_FILE,
        "reports/report.html.jinja",
        groups=groups,
        rule=RULE,
        curves=stage_charts([*metrics, *_rollout_metrics(state)]),
        filmstrips=read_filmstrips(state, _shown(shown, score_checkpoints(shown, confidence=confidence))),
        injections=_injections(state),
        confidence=confidence,
    )


def _other_groups(
    state: StateDir, rows: Sequence[EvalRow], left_out: Collection[str], training: Training, *, confidence: float
) -> list[Group]:
    """One for each evaluation key except those of `left_out`, by suite and time."""
    by_key: dict[str, list[EvalRow]] = {}
    for row in rows:
        if row.evaluation_key not in left_out:
            by_key.setdefault(row.evaluation_key, []).append(row)
    if not by_key:
        return []
    names = read_evaluation_names(state)
    order = [*(key for key in names if key in by_key), *(key for key in by_key if key not in names)]
    return [_group(name_of(key, names), by_key[key], training, about={}, confidence=confidence) for key in order]


def _group(
    title: str, rows: Sequence[EvalRow], training: Training, *, about: Mapping[str, str], confidence: float
) -> Group:
    scores = score_checkpoints(rows, confidence=confidence)
    return Group(
        title=title,
        scores=scores,
        num_tasks=len({row.task for row in rows}),
        apart=not_ranked_together(scores),
        families=family_table(rows, scores, confidence=confidence),
        faults=faults_by_kind(rows),
        changes=whole_changes(rows, scores, training, confidence=confidence),
        facts={**about, **settings_facts(rows)},
    )


def whole_changes(
    rows: Sequence[EvalRow], scores: Sequence[CheckpointScore], training: Training, *, confidence: float
) -> list[Change]:
    """Changes by the stages that ended, in the order of `scores`. Milestones are left out, because they are points of a
    curve, and so are pairs that must not be compared."""
    names = [score.checkpoint_id for score in scores if Ancestor.parse(score.checkpoint_id).num_updates is None]
    found = changes_of(rows, list(dict.fromkeys(names)), training, confidence=confidence)
    return [change for change in found if change.effect is not None]


def family_table(
    rows: Sequence[EvalRow], scores: Sequence[CheckpointScore], *, confidence: float
) -> dict[str, list[Cell]]:
    """The cells of each family: one for each checkpoint, in the order of `scores`."""
    table: dict[str, list[Cell]] = {}
    for family in sorted({row.family for row in rows}):
        cells = []
        for score in scores:
            mine = [
                row
                for row in rows
                if row.family == family and (row.checkpoint_id, row.stage_key) == (score.checkpoint_id, score.stage_key)
            ]
            rate = rate_over_tasks(list(successes_by_task(mine).values()), confidence=confidence)
            cells.append(Cell(rate=rate, num_faults=len(mine) - rate.n))
        table[family] = cells
    return table


def settings_facts(rows: Sequence[EvalRow]) -> dict[str, str]:
    """The settings of the evaluations; several values if they differ."""
    seeds = sorted({row.seed for row in rows})
    return {
        "Suite": _distinct(row.suite for row in rows),
        "Step budget": _distinct(row.max_turns for row in rows if row.max_turns),
        "Seeds": ", ".join(map(str, seeds)) or "none",
        "Temperature": _distinct(row.temperature for row in rows),
        "Provider": _distinct(row.provider for row in rows if row.is_valid),
        "Desktop image": _distinct(row.image_digest for row in rows if row.is_valid),
        "Grader version": _distinct(row.grader_version for row in rows if row.is_valid),
        "Parity probe": _parity_words(rows),
    }


def _parity_words(rows: Sequence[EvalRow]) -> str:
    parity = parity_of(rows)
    if parity is None:
        return "not recorded"
    diffs = f"{parity.mean_diff:.2g} on average, {parity.max_diff:.2g} at most ({parity.num_tokens} tokens)"
    return f"log-probabilities of engine and checkpoint differ by {diffs}"


class Ended(Protocol):
    """An episode in a table."""

    @property
    def outcome(self) -> str: ...


E = TypeVar("E", bound=Ended)


def faults_by_kind(episodes: Iterable[E]) -> list[tuple[str, int, E]]:
    """Outcomes with a recorded reason (faults, timeouts, tampering, touched): (outcome, number, the first episode)."""
    found: dict[str, list[E]] = {}
    for episode in episodes:
        if Outcome(episode.outcome).has_reason:
            found.setdefault(episode.outcome, []).append(episode)
    return [(outcome, len(those), those[0]) for outcome, those in sorted(found.items())]


def _distinct(values: Any) -> str:
    return ", ".join(sorted({str(value) for value in values if value not in (None, "")})) or "not recorded"


def _rollout_metrics(state: StateDir) -> list[MetricPoint]:
    """Mean rewards of each update's valid episodes, from the store."""
    sql = """
        SELECT coalesce(c.stage, e.stage_key) AS stage, e."update" AS at, avg(e.task_reward), avg(e.shaped_reward)
        FROM episodes e LEFT JOIN checkpoints c ON c.checkpoint_id = e.stage_key
        WHERE e.purpose = 'train' AND e.is_valid AND e."update" >= 1 GROUP BY 1, 2 ORDER BY 1, 2
    """
    with fresh_views(state, "episodes") as connection:
        found = connection.execute(sql).fetchall()
    points = []
    for stage, update, task, shaped in found:
        for name, value in (("rollout_task_reward", task), ("rollout_shaped_reward", shaped)):
            if value is not None:
                points.append(MetricPoint(stage=stage, update=update, name=name, value=value))
    return points


def _injections(state: StateDir) -> dict[str, int]:
    with fresh_views(state, "injections") as connection:
        found = connection.execute(
            "SELECT source_dataset, count(*) FROM injections GROUP BY 1 ORDER BY 2 DESC, 1"
        ).fetchall()
    return dict(found)


def _shown(rows: Sequence[EvalRow], scores: Sequence[CheckpointScore]) -> list[FilmstripOf]:
    """A success, a failure and a truncated episode of each of the latest checkpoints, of different families if
    possible; at most MAX_FILMSTRIPS in all."""
    chosen: list[EvalRow] = []
    for score in reversed(scores):
        for outcome in (Outcome.SUCCESS, Outcome.FAILURE, Outcome.TRUNCATED):
            candidates = [row for row in rows if row.checkpoint_id == score.checkpoint_id and row.outcome == outcome]
            seen = {row.family for row in chosen}
            candidates.sort(key=lambda row: (row.family in seen, -row.turns, row.episode_id))
            chosen += candidates[:1]
    return [filmstrip_of(row) for row in chosen[:MAX_FILMSTRIPS]]


def filmstrip_of(row: EvalRow) -> FilmstripOf:
    return FilmstripOf(episode_id=row.episode_id, task_id=row.task_id, stage=row.stage or "", outcome=row.outcome)
