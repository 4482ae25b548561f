"""Backfill from the command line: any checkpoints on any suites, in this process; a stopped one continues episode by
episode."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from rich.console import Console

from assets.evaluations import SUITES
from jobs.pipeline import RANK
from osworld_pipeline.cli.in_process.session import open_in_process
from osworld_pipeline.domain.shown_commands import pipeline_line
from osworld_pipeline.domain.state import STATE_VARIABLE, StateDir
from osworld_pipeline.errors import DatasetError, TableError
from osworld_pipeline.evaluation.leaderboard_rows import leaderboard_rows
from osworld_pipeline.evaluation.suite_files import EvalSuite
from osworld_pipeline.runs.checkpoints.registry import all_checkpoints, no_such_checkpoint
from osworld_pipeline.runs.evaluate.leaderboard import read_leaderboard
from osworld_pipeline.runs.evaluate.plan import load_suite, plan_evaluation
from resources.state import RecipeResource, configured_state


def run_backfill(
    defs: dg.Definitions,
    *,
    source: RecipeResource,
    state_root: Path,
    checkpoint_ids: Sequence[str],
    suites: Sequence[str],
    console: Console,
    on_start: Callable[[Sequence[str], Sequence[EvalSuite]], None] = lambda checkpoint_ids, suites: None,
) -> list[dict[str, Any]]:
    """`checkpoint_ids`: empty for all. Returns their rows of the leaderboard (`leaderboard_rows`), with the name of the
    suite, in the requested order. `on_start` is called with the evaluations after all checks.

    Raises:
        PipelineError: before anything starts: no such checkpoint, suite or recipe, or as open_in_process; later: a pool
            stays full (wait_for_pools).
        JobStoppedError: an evaluation failed; finished ones are kept.
    """
    state, recipe = StateDir(state_root.resolve()), source.load()
    known = [checkpoint.checkpoint_id for checkpoint in all_checkpoints(state)]
    if unknown := [name for name in checkpoint_ids if name not in known]:
        raise no_such_checkpoint(state, unknown[0])
    chosen = list(dict.fromkeys(checkpoint_ids)) or known
    if not chosen:
        advised = pipeline_line(state, "train", *source.options)
        raise TableError(f"there is no checkpoint in {state.root} yet: train one first ({advised})")
    loaded = [load_suite(state, recipe, name) for name in dict.fromkeys(suites)]
    if strange := [suite.name for suite in loaded if suite.name not in SUITES.get_partition_keys()]:
        raise DatasetError(
            f"suite '{strange[0]}' is not a partition here: Dagster has only the suites of the state "
            f"{configured_state()}; set {STATE_VARIABLE} to {state.root} and run again"
        )
    starts_warm = len(chosen) * len(loaded) > 1
    with open_in_process(defs, source=source, state_root=state_root, console=console, starts_warm=starts_warm) as here:
        on_start(chosen, loaded)
        here.expect(RANK)
        here.evaluate(chosen, [suite.name for suite in loaded])
        here.run(RANK)
    rows = {row["stage_key"]: row for row in leaderboard_rows(read_leaderboard(state))}
    planned = [(suite, plan_evaluation(recipe, name, suite=suite)) for suite in loaded for name in chosen]
    return [{"suite": suite.name, **rows[plan.stage_key]} for suite, plan in planned]
