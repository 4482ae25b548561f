"""A Ray of several nodes on this machine, held until SIGTERM; prints where it is. `python ray_nodes_process.py FOLDER
NODES`, where NODES is JSON: for each node but the head its CPUs and other resources, by their counts."""

import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from osworld_pipeline.runs.launch.ray_head import PR_SET_CHILD_SUBREAPER, REAP_LIMIT_S, kill_descendants

SMALL = ("--object-store-memory=100000000", "--dashboard-agent-listen-port=0", "--include-log-monitor=false")


def main(folder: Path, nodes: list[dict[str, float]]) -> None:
    is_over = threading.Event()
    ctypes.CDLL("libc.so.6", use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda signum, frame: is_over.set())
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    }
    port, dashboard_port = _free_ports(2)
    try:
        _start("--head", f"--port={port}", "--include-dashboard=true", "--dashboard-host=127.0.0.1",
               f"--dashboard-port={dashboard_port}", "--num-cpus=0", f"--temp-dir={folder / 'ray'}")  # fmt: skip
        for resources in nodes:
            others = {name: count for name, count in resources.items() if name != "CPU"}
            _start(f"--address=127.0.0.1:{port}", f"--num-cpus={resources['CPU']}", f"--resources={json.dumps(others)}")
        print(json.dumps({"url": f"http://127.0.0.1:{dashboard_port}", "token": token.read_text()}), flush=True)
        is_over.wait()
    finally:
        kill_descendants(limit_s=REAP_LIMIT_S)  # `ray stop` would stop every Ray of this machine


def _start(*options: str) -> None:
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray), "start", "--disable-usage-stats", "--node-ip-address=127.0.0.1", *SMALL, *options]
    subprocess.run(command, stdout=sys.stderr, check=True)


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
