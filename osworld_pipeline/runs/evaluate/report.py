"""Collects the content of the HTML reports: scores and episodes from the tables, curves from MLflow."""

import logging
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from osworld_pipeline.domain.checkpoint import Ancestor, Checkpoint, Stage
from osworld_pipeline.domain.near_names import did_you_mean
from osworld_pipeline.domain.shown_commands import pipeline_line
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError, TableError, TrackingError
from osworld_pipeline.evaluation.changes import Training, changes_of_stage
from osworld_pipeline.evaluation.leaderboard import build_leaderboard
from osworld_pipeline.evaluation.scores import EvalRow, read_evals
from osworld_pipeline.evaluation.suite_files import suite_names
from osworld_pipeline.evaluation.training_record import MetricPoint, read_training, stage_of, stages_at_work
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.runs.checkpoints.ids import CARD, evaluation_key, recipe_suite
from osworld_pipeline.runs.checkpoints.registry import all_checkpoints, register_checkpoint
from osworld_pipeline.runs.evaluate.plan import (
    evaluation_stage_key,
    heldout_suite,
    load_suite,
)
from osworld_pipeline.tables.catalog import one_snapshot
from osworld_pipeline.tracking.client import SQLITE, tracking_errors
from osworld_pipeline.tracking.runs import metric_history
from osworld_pipeline.web.charts.metrics import REPORTED_METRICS
from osworld_pipeline.web.reports.report import write_report
from osworld_pipeline.web.reports.report_index import write_index
from osworld_pipeline.web.reports.suite_page import write_suite_page
from osworld_pipeline.web.reports.training_page import write_training_page

CURVES = ("loss", "kl", "trainer_sampler_logprob_diff")
TRAINED = (Stage.SFT, Stage.FLYWHEEL, Stage.GSPO_PHASE1, Stage.GSPO_PHASE2)
Say = Callable[[str], None]


def reported_checkpoints(
    state: StateDir, recipe: Recipe, named: Sequence[str], *, recipe_options: Sequence[str] = ()
) -> list[str]:
    """The checkpoints of `named`, or of all if it is empty, that were evaluated on the recipe's held-out tasks. Empty
    if all evaluations of this state used other settings. `recipe_options`: the command-line arguments that selected the
    recipe, for the command that an error suggests.

    Raises:
        TableError: one does not exist, none of `named` has such an evaluation, or there are no evaluations at all.
    """
    ids = [register_checkpoint(state, name).checkpoint_id for name in named]
    ids = ids or [checkpoint.checkpoint_id for checkpoint in all_checkpoints(state)]
    found = list(_recorded_stage_keys(state, recipe, ids))
    if not found and not named and not read_evals(state):
        advised = pipeline_line(state, "evaluate", *recipe_options)
        raise TableError(f"no checkpoint of {state.root} has been evaluated: run {advised}")
    if not found and named:
        advised = pipeline_line(state, "backfill", "--checkpoints", ",".join(ids), *recipe_options)
        raise TableError(
            f"none of these checkpoints of {state.root} was evaluated on the held-out tasks of recipe {recipe.name} "
            f"with these settings: run {advised}, or name the recipe that they were evaluated with"
        )
    return found


def _recorded_stage_keys(state: StateDir, recipe: Recipe, checkpoint_ids: Collection[str]) -> dict[str, str]:
    """The evaluation of each checkpoint on the recipe's held-out tasks."""
    key = evaluation_key(recipe, suite_digest=heldout_suite(recipe).digest)
    asked = {name: evaluation_stage_key(name, key) for name in checkpoint_ids}
    evaluated = {row.stage_key for row in read_evals(state, stage_keys=list(asked.values()))}
    return {name: stage_key for name, stage_key in asked.items() if stage_key in evaluated}


def make_report(
    state: StateDir, recipe: Recipe, *, checkpoint_ids: Collection[str], tracking_uri: str, say: Say | None = None
) -> Path:
    """Writes `reports/report.html` and returns its path: these checkpoints' evaluations on the recipe's held-out tasks,
    then all evaluations with other settings. `say` is called if MLflow does not answer and the curves are omitted; None
    logs a warning."""
    path = _write_report(state, recipe, checkpoint_ids, tracking_uri, say=say)
    write_index(state)
    return path


def _write_report(
    state: StateDir, recipe: Recipe, checkpoint_ids: Collection[str], tracking_uri: str, *, say: Say | None
) -> Path:
    checkpoints = all_checkpoints(state)
    metrics = [
        point
        for checkpoint in checkpoints
        if checkpoint.checkpoint_id in checkpoint_ids and checkpoint.stage in TRAINED
        for point in _history(tracking_uri, checkpoint.checkpoint_id, str(checkpoint.stage), CURVES, say)
    ]
    return write_report(
        state,
        metrics=metrics,
        suite_digest=recipe_suite(recipe).digest,
        recipe_name=recipe.name,
        confidence=recipe.evaluation.confidence,
        stage_keys=list(_recorded_stage_keys(state, recipe, checkpoint_ids).values()),
        checkpoints=checkpoints,
    )


def training_stages(state: StateDir) -> list[str]:
    """Keys of the stages that have trained or are training. Raises TableError."""
    trained = [
        Ancestor.parse(checkpoint.checkpoint_id).stage_key
        for checkpoint in all_checkpoints(state)
        if checkpoint.stage in TRAINED
    ]
    return list(dict.fromkeys([*trained, *stages_at_work(state)]))


def find_stage(state: StateDir, named: str) -> str:
    """The key of the stage that `named` means: a checkpoint that it made, its own key, or a kind such as `gspo_phase1`
    for the newest stage of that kind.

    Raises:
        TableError: there is no such stage; names the existing ones.
    """
    stages = training_stages(state)
    wanted = Ancestor.parse(named).stage_key
    if wanted in stages:
        return wanted
    of_kind = [key for key in stages if stage_of(key) == named]
    if of_kind:
        return max(of_kind, key=lambda key: (_ended_at(state, key), key))
    known = ", ".join(sorted(stages)) or "none yet"
    near = did_you_mean(named, [*stages, *map(stage_of, stages)])
    raise TableError(f"no training run '{named}' in {state.root}; there are: {known}{near}")


def make_training_report(
    state: StateDir, stage_key: str, *, tracking_uri: str, confidence: float = 0.95, say: Say | None = None
) -> Path:
    """Writes `reports/training-<stage key>.html` of a finished or running stage; returns its path."""
    path = _write_training(
        state, stage_key, all_checkpoints(state), read_evals(state), tracking_uri, confidence=confidence, say=say
    )
    write_index(state)
    return path


def make_suite_report(state: StateDir, recipe: Recipe, suite_name: str, *, recipe_options: Sequence[str] = ()) -> Path:
    """Writes `reports/suite-<name>-<evaluation key>.html` of all checkpoints evaluated on the suite with the recipe's
    settings; returns its path. `recipe_options` as in `reported_checkpoints`.

    Raises:
        DatasetError: there is no such suite.
        TableError: there is no such evaluation.
    """
    path = _write_suite(state, recipe, suite_name, recipe_options)
    write_index(state)
    return path


def _write_suite(state: StateDir, recipe: Recipe, suite_name: str, recipe_options: Sequence[str] = ()) -> Path:
    suite = load_suite(state, recipe, suite_name)
    rows = _rows_of(read_evals(state), evaluation_key(recipe, suite_digest=suite.digest))
    if not rows:
        advised = pipeline_line(state, "backfill", "--suites", suite_name, *recipe_options)
        raise TableError(
            f"no checkpoint of {state.root} was evaluated on the suite {suite_name} with these settings of recipe "
            f"{recipe.name}: run {advised}, or name the recipe and the settings that it was evaluated with"
        )
    num_planned = len(suite.tasks) * len(recipe.evaluation.seeds)
    checkpoints = all_checkpoints(state)
    board = build_leaderboard(
        rows,
        {checkpoint.checkpoint_id: checkpoint.parent_id for checkpoint in checkpoints},
        planned={row.stage_key: num_planned for row in rows},
        confidence=recipe.evaluation.confidence,
    )
    table, *others = board.tables
    shown = {row.score.checkpoint_id for row in table.rows}
    return write_suite_page(
        state,
        table,
        [row for row in rows if row.checkpoint_id in shown],
        apart=[(row.score.checkpoint_id, other.desktops) for other in others for row in other.rows],
        suite_name=suite_name,
        suite_digest=suite.digest,
        recipe_name=recipe.name,
        checkpoints=checkpoints,
        confidence=recipe.evaluation.confidence,
    )


def make_all_reports(
    state: StateDir,
    recipe: Recipe,
    *,
    checkpoint_ids: Collection[str],
    stage_keys: Collection[str],
    tracking_uri: str,
    say: Say | None = None,
    on_page: Callable[[Path], None] | None = None,
) -> list[Path]:
    """Writes, from one snapshot, the report of these checkpoints, the page of each suite with evaluations under the
    recipe, the page of each of these stages that trained, and finally the index; returns the paths in this order.
    `on_page` is called with each written page."""
    paths: list[Path] = []

    def add(path: Path) -> None:
        paths.append(path)
        if on_page is not None:
            on_page(path)

    with one_snapshot(state):
        confidence = recipe.evaluation.confidence
        add(_write_report(state, recipe, checkpoint_ids, tracking_uri, say=say))
        evals, checkpoints = read_evals(state), all_checkpoints(state)
        evaluated = {row.evaluation_key for row in evals}
        for name in suite_names(state.suites):
            try:
                suite = load_suite(state, recipe, name)
            except DatasetError as error:
                if say is not None and (state.suites / f"{name}.json").is_file():
                    say(f"suite {name} has no page: {error}")
                continue  # an OSWorld suite without a checkout of OSWorld gives no message
            if evaluation_key(recipe, suite_digest=suite.digest) in evaluated:
                add(_write_suite(state, recipe, name))
        for stage_key in training_stages(state):
            if stage_key in stage_keys:
                add(_write_training(state, stage_key, checkpoints, evals, tracking_uri, confidence=confidence, say=say))
        add(write_index(state))
    return paths


def _write_training(
    state: StateDir,
    stage_key: str,
    checkpoints: Sequence[Checkpoint],
    evals: Sequence[EvalRow],
    tracking_uri: str,
    *,
    confidence: float,
    say: Say | None,
) -> Path:
    names = [metric.name for metric in REPORTED_METRICS]
    metrics = _history(tracking_uri, stage_key, stage_of(stage_key), names, say)
    record = read_training(state, stage_key, checkpoints=checkpoints, metrics=metrics, evals=evals)
    changes = changes_of_stage(evals, record.num_updates_of, Training(checkpoints), confidence=confidence)
    return write_training_page(state, record, changes=changes, confidence=confidence)


def _rows_of(rows: Sequence[EvalRow], key: str) -> list[EvalRow]:
    return [row for row in rows if row.evaluation_key == key]


def _ended_at(state: StateDir, stage_key: str) -> float:
    """The time at which the stage's checkpoint was written; infinity for a running stage."""
    card = state.checkpoints / stage_key / CARD
    return card.stat().st_mtime if card.is_file() else math.inf


def _history(tracking_uri: str, stage_key: str, stage: str, names: Sequence[str], say: Say | None) -> list[MetricPoint]:
    """Empty if MLflow has no data or is unreachable."""
    if tracking_uri.startswith(SQLITE) and not Path(tracking_uri.removeprefix(SQLITE)).exists():
        return []
    try:
        with tracking_errors(tracking_uri, f"cannot read the curves of {stage_key}"):
            found = metric_history(tracking_uri, stage_key, names)
    except TrackingError as error:
        (say or logging.getLogger(__name__).warning)(f"curves are left out: {error}")
        return []
    return [MetricPoint(stage=stage, update=update, name=name, value=value) for name, update, value in found]
