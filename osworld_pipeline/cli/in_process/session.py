"""Runs jobs in this process, one after the other, without Dagster's daemon, for `demo`, `train`, `backfill`, `evaluate`
and `collect`."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import dagster as dg
from rich.console import Console

from assets.evaluations import CHECKPOINTS
from assets.retries import MAX_RETRIES_TAG
from jobs.failures import reason_of
from jobs.pipeline import EVALUATE
from osworld_pipeline.cli.in_process.bars import Bars, shown_bars
from osworld_pipeline.cli.in_process.instance import open_instance
from osworld_pipeline.cli.in_process.pools import handled_interrupts, pools_of, wait_for_pools
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import PipelineError, StoreError
from osworld_pipeline.file_locks import TakenError, lock
from osworld_pipeline.file_system import need_file_system
from osworld_pipeline.runs.launch.fork_server import kept_fork_server
from osworld_pipeline.runs.rollouts.embedded_server import kept_env_server
from resources.launcher import Launcher
from resources.local_launcher import PROGRAM_ENV, LocalLauncher
from resources.progress import watched_progress
from resources.state import RecipeResource, StateResource

MIN_FREE_BYTES = 1_000_000_000
PROCESS_TAG = "osworld/demo_pid"
"""Tag of a run of such a command: the id of its process."""


class JobStoppedError(PipelineError):
    """A run in this process failed, or was interrupted."""


@dataclass(frozen=True, kw_only=True)
class InProcess:
    defs: dg.Definitions
    instance: dg.DagsterInstance
    source: RecipeResource
    state_root: Path
    bars: Bars

    def run(
        self,
        job: str,
        *,
        partition: dg.MultiPartitionKey | None = None,
        request: Mapping[str, Any] | None = None,
        assets: Sequence[dg.AssetKey] | None = None,
        resources: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Runs a job, after waiting for pools that other Dagster runs hold. `request`: configuration of the job's ops,
        by name. `assets`: those of the job to materialize; None for all. `resources`: configuration of resources, by
        name. Raises JobStoppedError with the sentence of the first failed step or after SIGINT, and PipelineError as
        wait_for_pools."""
        run_id = str(uuid4())
        definition = self.defs.resolve_job_def(job)
        self.instance.add_event_listener(run_id, self.bars)
        try:
            wait_for_pools(
                self.instance,
                pools_of(definition),
                state=StateDir(self.state_root.resolve()),
                say=self.bars.show_wait,
            )
            with handled_interrupts(), watched_progress(run_id, self.bars.show):
                result = definition.execute_in_process(
                    instance=self.instance,
                    run_id=run_id,
                    raise_on_error=False,
                    partition_key=partition,
                    asset_selection=assets,
                    # No retries: Dagster's daemon must not repeat the run of a command whose process has ended.
                    tags={PROCESS_TAG: str(os.getpid()), MAX_RETRIES_TAG: "0"},
                    run_config={
                        "loggers": {"console": {"config": {"log_level": "CRITICAL"}}},
                        "resources": {
                            "recipe": {"config": self.source.model_dump(mode="json", exclude_none=True)},
                            "state": {"config": self._state_config()},
                            **{name: {"config": dict(config)} for name, config in (resources or {}).items()},
                        },
                        "ops": {name: {"config": dict(config)} for name, config in (request or {}).items()},
                    },
                )
        except KeyboardInterrupt as error:
            raise JobStoppedError("interrupted from the keyboard") from error
        if not result.success:
            raise JobStoppedError(_first_failure(result))

    def _state_config(self) -> dict[str, str]:
        """Dagster drops what the code location gives a resource as soon as a run configures it, so the object store is
        named again."""
        deployed = (self.defs.resources or {})["state"]
        assert isinstance(deployed, StateResource)
        return StateResource(path=str(self.state_root), remote=deployed.remote).as_config()

    def expect(self, job: str, *, times: int = 1, assets: Sequence[dg.AssetKey] | None = None) -> None:
        """Makes the bars count the assets of this job; `assets` as in `run`."""
        keys = self.defs.resolve_job_def(job).asset_layer.selected_asset_keys if assets is None else assets
        self.bars.expect(times * len(list(keys)))

    def evaluate(self, checkpoint_ids: Sequence[str], suites: Sequence[str]) -> None:
        """Each checkpoint on each suite, one run each; finished evaluations are not repeated. Raises JobStoppedError
        and PipelineError as `run`."""
        self.instance.add_dynamic_partitions(str(CHECKPOINTS.name), list(checkpoint_ids))
        self.expect(EVALUATE, times=len(checkpoint_ids) * len(suites))
        for suite in suites:
            for checkpoint_id in checkpoint_ids:
                self.run(EVALUATE, partition=dg.MultiPartitionKey({"checkpoint": checkpoint_id, "suite": suite}))


@contextmanager
def open_in_process(
    defs: dg.Definitions, *, source: RecipeResource, state_root: Path, console: Console, starts_warm: bool = False
) -> Iterator[InProcess]:
    """`starts_warm`: programs that import torch are expected. They share their imports, which begin at once, if this
    machine runs them.

    Raises:
        PipelineError: less than 1 GB is free, the file system cannot store a state, another such program runs on this
            state, or as open_instance.
    """
    state = StateDir(state_root.resolve())
    _need_disk(state)
    need_file_system(state.root)
    is_warm = starts_warm and _runs_programs_here(defs)
    with _only_one(state), kept_fork_server(PROGRAM_ENV) if is_warm else nullcontext():
        instance = open_instance(state)
        try:
            _end_stale_runs(instance)
            with kept_env_server(), shown_bars(console) as bars:
                yield InProcess(defs=defs, instance=instance, source=source, state_root=state_root, bars=bars)
        finally:
            instance.dispose()


def _runs_programs_here(defs: dg.Definitions) -> bool:
    launcher = (defs.resources or {})["launcher"]
    assert isinstance(launcher, Launcher)
    return isinstance(launcher.runs_on, LocalLauncher)


def _first_failure(result: dg.ExecuteInProcessResult) -> str:
    for event in result.all_events:
        if event.event_type == dg.DagsterEventType.STEP_FAILURE:
            return reason_of(event)
    return "the run was cancelled"


def _end_stale_runs(instance: dg.DagsterInstance) -> None:
    """A killed program leaves its run STARTED. Only one program runs at a time, so any such run is dead."""
    unfinished = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.NOT_STARTED]
    for run in instance.get_runs(dg.RunsFilter(statuses=unfinished)):
        if PROCESS_TAG in run.tags:
            instance.report_run_failed(run, "its process was killed; the next command continues its work")
            instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)


def _need_disk(state: StateDir) -> None:
    state.root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(state.root).free
    if free < MIN_FREE_BYTES:
        raise StoreError(
            f"only {free / 1e9:.1f} GB are free on the disk of {state.root}, and a run needs "
            f"{MIN_FREE_BYTES / 1e9:.0f} GB: free some space, or give --state a folder on another disk"
        )


@contextmanager
def _only_one(state: StateDir) -> Iterator[None]:
    try:
        only = lock(state.root / "demo.lock")
    except TakenError as error:
        raise PipelineError(
            f"another demo, train, backfill, evaluate or collect (process {error.holder}) runs on {state.root}: wait "
            "for it or stop it"
        ) from error
    with only:
        yield
