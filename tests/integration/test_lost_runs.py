"""Every named job on an instance in Postgres, with a real daemon: the process of its run is killed, and the instance
starts the run again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from jobs.on_request import COLLECT_ROLLOUTS, EVALUATE_TASKS
from jobs.pipeline import JOBS
from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.collect.plan import ORACLE
from osworld_pipeline.tables.checkpoints import read_checkpoints
from osworld_pipeline.tables.owned import read_table
from resources.start import CHAMPION
from tests.integration.postgres_server import make_project, running_postgres

START_LIMIT_S = 60.0
END_LIMIT_S = 400.0
STOP_LIMIT_S = 60.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.desktop,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("OSWORLD_CHAOS_KILLS" not in os.environ, reason="takes many minutes: make test-faults"),
]


@dataclass(frozen=True, kw_only=True)
class Case:
    job: str
    program: str = ""
    """The run is killed while it waits for this program; if empty, as soon as it has started."""
    op: str = ""
    request: Mapping[str, Any] | None = None
    """Configuration of its op, where `CHECKPOINT` stands for an id."""
    resources: Mapping[str, Any] | None = None
    overrides: Mapping[str, Any] | None = None
    """Keys of the recipe."""
    by_sensor: bool = False
    """A sensor launches it, not this test."""


CHECKPOINT = "the SFT checkpoint"
CASES = (
    Case(job="build_tables", program="record_sources"),
    Case(job="train", program="train_gspo"),
    Case(job="evaluate", program="evaluate", by_sensor=True),
    Case(
        job=EVALUATE_TASKS,
        program="evaluate",
        op="evaluate_on_tasks",
        request={"checkpoint_id": CHECKPOINT},
        overrides={"evaluation": {"seeds": [7]}},  # the sensor evaluates with the recipe's own seeds
    ),
    Case(job=COLLECT_ROLLOUTS, program="collect", op="collect_on_tasks", request={"checkpoint_id": ORACLE}),
    Case(job="rank"),
    Case(
        job="retrain",
        program="train_gspo",
        resources={"start": {"config": {"checkpoint": CHAMPION}}},
        overrides={"gspo": {"learning_rate": 2e-5}},  # with the recipe's own, the champion has both phases already
    ),
    Case(job="run_flywheel"),
    Case(job="verify_replay"),
    Case(job="compact_trajectories"),
    Case(job="collect_garbage"),
)
"""In this order: later ones need what earlier ones made."""


class Deployment:
    """A project folder with its daemon."""

    def __init__(self, home: Path, instance: dg.DagsterInstance) -> None:
        self.home, self.state, self._instance = home, StateDir(home / "var"), instance

    def launch(self, case: Case) -> None:
        recipe = {"name": "smoke", "overrides": case.overrides or {}}
        config: dict[str, Any] = {"resources": {"recipe": {"config": recipe}, **(case.resources or {})}}
        if case.op:
            config["ops"] = {case.op: {"config": self._filled(case.request or {})}}
        command = [program("dagster"), "job", "launch", "-w", "workspace.yaml", "-j", case.job]
        command += ["--config-json", json.dumps(config)]
        subprocess.run(command, cwd=self.home, check=True, timeout=START_LIMIT_S)

    def kill(self, case: Case, seen: set[str]) -> str:
        """Kills the process of a run of the job that is not in `seen`; returns the run's id."""
        run_id, process = within(END_LIMIT_S, lambda: self._victim(case, seen))
        os.kill(process, signal.SIGKILL)
        return run_id

    def _victim(self, case: Case, seen: set[str]) -> tuple[str, int] | None:
        """A run with its process, once the run has reached the point where the case kills it. A run that is killed
        before it is STARTED would end only after start_timeout_seconds."""
        waiting = parents_of(f"osworld_pipeline.runs {case.program}", self.home) if case.program else None
        for run in self.runs(case):
            process = self._process_of(run.run_id)
            if run.run_id not in seen and process and (waiting is None or process in waiting):
                return run.run_id, process
        return None

    def runs(self, case: Case) -> list[dg.DagsterRun]:
        started = dg.RunsFilter(job_name=case.job, statuses=[dg.DagsterRunStatus.STARTED])
        return list(self._instance.get_runs(started))

    def run_after(self, run_id: str) -> dg.DagsterRun | None:
        """The run that was started in place of this one, when it has ended."""
        again = self._instance.get_runs(dg.RunsFilter(tags={"dagster/parent_run_id": run_id}))
        return next((one for one in again if one.is_finished), None)

    def status(self, run_id: str) -> dg.DagsterRunStatus:
        run = self._instance.get_run_by_id(run_id)
        assert run is not None
        return run.status

    def _process_of(self, run_id: str) -> int | None:
        records = self._instance.get_records_for_run(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT).records
        for record in records:
            event = record.event_log_entry.dagster_event
            metadata = event.engine_event_data.metadata if event else {}
            if "pid" in metadata:
                return int(str(metadata["pid"].value))
        return None

    def _filled(self, request: Mapping[str, Any]) -> dict[str, Any]:
        made = {one.stage: one.checkpoint_id for one in read_checkpoints(self.state)} if request else {}
        return {name: made[Stage.SFT] if value == CHECKPOINT else value for name, value in request.items()}


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    with running_postgres() as port:
        make_project(tmp_path, port, monkeypatch)
        command = [program("dagster-daemon"), "run", "-w", "workspace.yaml"]
        daemon = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
        try:
            with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
                yield Deployment(tmp_path, instance)
        finally:
            os.killpg(daemon.pid, signal.SIGTERM)
            daemon.wait(STOP_LIMIT_S)


def test_a_run_of_each_named_job_whose_process_is_killed_is_started_again_and_succeeds(deployment: Deployment) -> None:
    assert {case.job for case in CASES} == {job.name for job in JOBS}
    for case in CASES:
        began = time.monotonic()
        seen = {run.run_id for run in deployment.runs(case)}
        if case.by_sensor:
            seen = set()
        else:
            deployment.launch(case)
        killed = deployment.kill(case, seen)
        again = within(END_LIMIT_S, lambda killed=killed: deployment.run_after(killed))
        print(f"{case.job}: {again.status.value} after {time.monotonic() - began:.0f} s")
        assert deployment.status(killed) is dg.DagsterRunStatus.FAILURE, case.job
        assert again.is_success, case.job
    assert read_table(deployment.state, "replay_buffer").num_rows > 0
    assert Stage.GSPO_PHASE2 in {one.stage for one in read_checkpoints(deployment.state)}


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def within(limit_s: float, answer: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := answer()):
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s"
        time.sleep(0.02)
    return found


def parents_of(words: str, folder: Path) -> set[int]:
    """The processes that started programs with `words` in their command line in this folder."""
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if words in command and os.readlink(entry / "cwd") == str(folder):
                found.add(int((entry / "stat").read_text().rpartition(")")[2].split()[1]))
    return found
