"""How benchmarks distinguish programs by the CPU time they use."""

import subprocess
import sys

from benchmarks.cpu_clock import UNSEEN, CpuClock

BURN_HALF_A_SECOND = "import time\nwhile time.process_time() < 0.5: pass"


def test_the_cpu_time_of_an_ended_child_is_counted_under_its_name() -> None:
    with CpuClock() as clock:
        subprocess.run([sys.executable, "-c", BURN_HALF_A_SECOND, "env_server.main"], check=True, timeout=60)
    assert 0.3 <= clock.seconds["env server"] <= 0.7
    assert clock.seconds[UNSEEN] >= 0


def test_cpu_time_used_before_the_block_is_not_counted() -> None:
    child = subprocess.Popen([sys.executable, "-c", f"{BURN_HALF_A_SECOND}\nprint(flush=True)\ninput()", "-ISc"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    with CpuClock() as clock:
        pass
    child.communicate(b"\n", timeout=60)
    assert clock.seconds.get("guest agent", 0.0) < 0.2
