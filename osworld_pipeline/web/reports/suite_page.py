"""The page of one suite: its leaderboard, paired comparisons, success by domain and task, outcomes of episodes, and the
cost of a success."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from osworld_pipeline.domain.checkpoint import Checkpoint
from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.breakdown import TaskChange, domain_of
from osworld_pipeline.evaluation.changes import Training
from osworld_pipeline.evaluation.effect import RULE, Effect, SeedSpread, judge_effect
from osworld_pipeline.evaluation.intervals import Rate, rate_over_tasks
from osworld_pipeline.evaluation.leaderboard import LeaderboardRow, LeaderboardTable, Versus
from osworld_pipeline.evaluation.scores import EvalRow, is_mixed, rates_by_seed, successes_by_task
from osworld_pipeline.web.charts.plots import Chart, Point, Series, Zone, line_chart
from osworld_pipeline.web.charts.start_zone import start_zone
from osworld_pipeline.web.charts.training import OUTCOME_COLOURS
from osworld_pipeline.web.evaluation_names import read_evaluation_names
from osworld_pipeline.web.pages import write_page
from osworld_pipeline.web.reports.filmstrips import FilmstripOf, read_filmstrips
from osworld_pipeline.web.reports.report import faults_by_kind, filmstrip_of, settings_facts, whole_changes

MAX_COLUMNS = 12
"""Checkpoints side by side in the tables of domains and tasks."""
MAX_TASKS = 400
MAX_CHANGES = 30


@dataclass(frozen=True, kw_only=True)
class MixPart:
    """One outcome; `start` and `share` are fractions of all episodes."""

    name: str
    colour: int
    count: int
    start: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A checkpoint against another one of the same table."""

    checkpoint_id: str
    versus: Versus
    effect: Effect
    """Effect between these two checkpoints alone, that is, of one training run."""
    gains: tuple[TaskChange, ...]
    regressions: tuple[TaskChange, ...]
    num_more: int
    """Changed tasks that are not listed."""


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """A domain or a task: a rate for each of the shown checkpoints; None without a valid episode."""

    name: str
    rates: tuple[Rate | None, ...]


def suite_file(suite_name: str, evaluation_key: str) -> str:
    """One page for each evaluation setting: another recipe's evaluation of the same tasks is another page."""
    return f"suite-{suite_name}-{evaluation_key}.html"


def write_suite_page(
    state: StateDir,
    table: LeaderboardTable,
    rows: Sequence[EvalRow],
    *,
    suite_name: str,
    suite_digest: str,
    recipe_name: str,
    checkpoints: Sequence[Checkpoint],
    confidence: float,
    apart: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write `reports/suite-<name>-<key>.html`. `rows`: of this table's evaluations; `checkpoints`: all of the state;
    `apart`: checkpoints with the same settings on other desktops, with these desktops.
    Raises TableError, StoreError."""
    shown = [row.score.checkpoint_id for row in table.rows[:MAX_COLUMNS]]
    tasks = by_task(rows, shown)
    name = read_evaluation_names(state).get(table.evaluation_key)
    return write_page(
        state.reports / suite_file(suite_name, table.evaluation_key),
        "reports/suite.html.jinja",
        suite_name=suite_name,
        settings=name.settings if name else "",
        table=table,
        apart=apart,
        is_mixed=is_mixed(table.desktops),
        confidence=confidence,
        mixes={row.score.checkpoint_id: outcome_mix(row) for row in table.rows},
        pairs=pairs_of(table, rows),
        changes=whole_changes(rows, [row.score for row in table.rows], Training(checkpoints), confidence=confidence),
        rule=RULE,
        charts=_progress(table, rows, {one.checkpoint_id: one.num_updates for one in checkpoints}, confidence),
        shown=shown,
        num_hidden=len(table.rows) - len(shown),
        domains=by_domain(rows, shown, confidence=confidence),
        tasks=tasks[:MAX_TASKS],
        num_more_tasks=max(0, len(tasks) - MAX_TASKS),
        faults=faults_by_kind(rows),
        filmstrips=read_filmstrips(state, _best_episodes(table, rows)),
        facts={
            "Evaluation": table.evaluation_key,
            "Recipe": recipe_name,
            **settings_facts(rows),
            "Suite": suite_name,
            "Suite hash": suite_digest,
            "Tasks": str(len({row.task for row in rows})),
        },
    )


def outcome_mix(row: LeaderboardRow) -> tuple[MixPart, ...]:
    """Shares of all episodes by outcome, success first."""
    counts = row.score.outcomes
    total = sum(counts.values())
    found: list[MixPart] = []
    start = 0.0
    for outcome in Outcome:
        if count := counts.get(str(outcome), 0):
            share = count / total
            found.append(
                MixPart(name=str(outcome), colour=OUTCOME_COLOURS[outcome], count=count, start=start, share=share)
            )
            start += share
    return tuple(found)


def pairs_of(table: LeaderboardTable, rows: Sequence[EvalRow]) -> list[Pair]:
    """Each checkpoint against its parent, if that was evaluated with the same settings, and against the best."""
    found = []
    for row in table.rows:
        for versus in dict.fromkeys((row.versus_parent, row.versus_best)):
            if versus is not None:
                comparison = versus.changes.comparison
                assert comparison is not None, "a leaderboard compares only what has tasks in common"
                rates = rates_by_seed(one for one in rows if one.checkpoint_id == versus.checkpoint_id)
                spread = SeedSpread.of(rates, confidence=comparison.confidence)
                gains, regressions = versus.changes.gains, versus.changes.regressions
                left_out = max(0, len(gains) - MAX_CHANGES) + max(0, len(regressions) - MAX_CHANGES)
                found.append(
                    Pair(
                        checkpoint_id=row.score.checkpoint_id,
                        versus=versus,
                        effect=judge_effect(comparison, spread=spread),
                        gains=gains[:MAX_CHANGES],
                        regressions=regressions[:MAX_CHANGES],
                        num_more=left_out,
                    )
                )
    return found


def by_domain(rows: Sequence[EvalRow], shown: Sequence[str], *, confidence: float) -> list[GroupRow]:
    found = []
    for name in sorted({domain_of(row) for row in rows}):
        rates = tuple(
            _rate([row for row in rows if row.checkpoint_id == one and domain_of(row) == name], confidence)
            for one in shown
        )
        found.append(GroupRow(name=name, rates=rates))
    return found


def by_task(rows: Sequence[EvalRow], shown: Sequence[str]) -> list[GroupRow]:
    """Tasks with the largest differences between checkpoints first."""
    cells: dict[tuple[str, str], list[EvalRow]] = {}
    for row in rows:
        cells.setdefault((row.task, row.checkpoint_id), []).append(row)
    found = [
        GroupRow(name=task_id, rates=tuple(_rate(cells.get((task_id, one), []), 0.95) for one in shown))
        for task_id in sorted({row.task for row in rows})
    ]

    def spread(row: GroupRow) -> float:
        values = [rate.value for rate in row.rates if rate is not None]
        return max(values) - min(values) if values else 0.0

    return sorted(found, key=lambda row: (-spread(row), row.name))


def _rate(rows: Sequence[EvalRow], confidence: float) -> Rate | None:
    rate = rate_over_tasks(list(successes_by_task(rows).values()), confidence=confidence)
    return rate if rate.n else None


def _progress(
    table: LeaderboardTable, rows: Sequence[EvalRow], num_updates_of: Mapping[str, int], confidence: float
) -> list[Chart]:
    """Success over updates, for stages with several evaluated checkpoints, with the band of their start."""
    by_stage: dict[str, list[Point]] = {}
    starts = {row.score.checkpoint_id: row.parent_id for row in table.rows}
    for row in table.rows:
        score = row.score
        stage_key = score.checkpoint_id.rpartition("-u")[0] or score.checkpoint_id
        if score.checkpoint_id in num_updates_of and score.n:
            at = num_updates_of[score.checkpoint_id]
            point = Point(x=at, y=score.success_rate, low=score.low, high=score.high)
            by_stage.setdefault(stage_key if stage_key in num_updates_of else score.checkpoint_id, []).append(point)
    charts = [
        line_chart(
            name, [Series(name="success", points=tuple(sorted(points, key=lambda one: one.x)))], x_label="updates",
            y_label="valid episodes", is_share=True, band=f"interval at {confidence:.0%}",
            zones=_start_zones(rows, starts.get(name), confidence),
        )
        for name, points in sorted(by_stage.items()) if len(points) > 1
    ]  # fmt: skip
    return [chart for chart in charts if chart is not None]


def _start_zones(rows: Sequence[EvalRow], start: str | None, confidence: float) -> list[Zone]:
    zone = start_zone([row for row in rows if row.checkpoint_id == start], confidence=confidence)
    return [zone] if zone else []


def _best_episodes(table: LeaderboardTable, rows: Sequence[EvalRow]) -> list[FilmstripOf]:
    """The longest success and failure of the first checkpoint; a truncated episode instead of one that is missing."""
    best = table.rows[0].score.checkpoint_id
    chosen = []
    for outcome in (Outcome.SUCCESS, Outcome.FAILURE, Outcome.TRUNCATED):
        found = [row for row in rows if row.checkpoint_id == best and row.outcome == outcome]
        chosen += sorted(found, key=lambda row: (-row.turns, row.episode_id))[:1]
    return [filmstrip_of(row) for row in chosen[:2]]
