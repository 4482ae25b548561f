"""The processes of environments: a trainer that is killed leaves none of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
TRAINER = """
import sys, time
from osgym_envs import CountingEnv
from osworld_pipeline.integrations.osgym.worker import EnvProcess, State

if __name__ == "__main__":
    processes = [EnvProcess(CountingEnv, {"notes": sys.argv[1]}, worker) for worker in range(2)]
    for process in processes:
        process.ask("reset")
    for process in processes:
        while process.receive() is None:
            time.sleep(0.01)
    print(*(process.pid for process in processes), flush=True)
    time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_environments_of_a_killed_trainer_close_their_desktops_and_end(tmp_path: Path) -> None:
    script, notes = tmp_path / "trainer.py", tmp_path / "notes"
    script.write_text(TRAINER)
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    trainer = subprocess.Popen([sys.executable, script, notes], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(10)
        deadline = time.monotonic() + 20
        while any(map(is_running, pids)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        trainer.kill()
        trainer.communicate()
    assert sorted(line.split()[0] for line in notes.read_text().splitlines()) == ["closed", "closed", "made", "made"]


def test_importing_the_worker_makes_no_folder_and_does_not_load_torch(tmp_path: Path) -> None:
    """OSGym's data server makes a folder when it is imported."""
    room = "osworld_pipeline.integrations.osgym"
    script = f"import sys, {room}.worker, {room}.environment; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.stdout == "False\n"
    assert list(tmp_path.iterdir()) == []
