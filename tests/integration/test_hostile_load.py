"""Some desktops of one env server belong to policies that are hostile in every way at once. The episodes on the others
lose nothing, the server stays small, and nothing is left. `make test-hostile` runs it for longer."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from env_server_process import RunningServer, processes_below, running_env_server
from fault_load import wait_until_free
from hostile_load import run_policies
from server_traces import traces_of, wait_for_the_same

pytestmark = [
    pytest.mark.desktop,
    pytest.mark.slow,
    pytest.mark.skipif(
        "OSWORLD_HOSTILE_MINUTES" not in os.environ, reason="disturbs tests beside it: make test-hostile"
    ),
]

MINUTES = float(os.environ.get("OSWORLD_HOSTILE_MINUTES", "0"))
"""0 for the short form, which does not judge times."""
NUM_DESKTOPS = int(os.environ.get("OSWORLD_HOSTILE_DESKTOPS", "8"))
SEED = int(os.environ.get("OSWORLD_HOSTILE_SEED", str(time.time_ns() % 10**6)))
NUM_HOSTILE = max(1, NUM_DESKTOPS // 8)
HOSTILE_S = MINUTES * 60 or 10.0
ALONE_S = HOSTILE_S / 2 if MINUTES else 3.0
SERVER_MB = 300 + 150 * NUM_HOSTILE
MOST_GROWTH = 1.5
"""Of the p99 of an honest step."""
REPLACE_LIMIT_S = 30.0 + NUM_DESKTOPS
TIME_LIMIT_S = 600 + 2 * HOSTILE_S


@pytest.mark.timeout(TIME_LIMIT_S)
async def test_honest_episodes_lose_nothing_next_to_hostile_ones(tmp_path: Path) -> None:
    options = ("--screen-size", "640x480", "--desktop-memory-mb", "512")
    with running_env_server(tmp_path, *options, num_replicas=NUM_DESKTOPS) as server:
        url, pid, num_honest = server.url, server.process.pid, NUM_DESKTOPS - NUM_HOSTILE
        before = traces_of(server)
        alone = await run_policies(url, pid, num_honest=num_honest, num_hostile=0, seconds=ALONE_S, seed=SEED)
        print(f"\nseed {SEED}, alone: {alone}")
        beside = await run_policies(
            url, pid, num_honest=num_honest, num_hostile=NUM_HOSTILE, seconds=HOSTILE_S, seed=SEED + 1
        )
        growth = beside.p99_s / alone.p99_s
        print("".join(f"tampering, {count} times: {reason}\n" for reason, count in beside.reasons.items()), end="")
        print(f"{NUM_HOSTILE} of {NUM_DESKTOPS} hostile: {beside}; p99 grew to {growth:.2f} times")
        capacity_s = await wait_until_free(url, NUM_DESKTOPS, REPLACE_LIMIT_S)
        wait_for_the_same(before, server, limit_s=REPLACE_LIMIT_S)
        print(f"all desktops free after {capacity_s:.1f} s; the server takes {SERVER_MB} MB at most")
        check_end(server)
    assert alone.lost + beside.lost == []
    assert min(alone.num_honest, beside.num_honest) >= num_honest
    assert beside.peak_mb < SERVER_MB
    assert beside.hostile["tampering"] > 0
    assert set(beside.hostile) <= {"tampering", "reward 0"}
    if MINUTES:
        assert growth < MOST_GROWTH


def check_end(server: RunningServer) -> None:
    """The server ends cleanly, and no process, control group or file of its desktops is left."""
    processes = {pid: started for pid in processes_below(server.process.pid) if (started := started_at(pid))}
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0, server.log.read_text()[-2000:]
    until = time.monotonic() + 10
    while left := [pid for pid, started in processes.items() if started_at(pid) == started]:
        assert time.monotonic() < until, left
        time.sleep(0.1)
    assert list(Path("/sys/fs/cgroup").rglob(f"osworld-desktop-{server.process.pid}-*")) == []
    assert list(server.temporary.iterdir()) == []


def started_at(pid: int) -> str | None:
    """The start in kernel ticks, which distinguish a process from a later one of the same id; None if it ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None
