"""Durable files: whole or absent, and locks with a limit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from osworld_pipeline.atomic_io import locked, remove_stale_temps, replacing, write_file
from osworld_pipeline.errors import StoreError, TableError
from osworld_pipeline.temp_names import temp_name


def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait(timeout=30)
    return child.pid


def test_a_failed_write_keeps_the_old_file_and_leaves_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_file(path, b"old")

    def fail_midway() -> None:
        with replacing(path) as temp:
            temp.write_bytes(b"half")
            raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        fail_midway()
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("x", b"old")]


def test_only_files_of_writers_that_are_surely_dead_are_removed(tmp_path: Path) -> None:
    ours = temp_name()
    elsewhere = ours.replace("-", "-0", 1)
    dead, others, silent, before_namespaces, foreign = (
        tmp_path / ours.replace(f".{os.getpid()}.", f".{dead_pid()}."),
        tmp_path / elsewhere,
        tmp_path / elsewhere.replace("tmp", "tmp-wal"),
        tmp_path / f".host.{dead_pid()}.{'0' * 32}.tmp",
        tmp_path / ".somebody.tmp",
    )
    kept = {tmp_path / ours, others, before_namespaces, foreign}
    for path in (dead, silent, *kept):
        path.touch()
    for companion in (".wal", "-journal", "-wal", "-shm"):
        Path(f"{dead}{companion}").touch()
    for path in (silent, foreign, tmp_path / ours):
        os.utime(path, (1e9, 1e9))
    assert remove_stale_temps(tmp_path) == 6
    assert set(tmp_path.iterdir()) == kept


REMOVE = """
import sys
from pathlib import Path
from osworld_pipeline.atomic_io import remove_stale_temps
print(remove_stale_temps(Path(sys.argv[1])))
"""


def test_a_container_with_the_same_host_name_keeps_the_file_of_a_live_writer_outside(tmp_path: Path) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False, timeout=30).returncode:
        pytest.skip("this user may make no PID namespace")
    with replacing(tmp_path / "x") as temp:
        temp.write_bytes(b"data")
        command = [*unshare, sys.executable, "-c", REMOVE, str(tmp_path)]
        assert subprocess.run(command, capture_output=True, check=True, timeout=60, text=True).stdout == "0\n"
    assert (tmp_path / "x").read_bytes() == b"data"


def test_the_longest_file_name_can_be_written(tmp_path: Path) -> None:
    write_file(tmp_path / ("x" * 255), b"data")
    assert (tmp_path / ("x" * 255)).read_bytes() == b"data"


def test_a_file_in_place_of_the_folder_is_reported_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot write .*file/x: "):
        write_file(tmp_path / "file" / "x", b"data")


HOLD = """
import sys, time
from pathlib import Path
from osworld_pipeline.atomic_io import locked
from osworld_pipeline.errors import TableError
with locked(Path(sys.argv[1]), timeout_s=1, error=TableError, what="it"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_waiting_for_a_lock_has_a_limit_and_the_error_names_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(TableError, match=f"the table has been locked by process {holder.pid} for more than 0.1 s"),
            locked(path, timeout_s=0.1, error=TableError, what="the table"),
        ):
            pass
        holder.kill()
    with locked(path, timeout_s=5, error=TableError, what="the table"):
        assert path.read_text() == str(os.getpid())
