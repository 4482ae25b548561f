"""The demo: trains, evaluates every checkpoint and ranks them, in this process with bars; ends with a table of success
rates and what changed between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from assets.evaluations import CHECKPOINT_ASSETS
from jobs.in_process import InProcess, JobStoppedError, open_in_process
from jobs.pipeline import RANK, TRAIN
from jobs.what_changed import show_changes
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.changes import Change, Training, changes_of
from osworld_pipeline.evaluation.replay_share import ReplayShare, read_replay_share
from osworld_pipeline.evaluation.scores import EvalRow, not_ranked_together, read_evals, score_checkpoints
from osworld_pipeline.evaluation.suite_files import HELDOUT
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.load import source_lines
from osworld_pipeline.runs.evaluation_plan import plan_evaluation
from osworld_pipeline.runs.registered import all_checkpoints
from resources.state import RecipeResource

EXAMPLE_QUERY = "SELECT checkpoint_id, count(*) AS tasks, avg(success::INT) AS success FROM evals GROUP BY 1 ORDER BY 1"


@dataclass(frozen=True, kw_only=True)
class DemoEnd:
    """What it came to."""

    status: int
    """To exit with."""
    changes: tuple[Change, ...] = ()
    """Those that were compared: each checkpoint against those before it, on held-out tasks."""
    replay: ReplayShare | None = None
    """None where it did not end."""


def run_demo(defs: dg.Definitions, *, source: RecipeResource, state_root: Path, console: Console) -> DemoEnd:
    """Runs everything by the recipe of `source`; a second run continues where the first ended.

    Raises:
        PipelineError: before anything starts: a bad recipe, no disk space, another demo at work.
    """
    recipe = source.load()
    console.print(
        f"[bold]osworld-pipeline demo[/]: recipe [cyan]{recipe.name}[/], state in [cyan]{state_root}[/]",
        highlight=False,
    )
    for line in source_lines(recipe):
        console.print(f"  {escape(line)}", highlight=False)
    with open_in_process(defs, source=source, state_root=state_root, console=console, starts_warm=True) as here:
        ended = _run_all(here)
    if isinstance(ended, JobStoppedError):
        console.print(f"\n[bold red]The demo stopped:[/] {escape(str(ended))}", highlight=False)
        console.print("What is finished is kept: run it again and it goes on from there.")
        return DemoEnd(status=1)
    state = StateDir(state_root.resolve())
    rows = read_evals(state, stage_keys=[plan_evaluation(recipe, checkpoint_id).stage_key for checkpoint_id in ended])
    training = Training(all_checkpoints(state))
    changes = changes_of(rows, ended, training, confidence=recipe.evaluation.confidence)
    replay = read_replay_share(state, ended)
    _show_scores(rows, recipe, ended, console)
    show_changes(changes, replay, console)
    _show_where_to_look(state_root, console)
    return DemoEnd(status=0, changes=tuple(change for change in changes if change.effect is not None), replay=replay)


def _run_all(here: InProcess) -> list[str] | JobStoppedError:
    """The checkpoints, the base first; or what stopped it."""
    try:
        here.expect(TRAIN)
        here.expect(RANK)
        here.run(TRAIN)
        checkpoint_ids = _latest_checkpoints(here.instance)
        here.evaluate(checkpoint_ids, [HELDOUT])
        here.run(RANK)
    except JobStoppedError as error:
        return error
    return checkpoint_ids


def _latest_checkpoints(instance: dg.DagsterInstance) -> list[str]:
    """The checkpoints that the assets stand for now, the base first."""
    ids: list[str] = []
    for asset in CHECKPOINT_ASSETS:
        event = instance.get_latest_materialization_event(dg.AssetKey(asset))
        if event is not None and event.asset_materialization is not None:
            ids.append(str(event.asset_materialization.metadata["checkpoint_id"].value))
    return list(dict.fromkeys(ids))  # a flywheel without a round stands for the SFT checkpoint


def _show_scores(rows: Sequence[EvalRow], recipe: Recipe, checkpoint_ids: list[str], console: Console) -> None:
    found = score_checkpoints(rows, confidence=recipe.evaluation.confidence)
    scores = {score.checkpoint_id: score for score in found}
    table = Table(title="Success on held-out tasks", title_justify="left")
    for name in ("checkpoint", "success", f"{recipe.evaluation.confidence:.0%} interval", "n", "faults", "turns"):
        table.add_column(name, justify="left" if name == "checkpoint" else "right", no_wrap=True)
    for checkpoint_id in checkpoint_ids:
        score = scores[checkpoint_id]
        table.add_row(
            score.checkpoint_id,
            f"{score.success_rate:.1%}" if score.n else "-",
            f"{score.low:.1%} - {score.high:.1%}" if score.n else "-",
            f"{score.successes}/{score.n}",
            str(score.num_faults),
            f"{score.mean_turns:.1f}",
        )
    console.print()
    console.print(table)
    console.print("Raw success by the graders; Wilson intervals; faults stand outside the n.")
    for sentence in not_ranked_together(found):
        console.print(f"[bold]{sentence[:1].upper()}{sentence[1:]}.[/]")


def _show_where_to_look(state_root: Path, console: Console) -> None:
    console.print("\n[bold]Where to look next[/]")
    console.print("  Dagster   make dev     http://127.0.0.1:3000   assets, lineage, runs")
    console.print("  MLflow    make mlflow  http://127.0.0.1:5000   parameters, curves, models")
    console.print(f"  Viewer    .venv/bin/osworld-pipeline view --state {state_root}", highlight=False, soft_wrap=True)
    console.print(f"  Reports   {state_root}/reports/index.html", highlight=False)
    console.print(f"  DuckDB    {state_root}/osworld.duckdb, for example:", highlight=False)
    console.print(f'            .venv/bin/osworld-pipeline query "{EXAMPLE_QUERY}"', highlight=False, soft_wrap=True)
