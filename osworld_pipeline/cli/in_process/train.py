"""Training from the command line: trains the chosen stages, evaluates every checkpoint and ranks them, in this process
with progress bars; ends with a table of success rates and their changes. The demo is this with its own recipe."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from assets.keys import key_of
from jobs.pipeline import RANK, TRAIN
from osworld_pipeline.cli.in_process.session import InProcess, JobStoppedError, open_in_process
from osworld_pipeline.cli.in_process.what_changed import show_changes
from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.near_names import did_you_mean
from osworld_pipeline.domain.shown_commands import mlflow_line, pipeline_line
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import RecipeError, StoreError, TableError
from osworld_pipeline.evaluation.changes import Change, Training, changes_of
from osworld_pipeline.evaluation.replay_share import ReplayShare, read_replay_share
from osworld_pipeline.evaluation.scores import EvalRow, not_ranked_together, read_evals, score_checkpoints
from osworld_pipeline.evaluation.suite_files import HELDOUT
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.load import source_lines
from osworld_pipeline.runs.checkpoints.endpoints import is_address
from osworld_pipeline.runs.checkpoints.external import find_or_add
from osworld_pipeline.runs.checkpoints.registry import all_checkpoints, register_checkpoint
from osworld_pipeline.runs.evaluate.plan import plan_evaluation
from resources.deployment import deployment_tracking
from resources.start import CHAMPION, TRAINED_STAGES
from resources.state import RecipeResource

STAGES = (Stage.BASE, *map(Stage, TRAINED_STAGES))
EXAMPLE_QUERY = "SELECT checkpoint_id, count(*) AS tasks, avg(success::INT) AS success FROM evals GROUP BY 1 ORDER BY 1"


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """The stages to train, and the checkpoint to start from."""

    stages: tuple[Stage, ...] = ()
    """Consecutive stages in order; empty for all, or with `start` for the flywheel and later ones."""
    start: str = ""
    """A checkpoint id, `champion`, a folder or hub:OWNER/NAME, which the first stage trains; empty for the asset
    upstream."""

    @property
    def chosen(self) -> tuple[Stage, ...]:
        if self.stages:
            return self.stages
        return STAGES[STAGES.index(Stage.FLYWHEEL) :] if self.start else STAGES

    @property
    def is_whole(self) -> bool:
        return self.chosen == STAGES

    @classmethod
    def parse(cls, stages: str, start: str) -> "TrainRequest":
        """`stages`: comma-separated names.

        Raises:
            RecipeError: a name is unknown, the stages are not consecutive, or `start` is given and `stages` contains
                base, which creates a model.
        """
        names = [name.strip() for name in stages.split(",") if name.strip()]
        for name in names:
            if name not in STAGES:
                hint = did_you_mean(name, STAGES)
                raise RecipeError(f"there is no stage '{name}'; there are: {', '.join(STAGES)}{hint}")
        chosen = tuple(stage for stage in STAGES if stage in names)
        if chosen and chosen != STAGES[STAGES.index(chosen[0]) : STAGES.index(chosen[-1]) + 1]:
            raise RecipeError(
                f"the stages {', '.join(chosen)} are not consecutive: each trains the checkpoint of the one before "
                f"({', '.join(STAGES)})"
            )
        if start and Stage.BASE in chosen:
            raise RecipeError("the stage base creates a model, and --from names one: remove base from --stages")
        return cls(stages=chosen, start=start)


@dataclass(frozen=True, kw_only=True)
class TrainEnd:
    """The result of a training."""

    status: int
    """Exit status."""
    changes: tuple[Change, ...] = ()
    """Comparisons of each checkpoint with earlier ones, on held-out tasks."""
    replay: ReplayShare | None = None
    """None if training did not finish."""


def run_train(
    defs: dg.Definitions,
    *,
    command: str,
    request: TrainRequest,
    source: RecipeResource,
    state_root: Path,
    console: Console,
) -> TrainEnd:
    """Runs the stages with the recipe of `source`; a second run continues where the first ended.

    Raises:
        PipelineError: before anything starts: a bad recipe, no checkpoint to start from, or as open_in_process; later:
            a pool stays full (wait_for_pools).
    """
    recipe = source.load()
    state = StateDir(state_root.resolve())
    with open_in_process(defs, source=source, state_root=state_root, console=console, starts_warm=True) as here:
        start = find_start(here.instance, state, request)
        console.print(
            f"[bold]osworld-pipeline {command}[/]: recipe [cyan]{recipe.name}[/], state in [cyan]{state_root}[/]",
            highlight=False,
        )
        for line in source_lines(recipe):
            console.print(f"  {escape(line)}", highlight=False)
        watching = f"  To watch its desktops: {pipeline_line(state, 'view')}, page Live desktops"
        console.print(watching, highlight=False, markup=False, soft_wrap=True)
        ended = _run_all(here, request, start)
    if isinstance(ended, JobStoppedError):
        console.print(f"\n[bold red]Training stopped:[/] {escape(str(ended))}", highlight=False)
        console.print("Finished work is kept: run the command again to continue.")
        return TrainEnd(status=1)
    rows = read_evals(state, stage_keys=[plan_evaluation(recipe, checkpoint_id).stage_key for checkpoint_id in ended])
    training = Training(all_checkpoints(state))
    changes = changes_of(rows, ended, training, confidence=recipe.evaluation.confidence)
    replay = read_replay_share(state, ended)
    _show_scores(rows, recipe, ended, console)
    show_changes(changes, replay, console)
    _show_where_to_look(state, console)
    return TrainEnd(status=0, changes=tuple(change for change in changes if change.effect is not None), replay=replay)


def find_start(instance: dg.DagsterInstance, state: StateDir, request: TrainRequest) -> Checkpoint | None:
    """The checkpoint that the first stage trains, added to the table if needed; None if the stage creates the base.

    Raises:
        PipelineError: there is no such checkpoint, or it has no trainable weights.
    """
    first = request.chosen[0]
    if request.start == CHAMPION:
        checkpoint_id = deployment_tracking(os.environ).champion(state)
        if checkpoint_id is None:
            raise TableError("no champion is set: evaluate a trained checkpoint, or name a checkpoint (--from)")
        return register_checkpoint(state, checkpoint_id)
    if request.start:
        found = find_or_add(state, request.start)
        if is_address(found.path):
            raise StoreError(
                f"{found.checkpoint_id} is an endpoint ({found.path}) and has no weights to train: name "
                "a checkpoint with weights"
            )
        return found
    if first is Stage.BASE:
        return None
    upstream = f"{STAGES[STAGES.index(first) - 1]}_checkpoint"
    checkpoint_id = _checkpoint_of(instance, upstream)
    if checkpoint_id is None:
        raise TableError(
            f"the stage {first} trains the checkpoint of {upstream}, which does not exist yet: add the stages before "
            "it to --stages, or name a checkpoint (--from)"
        )
    return register_checkpoint(state, checkpoint_id)


def _run_all(here: InProcess, request: TrainRequest, start: Checkpoint | None) -> list[str] | JobStoppedError:
    """The checkpoints in the order in which they were made, beginning with the starting one; or the error that stopped
    training."""
    stages = request.chosen
    assets = None if request.is_whole else assets_to_train(here.defs, stages)
    resources: dict[str, dict[str, Any]] = {}
    if request.start and start is not None:
        resources["start"] = {"checkpoint": start.checkpoint_id, "stage": str(stages[0]), "has_budget": False}
    try:
        here.expect(TRAIN, assets=assets)
        here.expect(RANK)
        here.run(TRAIN, assets=assets, resources=resources)
        made = [_checkpoint_of(here.instance, f"{stage}_checkpoint") for stage in stages]
        found = [start.checkpoint_id if start else None, *made]
        # A flywheel without a round has the checkpoint that it starts from.
        checkpoint_ids = list(dict.fromkeys(one for one in found if one is not None))
        here.evaluate(checkpoint_ids, [HELDOUT])
        here.run(RANK)
    except JobStoppedError as error:
        return error
    return checkpoint_ids


def assets_to_train(defs: dg.Definitions, stages: Sequence[Stage]) -> list[dg.AssetKey]:
    """The job's data assets, which are cheap if their inputs are unchanged, and the checkpoints of `stages`."""
    layer = defs.resolve_job_def(TRAIN).asset_layer
    wanted = {key_of(f"{stage}_checkpoint") for stage in stages}
    every = {key_of(f"{stage}_checkpoint") for stage in STAGES}
    return sorted(key for key in layer.selected_asset_keys if key in wanted or key not in every)


def _checkpoint_of(instance: dg.DagsterInstance, asset: str) -> str | None:
    """The current checkpoint of the asset."""
    event = instance.get_latest_materialization_event(key_of(asset))
    if event is None or event.asset_materialization is None:
        return None
    return str(event.asset_materialization.metadata["checkpoint_id"].value)


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
    console.print("Raw success by the graders; Wilson intervals; n excludes faults.")
    for sentence in not_ranked_together(found):
        console.print(f"[bold]{sentence[:1].upper()}{sentence[1:]}.[/]")


def _show_where_to_look(state: StateDir, console: Console) -> None:
    tracking = deployment_tracking(os.environ)
    pages = f"{tracking.pages_url}   parameters, curves, models"
    if tracking.is_server:
        mlflow = [f"  MLflow    {pages}"]
    else:
        mlflow = [f"  MLflow    {mlflow_line(tracking.resolve(state))}", f"            {pages}"]
    console.print("\n[bold]Where to look next[/]")
    lines = [
        f"  Dagster   {pipeline_line(state, 'dev')}",
        "            http://127.0.0.1:3000   assets, lineage, runs",
        *mlflow,
        f"  Viewer    {pipeline_line(state, 'view')}",
        f"  Reports   {state.reports / 'index.html'}",
        f"  DuckDB    {state.catalog}, for example:",
        f"            {pipeline_line(state, 'query', EXAMPLE_QUERY)}",
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
