"""A killed server of DesktopEnvs leaves nothing running: no launcher, no workers, and no virtual machines."""

import time
from pathlib import Path

import pytest
from desktop_env_place import find_python
from env_server_process import is_running, processes_below, running_env_server

pytestmark = [pytest.mark.desktop_env, pytest.mark.desktop, pytest.mark.slow]


def test_killed_server_leaves_no_desktop_of_desktop_envs(tmp_path: Path) -> None:
    python = find_python()
    options = ("--provider", "desktop_env", "--desktop-env-provider", "local", "--desktop-env-python", str(python))
    with running_env_server(tmp_path, *options, "--screen-size", "1280x720") as server:
        processes = processes_below(server.process.pid)
        assert len(processes) >= 8, "launcher, worker, helper and a whole desktop"
        server.process.kill()
        server.process.wait()
        end = time.monotonic() + 30
        while any(map(is_running, processes)) or list(server.temporary.iterdir()):
            left = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes if is_running(pid)]
            assert time.monotonic() < end, (left, list(server.temporary.iterdir()))
            time.sleep(0.1)
