"""The files by which Prometheus finds the processes of a state."""

import json
import os
import subprocess
import sys
from pathlib import Path

from osworld_pipeline.process_files import metrics_target, remove_stale_files

HOLDER = """
import sys
from pathlib import Path
from osworld_pipeline.process_files import metrics_target
with metrics_target(Path(sys.argv[1]), "evaluate", "127.0.0.1:9", {"program": "evaluate"}):
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_process_has_a_file_as_long_as_it_serves(tmp_path: Path) -> None:
    folder = tmp_path / "metrics" / "targets"
    with metrics_target(folder, "train_sft", "127.0.0.1:9500", {"program": "train_sft"}) as path:
        assert path.name.startswith("train_sft-")
        assert f"-{os.getpid()}-" in path.name
        assert list(folder.glob("*.json")) == [path]
        assert json.loads(path.read_text()) == [{"targets": ["127.0.0.1:9500"], "labels": {"program": "train_sft"}}]
    assert list(folder.iterdir()) == []


def test_the_file_of_a_killed_process_is_removed_at_the_next_start_and_that_of_a_living_one_stays(
    tmp_path: Path,
) -> None:
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        for holder in holders:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
        killed, living = holders
        killed.kill()
        killed.wait()
        assert len(list(tmp_path.glob("*.json"))) == 2
        with metrics_target(tmp_path, "collect", "127.0.0.1:9", {}) as own:
            (left,) = set(tmp_path.glob("*.json")) - {own}
            assert f"-{living.pid}-" in left.name
        living.communicate("")
        assert list(tmp_path.iterdir()) == []
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_a_folder_that_does_not_exist_has_no_stale_files(tmp_path: Path) -> None:
    remove_stale_files(tmp_path / "none")
