"""The output of steps is kept and shown, and a kill at any moment leaves no process that continues to show it."""

import random
import subprocess
import sys
import time
from pathlib import Path

from launches import wait_for_no_process

ROOT = Path(__file__).resolve().parents[3]
NUM_KILLS = 6
PROGRAM = """
import sys, time
from pathlib import Path
from osworld_pipeline.compute_logs import LocalLogs

logs = LocalLogs.from_config_value(None, {"base_dir": sys.argv[1]})
print("begins", flush=True)
with logs.capture_logs(["run", "step"]):
    print("to the world", flush=True)
    print("to those who listen", file=sys.stderr, flush=True)
    time.sleep(float(sys.argv[2]))
print("after", logs.is_capture_complete(["run", "step"]), flush=True)
"""


def start(folder: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(folder), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_output_is_kept_in_files_and_shown(tmp_path: Path) -> None:
    out, err = start(tmp_path, 2.0).communicate(timeout=60)
    assert out.splitlines() == ["begins", "to the world", "after True"]
    assert "to those who listen" in err
    assert (tmp_path / "run" / "step.out").read_text() == "to the world\n"
    assert (tmp_path / "run" / "step.err").read_text() == "to those who listen\n"
    assert not wait_for_no_process(tmp_path, limit_s=0)


def test_a_kill_at_any_moment_leaves_no_process_that_reads_the_files(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    for _ in range(NUM_KILLS):
        program = start(tmp_path, 60.0)
        assert program.stdout is not None
        assert program.stdout.readline() == "begins\n"
        time.sleep(rng.uniform(0.0, 0.02))
        program.kill()
        program.wait(10)
        program.communicate(timeout=10)  # any process that shows the files holds the pipes
    assert not wait_for_no_process(tmp_path, limit_s=10), f"seed {seed}"
