"""The demo: runs `train_and_evaluate` in this process with bars, and ends with a table of success rates."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import uuid4

import dagster as dg
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from assets.evaluations import CHECKPOINT_ASSETS
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DependencyError, PipelineError, StoreError
from osworld_pipeline.evaluation.scores import read_scores
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.load import source_lines
from osworld_pipeline.runs.evaluation_plan import plan_evaluation
from resources.progress import ProgressLine
from resources.state import RecipeResource

JOB = "train_and_evaluate"
DEMO_PID_TAG = "osworld/demo_pid"
LINE_EVERY_S = 15.0
MIN_FREE_BYTES = 1_000_000_000
EXAMPLE_QUERY = "SELECT checkpoint_id, count(*) AS tasks, avg(success::INT) AS success FROM evals GROUP BY 1 ORDER BY 1"


class Bars:
    """Hears a run's events: one bar for the assets, one for each stage that tells its progress."""

    def __init__(self, progress: Progress, num_assets: int) -> None:
        self._progress = progress
        self._assets = progress.add_task("assets", total=num_assets, note="")
        self._stages: dict[str, TaskID] = {}
        self._last_line_s = time.monotonic()

    def __call__(self, entry: dg.EventLogEntry) -> None:
        event = entry.dagster_event
        if event is None:
            self._hear(ProgressLine.parse(entry.user_message or ""))
        elif event.event_type == dg.DagsterEventType.STEP_START:
            self._progress.update(self._assets, note=escape(event.step_key or ""))
        elif event.event_type == dg.DagsterEventType.ASSET_MATERIALIZATION:
            self._progress.update(self._assets, advance=1, note="")

    def _hear(self, line: ProgressLine | None) -> None:
        if line is None:
            return
        if line.stage not in self._stages:
            self._stages[line.stage] = self._progress.add_task(line.stage, total=line.total, note="")
        self._progress.update(self._stages[line.stage], completed=line.done, total=line.total, note=escape(line.note))
        if not self._progress.console.is_terminal and self._is_time_for_a_line(line):
            # Bars are drawn on terminals only; whoever reads a log sees a line now and then.
            self._progress.console.print(f"{line.stage}: {line.done}/{line.total} {line.note}", highlight=False)

    def _is_time_for_a_line(self, line: ProgressLine) -> bool:
        now = time.monotonic()
        if line.done < line.total and now - self._last_line_s < LINE_EVERY_S:
            return False
        self._last_line_s = now
        return True


def run_demo(defs: dg.Definitions, *, source: RecipeResource, state_root: Path, console: Console) -> int:
    """Runs everything by the recipe of `source`; a second run continues where the first ended. Returns the exit status.

    Raises:
        PipelineError: before anything starts: a bad recipe, no disk space, another demo at work.
    """
    recipe = source.load()
    state = StateDir(state_root.resolve())
    _need_disk(state)
    with _only_demo(state):
        instance = _open_instance()
        _end_stale_runs(instance)
        console.print(
            f"[bold]osworld-pipeline demo[/]: recipe [cyan]{recipe.name}[/], state in [cyan]{state_root}[/]",
            highlight=False,
        )
        for line in source_lines(recipe):
            console.print(f"  {escape(line)}", highlight=False)
        error = _run_job(defs, instance, source, state_root, console)
        checkpoint_ids = _latest_checkpoints(instance)
        instance.dispose()
    if error:
        console.print(f"\n[bold red]The demo stopped:[/] {escape(error)}", highlight=False)
        console.print("What is finished is kept: run it again and it goes on from there.")
        return 1
    _show_scores(state, recipe, checkpoint_ids, console)
    _show_where_to_look(state_root, console)
    return 0


def _run_job(
    defs: dg.Definitions, instance: dg.DagsterInstance, source: RecipeResource, state_root: Path, console: Console
) -> str | None:
    """Runs the job with bars; the sentence of the first failed step, or None."""
    run_id = str(uuid4())
    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description:<20}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}[/]"),
    )
    with Progress(*columns, console=console) as progress:
        num_assets = len(list(defs.resolve_job_def(JOB).asset_layer.selected_asset_keys))
        instance.add_event_listener(run_id, Bars(progress, num_assets))
        try:
            result = defs.resolve_job_def(JOB).execute_in_process(
                instance=instance,
                run_id=run_id,
                raise_on_error=False,
                tags={DEMO_PID_TAG: str(os.getpid())},
                run_config={
                    "loggers": {"console": {"config": {"log_level": "CRITICAL"}}},
                    "resources": {
                        "recipe": {"config": source.model_dump()},
                        "state": {"config": {"path": str(state_root)}},
                    },
                },
            )
        except KeyboardInterrupt:
            return "interrupted from the keyboard"
    if result.success:
        return None
    return _first_failure(result)


def _first_failure(result: dg.ExecuteInProcessResult) -> str:
    for event in result.all_events:
        if event.event_type == dg.DagsterEventType.STEP_FAILURE:
            data = event.step_failure_data
            error = data.error
            while error is not None and error.cause is not None:
                error = error.cause
            described = data.user_failure_data.description if data.user_failure_data else None
            # Dagster puts the class before the sentence; of our own errors the sentence says it all.
            message = error.message.strip().removeprefix(f"osworld_pipeline.errors.{error.cls_name}: ") if error else ""
            return f"{event.step_key}: {described or message or 'no reason given'}"
    return "the run was cancelled"


def _latest_checkpoints(instance: dg.DagsterInstance) -> list[str]:
    """The checkpoints that the assets stand for now, the base first."""
    ids: list[str] = []
    for asset in CHECKPOINT_ASSETS:
        event = instance.get_latest_materialization_event(dg.AssetKey(asset))
        if event is not None and event.asset_materialization is not None:
            ids.append(str(event.asset_materialization.metadata["checkpoint_id"].value))
    return list(dict.fromkeys(ids))  # a flywheel without a round stands for the SFT checkpoint


def _show_scores(state: StateDir, recipe: Recipe, checkpoint_ids: list[str], console: Console) -> None:
    keys = [plan_evaluation(recipe, checkpoint_id).stage_key for checkpoint_id in checkpoint_ids]
    found = read_scores(state, confidence=recipe.evaluation.confidence, stage_keys=keys)
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


def _show_where_to_look(state_root: Path, console: Console) -> None:
    console.print("\n[bold]Where to look next[/]")
    console.print("  Dagster   make dev     http://127.0.0.1:3000   assets, lineage, runs")
    console.print("  MLflow    make mlflow  http://127.0.0.1:5000   parameters, curves, models")
    console.print(f"  Report    {state_root}/reports/report.html", highlight=False)
    console.print(f"  DuckDB    {state_root}/osworld.duckdb, for example:", highlight=False)
    console.print(f'            .venv/bin/osworld-pipeline query "{EXAMPLE_QUERY}"', highlight=False, soft_wrap=True)


def _open_instance() -> dg.DagsterInstance:
    if not Path("dagster.yaml").is_file():
        raise DependencyError("there is no dagster.yaml here: run the demo from the repository root")
    Path("var/dagster").mkdir(parents=True, exist_ok=True)
    return dg.DagsterInstance.from_config(str(Path.cwd()))


def _end_stale_runs(instance: dg.DagsterInstance) -> None:
    """A killed demo leaves its run STARTED for ever; only one demo runs at a time, so any such run is dead."""
    unfinished = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.NOT_STARTED]
    for run in instance.get_runs(dg.RunsFilter(statuses=unfinished)):
        if DEMO_PID_TAG in run.tags:
            instance.report_run_failed(run, "its process was killed; the next demo continues its work")
            instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)


def _need_disk(state: StateDir) -> None:
    state.root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(state.root).free
    if free < MIN_FREE_BYTES:
        raise StoreError(
            f"only {free / 1e9:.1f} GB are free where {state.root} lies, and the demo needs "
            f"{MIN_FREE_BYTES / 1e9:.0f} GB: free some, or give --state a folder on another disk"
        )


@contextmanager
def _only_demo(state: StateDir) -> Iterator[None]:
    path = state.root / "demo.lock"
    lock: IO[str] = path.open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise PipelineError(f"another demo (process {holder}) works in {state.root}: wait for it or stop it") from error
    try:
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
    finally:
        lock.close()
