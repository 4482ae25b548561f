"""Durable files: whole or absent, and locks with a limit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from osworld_pipeline.durable import HOST, locked, remove_stale_temps, replacing, write_file
from osworld_pipeline.errors import StoreError, TableError


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


def test_only_what_dead_writers_of_this_host_left_is_removed(tmp_path: Path) -> None:
    dead, ours, others, foreign = (
        tmp_path / f".{HOST}.{dead_pid()}.{'0' * 32}.tmp",
        tmp_path / f".{HOST}.{os.getpid()}.{'0' * 32}.tmp",
        tmp_path / f".elsewhere.{dead_pid()}.{'0' * 32}.tmp",
        tmp_path / ".somebody.tmp",
    )
    for path in (dead, ours, others, foreign):
        path.touch()
    for companion in (".wal", "-journal", "-wal", "-shm"):
        Path(f"{dead}{companion}").touch()
    assert remove_stale_temps(tmp_path) == 5
    assert set(tmp_path.iterdir()) == {ours, others, foreign}


def test_the_longest_file_name_can_be_written(tmp_path: Path) -> None:
    write_file(tmp_path / ("x" * 255), b"data")
    assert (tmp_path / ("x" * 255)).read_bytes() == b"data"


def test_a_folder_where_a_file_stands_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot write .*file/x: "):
        write_file(tmp_path / "file" / "x", b"data")


HOLD = """
import sys, time
from pathlib import Path
from osworld_pipeline.durable import locked
from osworld_pipeline.errors import TableError
with locked(Path(sys.argv[1]), timeout_s=1, error=TableError, what="it"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_is_waited_for_within_a_limit_and_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(TableError, match=f"the table is locked by process {holder.pid} for longer than 0.1 s"),
            locked(path, timeout_s=0.1, error=TableError, what="the table"),
        ):
            pass
        holder.kill()
    with locked(path, timeout_s=5, error=TableError, what="the table"):
        assert path.read_text() == str(os.getpid())
