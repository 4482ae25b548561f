"""A state on a file system without locks, such as Lustre without its option `flock`: locks are files. Hosts may see
each other's files late, as on NFS."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from command_runs import LIMIT_S, ROOT, SETTINGS

from osworld_pipeline.file_locks import MARKER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LATE = "attr_timeout=3,entry_timeout=3,negative_timeout=3"
"""Seconds after which a host sees that another one has created, changed or removed a file."""
HOLD = """
import json, random, sys, time
from pathlib import Path
from osworld_pipeline.file_locks import lock
spans = []
for _ in range(10):
    with lock(Path(sys.argv[1]), timeout_s=300):
        start = time.monotonic()
        time.sleep(random.uniform(0.005, 0.03))
        spans.append((start, time.monotonic()))
print(json.dumps(spans))
"""


class Place:
    """A project folder on a local disk, and a state on a file system without locks."""

    def __init__(self, folder: Path) -> None:
        self.project, self.state = folder / "project", folder / "lustre" / "state"
        self.project.mkdir()
        self.state.parent.mkdir()
        self._shim = folder / "no_locks_shim.so"
        source = Path(__file__).with_name("no_locks_shim.c")
        command = ["cc", "-shared", "-fPIC", "-o", str(self._shim), str(source), "-ldl"]
        subprocess.run(command, check=True)

    def configure(self, *, has_local_dagster: bool = True) -> None:
        config = (ROOT / "dagster.yaml").read_text()
        if has_local_dagster:
            config = config.replace("base_dir: var/dagster", f"base_dir: {self.project / 'records'}")
        (self.project / "dagster.yaml").write_text(config)
        tracking = {"config": {"uri": f"sqlite:///{self.project / 'mlflow.db'}"}}
        (self.project / "deployment.yaml").write_text(yaml.safe_dump({"resources": {"tracking": tracking}}))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        variables = {
            "DAGSTER_HOME": str(self.project),
            "OSWORLD_DEPLOYMENT": str(self.project / "deployment.yaml"),
            "LD_PRELOAD": str(self._shim),
            "NO_LOCKS_ROOT": str(self.state.parent),
            "COLUMNS": "400",
        }
        return subprocess.run(
            [sys.executable, "-m", "osworld_pipeline.cli", *words, "--state", str(self.state)],
            cwd=self.project, env={**os.environ, **variables}, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.desktop
def test_episodes_are_stored_and_queried_without_kernel_locks(place: Place) -> None:
    place.configure()
    collected = place.run("collect", *SETTINGS, "--oracle", "--max-tasks", "2", "--json")
    assert collected.returncode == 0, collected.stderr[-3000:]
    assert json.loads(collected.stdout)["num_success"] == 2
    assert (place.state / MARKER).exists()
    asked = place.run("query", "SELECT count(*) AS number FROM episodes WHERE is_success", "--json")
    assert asked.returncode == 0, asked.stderr
    assert '"number":2' in asked.stdout.replace(" ", "")


def test_an_old_state_gets_no_lock_files_while_other_programs_may_use_it(place: Place) -> None:
    place.configure()
    (place.state / "trajectories").mkdir(parents=True)
    done = place.run("collect", *SETTINGS, "--oracle")
    assert done.returncode == 1
    assert "has no locks (flock: No locks available)" in done.stderr
    assert f"create the empty file {MARKER} in the state folder" in done.stderr
    assert not (place.state / MARKER).exists()


def test_dagsters_records_need_a_disk_with_locks(place: Place) -> None:
    place.configure(has_local_dagster=False)
    done = place.run("collect", *SETTINGS, "--oracle")
    assert done.returncode == 1
    assert "Dagster's records in" in done.stderr


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """One folder as two hosts see it. Each host sees the other's changes late."""
    if shutil.which("bindfs") is None or not Path("/dev/fuse").exists() or os.geteuid() != 0:
        pytest.skip("two hosts are mounts of bindfs (scripts/setup hosts), which needs root and /dev/fuse")
    shared = tmp_path / "shared"
    shared.mkdir()
    with ExitStack() as stack:
        mounts = tmp_path / "first", tmp_path / "second"
        for mount in mounts:
            mount.mkdir()
            done = subprocess.run(["bindfs", "-o", LATE, str(shared), str(mount)], capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"FUSE does not mount here: {done.stderr.strip()}")
            stack.callback(subprocess.run, ["umount", str(mount)], check=True)
        yield mounts


def test_lock_files_exclude_hosts_that_see_each_others_files_late(hosts: tuple[Path, Path]) -> None:
    (hosts[0] / MARKER).touch()
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, str(host / "tables" / "it.lock")], stdout=subprocess.PIPE, text=True
        )
        for host in (*hosts, *hosts)
    ]
    spans = sorted(span for holder in holders for span in json.loads(holder.communicate(timeout=300)[0]))
    assert len(spans) == 40
    assert all(start >= end for (_, end), (start, _) in pairwise(spans)), "two held it at the same time"
