"""A Ray of several nodes on this machine. `python -m benchmarks.ray_nodes FOLDER NODES ADDED` holds it until SIGTERM,
and prints its addresses and token as JSON. NODES is JSON: for each node but the head its CPUs and other resources, by
their counts. ADDED is null, or the same for a node of which Ray's autoscaler adds as many as are needed, up to four."""

import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.processes import BenchmarkError
from osworld_pipeline.runs.launch.ray_head import (
    PR_SET_CHILD_SUBREAPER,
    REAP_LIMIT_S,
    free_ports,
    kill_descendants,
    start_command,
)

SMALL = ("--object-store-memory=100000000",)
STOP_LIMIT_S = 60.0
LOG = "start.log"
HEAD_ID = "f" * 56
"""In hexadecimal digits: the autoscaler knows the head by it."""
MAX_ADDED = 4
IDLE_MINUTES = 0.2
"""After which a node that was added is removed."""


@dataclass(frozen=True, kw_only=True)
class RayNodes:
    url: str
    """Address of the dashboard."""
    address: str
    """The argument of `ray.init`."""
    token: str
    variables: Mapping[str, str]
    """Environment of processes that connect to it."""


@contextmanager
def ray_nodes(
    nodes: Sequence[Mapping[str, float]], environment: Mapping[str, str], *, added: Mapping[str, float] | None = None
) -> Iterator[RayNodes]:
    """Runs a head without CPUs and these nodes until the block ends. Their processes have `environment`. `added`: the
    resources of each node that the autoscaler adds and removes; None for no autoscaler."""
    folder = Path(tempfile.mkdtemp(prefix="nodes-"))  # short, because paths of sockets may have 107 characters
    holder = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.ray_nodes", str(folder), *map(json.dumps, (list(map(dict, nodes)), added))],
        cwd=Path(__file__).resolve().parents[1],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**environment, "TMPDIR": str(folder), "HOME": str(folder)},
    )
    try:
        assert holder.stdout is not None
        with holder.stdout as output:
            place = output.readline()
        if not place:
            raise BenchmarkError(f"Ray did not start: {(folder / LOG).read_text()[-2000:]}")
        yield RayNodes(**json.loads(place), variables=access(folder))
    finally:
        holder.terminate()
        holder.wait(STOP_LIMIT_S)
        shutil.rmtree(folder, ignore_errors=True)


def access(folder: Path) -> dict[str, str]:
    """Variables of processes that connect; the token is the file `token` in the folder."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token"), "RAY_USAGE_STATS_ENABLED": "0"}


def main(folder: Path, nodes: list[dict[str, float]], added: dict[str, float] | None) -> None:
    is_over = threading.Event()
    ctypes.CDLL("libc.so.6", use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda signum, frame: is_over.set())
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    os.environ |= access(folder) | {
        "RAY_prestart_worker_first_driver": "0",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    }
    port, dashboard_port = free_ports(2)
    start = partial(_start, folder / LOG)
    growing: list[str] = []
    if added is not None:
        os.environ |= {
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
        }
        config = folder / "autoscaler.json"
        config.write_text(json.dumps(autoscaler_config(f"127.0.0.1:{port}", added)))
        growing = [f"--autoscaling-config={config}"]
    try:
        start("--head", *growing, f"--port={port}", "--include-dashboard=true", "--dashboard-host=127.0.0.1",
              f"--dashboard-port={dashboard_port}", "--num-cpus=0", f"--temp-dir={folder / 'ray'}")  # fmt: skip
        for node in nodes:
            others = json.dumps({name: count for name, count in node.items() if name != "CPU"})
            start(f"--address=127.0.0.1:{port}", f"--num-cpus={node['CPU']:g}", f"--resources={others}")
        place = {
            "url": f"http://127.0.0.1:{dashboard_port}",
            "address": f"127.0.0.1:{port}",
            "token": token.read_text(),
        }
        # A raylet that a test kills is reaped at once. To its workers a zombie is alive, and they would not end.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        print(json.dumps(place), flush=True)
        is_over.wait()
    finally:
        kill_descendants(limit_s=REAP_LIMIT_S)  # `ray stop` would stop every Ray of this machine


def autoscaler_config(address: str, added: Mapping[str, float]) -> dict[str, Any]:
    """The provider of Ray's own tests starts nodes as processes of this machine."""
    empty_lists = (
        "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
        "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter",
    )  # fmt: skip
    return {
        "cluster_name": "grows",
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": address,
            "head_node_id": HEAD_ID,
            "launch_multiple": True,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "max_workers": MAX_ADDED,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_MINUTES,
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "added": {
                "resources": {"object_store_memory": 100_000_000, **added},
                "node_config": {},
                "min_workers": 0,
                "max_workers": MAX_ADDED,
            },
        },
        **{key: {} for key in ("auth", "docker", "file_mounts")},
        **{key: [] for key in empty_lists},
        "file_mounts_sync_continuously": False,
    }


def _start(log_path: Path, *options: str) -> None:
    with log_path.open("ab") as log:
        subprocess.run(start_command(*SMALL, *options), stdout=log, stderr=log, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
