"""Locks of a state exclude other processes and threads, by the kernel or by files, and end with their holder."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from episode_samples import make_episode

from osworld_pipeline import file_locks
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.file_locks import MARKER, TakenError, lock, uses_lock_files
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.catalog_format import is_of_this_version
from osworld_pipeline.tables.query import run_query
from osworld_pipeline.tracking.client import open_client

HOLD = """
import sys, time
from pathlib import Path
from osworld_pipeline import file_locks
file_locks.HEARTBEAT_S, file_locks.STALE_S = 0.2, 1.0
held = file_locks.lock(Path(sys.argv[1]), is_shared=sys.argv[2] == "shared")
print("held", flush=True)
sys.stdin.read()
held.release()
"""


@pytest.fixture(params=["kernel", "files"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The path of a lock, once for each kind."""
    monkeypatch.setattr(file_locks, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(file_locks, "STALE_S", 1.0)
    if request.param == "files":
        (tmp_path / MARKER).touch()
    yield tmp_path / "tables" / "it.lock"
    assert uses_lock_files(tmp_path / "tables") == (request.param == "files")


def holder_of(path: Path, kind: str = "exclusive") -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_one_process_holds_a_lock_and_the_next_gets_it(path: Path) -> None:
    with holder_of(path) as holder:
        with pytest.raises(TakenError) as taken:
            lock(path)
        assert taken.value.holder.split()[0] == str(holder.pid)
        holder.communicate("")
    with lock(path, timeout_s=5):
        pass


def test_the_lock_of_a_killed_process_is_granted_at_the_first_request(path: Path) -> None:
    with holder_of(path) as holder:
        holder.kill()
    lock(path).release()


def test_an_idle_process_holds_its_lock_while_it_runs_or_refreshes_the_lock(path: Path) -> None:
    with holder_of(path) as holder:
        with pytest.raises(TakenError):
            lock(path, timeout_s=2.5)
        holder.communicate("")


def test_threads_exclude_each_other(path: Path) -> None:
    refused: list[bool] = []

    def ask() -> None:
        try:
            lock(path).release()
        except TakenError:
            refused.append(True)

    with lock(path):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert refused == [True]


def test_shared_locks_exclude_only_exclusive_ones(path: Path) -> None:
    with holder_of(path, "shared") as holder:
        with lock(path, is_shared=True), pytest.raises(TakenError):
            lock(path)
        holder.communicate("")
    with lock(path), pytest.raises(TakenError):
        lock(path, is_shared=True)


def test_a_lock_that_is_released_and_removed_leaves_no_file(path: Path) -> None:
    for _ in range(2):
        lock(path).release(remove=True)
        assert list(path.parent.iterdir()) == []


def test_many_processes_increment_a_counter_without_losing_an_increment(path: Path, tmp_path: Path) -> None:
    count = tmp_path / "count"
    count.write_text("0")
    program = """
import sys
from pathlib import Path
from osworld_pipeline.file_locks import lock
for _ in range(20):
    with lock(Path(sys.argv[1]), timeout_s=60):
        count = Path(sys.argv[2])
        count.write_text(str(int(count.read_text()) + 1))
"""
    processes = [subprocess.Popen([sys.executable, "-c", program, str(path), str(count)]) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert count.read_text() == "80"


def test_a_lock_file_that_was_taken_over_raises_an_error_in_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / MARKER).touch()
    path = tmp_path / "it.lock"
    monkeypatch.setattr(file_locks, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(file_locks, "STALE_S", 1.0)
    mine = lock(path)
    for holder in (path.parent / "it.lock.rw" / "holders").iterdir():
        holder.unlink()  # what the process that takes it over does
    threading.Event().wait(0.6)
    with pytest.raises(StoreError, match=r"another process took over the lock .*it\.lock"):
        mine.release()


def test_the_catalog_of_a_state_with_lock_files_is_copied_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / MARKER).touch()
    state = StateDir(tmp_path)
    TrajectoryStore(state).write_episodes("a", [make_episode("a")])
    rebuild_catalog(state)
    assert is_of_this_version(state)
    assert [tuple(row) for row in run_query(state, "SELECT count(*) FROM episodes").rows] == [(1,)]
    assert not list(tmp_path.glob("*.wal"))


def test_mlflows_database_is_not_made_in_a_state_with_lock_files(tmp_path: Path) -> None:
    (tmp_path / MARKER).touch()
    with pytest.raises(StoreError, match="set the tracking resource's uri to an MLflow server"):
        open_client(f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}")
