"""A child that gets the parent-death signal finds out whether its parent ends, even if the signal comes early."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

CHILD = """
import os, signal, sys, time
from pathlib import Path
from osworld_pipeline.runs.parent import die_with_parent, has_lost_parent

parent_pid, result = int(sys.argv[1]), Path(sys.argv[2])

def ended(signum, frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end of the process sends it again
    at_once = has_lost_parent(parent_pid)
    temp = result.with_suffix(".new")
    temp.write_text(f"{at_once} {has_lost_parent(parent_pid, limit_s=float(sys.argv[3]))}")
    temp.rename(result)
    os._exit(0)

signal.signal(signal.SIGTERM, ended)
die_with_parent(signal.SIGTERM, parent_pid=parent_pid)
print("ready", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, threading, time

def start():
    words = [sys.executable, "-c", sys.argv[1], str(os.getpid()), *sys.argv[2:4]]
    child = subprocess.Popen(words, stdout=subprocess.PIPE)
    child.stdout.readline()

thread = threading.Thread(target=start)
thread.start()
thread.join()  # its end sends the signal; the process goes on
time.sleep(float(sys.argv[4]))
os._exit(0)
"""


@pytest.mark.parametrize(("goes_on_s", "limit_s", "expected"), [(0.5, 20.0, "False True"), (8.0, 0.2, "False False")])
def test_a_parent_that_ends_soon_after_the_signal_counts_as_lost_and_one_that_continues_does_not(
    tmp_path: Path, goes_on_s: float, limit_s: float, expected: str
) -> None:
    result = tmp_path / "result"
    words = [sys.executable, "-c", PARENT, CHILD, str(result), str(limit_s), str(goes_on_s)]
    with subprocess.Popen(words) as parent:
        deadline = time.monotonic() + 60
        while not result.exists():
            assert time.monotonic() < deadline, "the child got no signal"
            time.sleep(0.05)
        parent.kill()
    assert result.read_text() == expected
