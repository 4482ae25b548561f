"""docs/one-node.md at the size of this machine: the node's recipe trains with two ranks next to two sglang servers that
it launches, loses a server and a rank during the run, and ends with evaluated checkpoints."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.tables.query import run_query

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.desktop, pytest.mark.timeout(5400)]
COMMAND = (
    *(sys.executable, "-m", "osworld_pipeline.cli", "train", "--recipe", "qwen3vl_4b_node", "--smoke"),
    *("--set", "engine.kind=sglang", "--set", "engine.launch.device=cpu", "--set", "engine.launch.num_servers=2"),
    *("--set", "trainer.num_processes=2", "--set", "desktop.num_replicas=8"),
)
ROOT = Path(__file__).resolve().parents[2]
RUN_LIMIT_S = 2400.0


@contextmanager
def training(folder: Path, weights: str) -> Iterator["subprocess.Popen[bytes]"]:
    log = folder / "train.log"
    environment = {**os.environ, "SGLANG_ENV": str(Path(os.environ["OSWORLD_SGLANG"]).resolve())}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*COMMAND, "--set", f"engine.weights={weights}"], cwd=folder, env=environment, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


def below(pid: int) -> dict[int, str]:
    """Command lines of all processes that `pid` started, and those they started."""
    children: dict[int, list[int]] = {}
    lines: dict[int, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            number, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(number)
            lines[number] = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    found, todo = {}, [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found[child] = lines[child]
            todo.append(child)
    return found


def one_of(process: "subprocess.Popen[bytes]", is_wanted: Callable[[str], bool], limit_s: float) -> int:
    """Waits for a descendant process whose command line is wanted, and returns its id."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        found = [pid for pid, line in below(process.pid).items() if is_wanted(line)]
        if found:
            return found[0]
        assert process.poll() is None, "the command ended before what was to be killed was there"
        time.sleep(0.2)
    raise AssertionError("what was to be killed did not appear")


def wait_for(log: Path, text: str, process: "subprocess.Popen[bytes]", limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while text not in log.read_text(errors="replace"):
        assert time.monotonic() < until, f"'{text}' did not appear: {log.read_text(errors='replace')[-2000:]}"
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        time.sleep(0.2)


@pytest.mark.parametrize("weights", ["folder", "broadcast"])
def test_training_on_one_node_survives_the_loss_of_a_server_and_of_a_rank(tmp_path: Path, weights: str) -> None:
    if not os.environ.get("OSWORLD_SGLANG"):
        pytest.skip("takes minutes and an environment of its own: make test-sglang")
    shutil.copy(ROOT / "dagster.yaml", tmp_path)
    log = tmp_path / "train.log"
    log.touch()
    with training(tmp_path, weights) as process:
        wait_for(log, "gspo_phase1: 1/", process, RUN_LIMIT_S)
        server = one_of(process, lambda line: "sglang_cpu/serve.py" in line, RUN_LIMIT_S)
        os.kill(server, signal.SIGKILL)
        wait_for(log, "gspo_phase2: 1/", process, RUN_LIMIT_S)
        rank = one_of(process, lambda line: "--rank-of" in line, RUN_LIMIT_S)
        os.kill(rank, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(RUN_LIMIT_S)
        servers = [line for line in below(process.pid).values() if "serve.py" in line]
    said = log.read_text(errors="replace")
    assert "it is restarted in 1 s" in "".join(
        path.read_text(errors="replace") for path in (tmp_path / "var/logs").glob("*.log")
    )
    assert servers == []
    if process.returncode != 0:
        with training(tmp_path, weights) as process:
            assert process.wait(RUN_LIMIT_S) == 0, log.read_text(errors="replace")[len(said) :][-3000:]
    rows = run_query(
        StateDir(tmp_path / "var"),
        "SELECT DISTINCT checkpoints.stage FROM checkpoints JOIN evals USING (checkpoint_id)",
    ).rows
    assert {stage for (stage,) in rows} >= {"sft", "gspo_phase1", "gspo_phase2"}
