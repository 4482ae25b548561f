"""Two states of one project, each with Dagster's pages, daemon and sensors at the same time: neither runs, ranks or
reports what belongs to the other. The asset keys of one state have a prefix."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import dagster as dg
import pytest
from episode_samples import make_episode

from assets.keys import PREFIX_VARIABLE
from osworld_pipeline.cli.in_process.instance import FOLDER
from osworld_pipeline.domain.episode import EpisodePurpose, Reward
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.project import project_files, write_project
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

START_LIMIT_S, RUN_LIMIT_S = 180.0, 240.0


def make_state(root: Path, checkpoint_id: str) -> StateDir:
    """A state with an evaluated checkpoint that has no record, so no sensor evaluates it."""
    state = StateDir(root)
    episode = make_episode(
        f"eval-{checkpoint_id}-k-t-s0", checkpoint_id=checkpoint_id, stage_key=f"eval-{checkpoint_id}-k", task_id="t",
        purpose=EpisodePurpose.EVALUATE, reward=Reward(task=1.0),
    )  # fmt: skip
    TrajectoryStore(state).write_episodes("eval", [episode])
    rebuild_catalog(state)
    return state


@contextmanager
def serving(project: Path, state: StateDir, prefix: str) -> Iterator[dg.DagsterInstance]:
    """The state's instance while `osworld-pipeline dev` serves it. `prefix` is that of its asset keys."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DAGSTER", "OSWORLD"))}
    kept[PREFIX_VARIABLE] = prefix
    command = [sys.executable, "-m", "osworld_pipeline.cli", "dev", "--state", str(state.root), "--port", str(port)]
    log = state.root.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=project, env=kept, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip

    def answers() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info", timeout=5):
            return True
        return False

    try:
        wait_until(answers, START_LIMIT_S, log)
        with dg.DagsterInstance.from_config(str(state.root / FOLDER)) as instance:
            yield instance
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_until(is_true: Callable[[], bool], limit_s: float, log: Path) -> None:
    end = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < end, log.read_text(errors="replace")[-3000:]
        time.sleep(1)


def runs_of(instance: dg.DagsterInstance) -> list[tuple[str, str]]:
    return [(run.job_name, run.status.value) for run in instance.get_runs()]


def test_daemons_of_two_states_leave_each_other_alone(tmp_path: Path) -> None:
    project = tmp_path / "project"
    write_project(project, project_files(recipe="smoke"))
    states = {name: make_state(tmp_path / name, f"gspo-{name}") for name in ("one", "other")}
    prefixes = {"one": "", "other": "team/agents"}
    with ExitStack() as stack:
        instances = {
            name: stack.enter_context(serving(project, state, prefixes[name])) for name, state in states.items()
        }
        for number, (name, instance) in enumerate(instances.items()):
            key = dg.MultiPartitionKey({"checkpoint": f"gspo-{name}", "suite": "heldout"})
            evaluations, champion = (
                dg.AssetKey([*filter(None, prefixes[name].split("/")), asset]) for asset in ("evaluations", "champion")
            )
            instance.report_runless_asset_event(dg.AssetMaterialization(evaluations, partition=key))
            log = states[name].root.with_suffix(".log")
            wait_until(lambda of=instance: ("rank", "SUCCESS") in runs_of(of), RUN_LIMIT_S, log)
            assert instance.get_latest_materialization_event(champion) is not None
            for index, (other, its) in enumerate(instances.items()):
                expected = [("rank", "SUCCESS")] if index <= number else []
                assert runs_of(its) == expected, other
                assert states[other].reports.is_dir() == (index <= number)
    for name, state in states.items():
        pages = "".join(path.read_text() for path in state.reports.glob("*.html"))
        assert f"gspo-{name}" in pages
        assert not any(f"gspo-{other}" in pages for other in states if other != name)
    assert not (project / "var").exists()
