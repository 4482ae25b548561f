"""Each rank reads and decodes the screenshots of its own passes, where it sees the folder they are in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from osworld_pipeline.domain.trajectory import LazyImages, Trajectory
from osworld_pipeline.training.ranks import Ranks
from osworld_pipeline.training.shared_trajectories import _pack, share_trajectories

PROGRAM = Path(__file__).with_name("share_on_ranks.py")


def trajectory(images: object) -> Trajectory:
    return Trajectory(trajectory_id="t", task_id="task", token_ids=(1, 2), response_mask=(0, 1), images=images)  # type: ignore[arg-type]


def test_one_rank_keeps_its_trajectories_as_they_are() -> None:
    lazy = trajectory(LazyImages(lambda _: b"never read", ["a"]))
    assert share_trajectories([lazy], Ranks.alone(), None)[0] is lazy


def test_stored_images_travel_as_hashes_and_others_as_bytes() -> None:
    def read(sha256: str) -> bytes:
        raise AssertionError(f"{sha256} was read to be sent")

    sent = _pack([trajectory(LazyImages(read, ["a", "b"])), trajectory((b"resized",))], by_hash=True)
    assert sent.hashes == (("a", "b"), None)
    assert [tuple(item.images) for item in sent.trajectories] == [(), (b"resized",)]
    held = _pack([trajectory(LazyImages(str.encode, ["a"]))], by_hash=False)
    assert tuple(held.trajectories[0].images) == (b"a",)


@pytest.mark.slow
def test_rank_0_does_not_decode_what_the_other_rank_trains_on(tmp_path: Path, tiny_folder: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(PROGRAM)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [*launcher, str(tiny_folder), str(tmp_path / "told.json")]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    first, second = told["visible"]["ranks"]
    # One image is read by every rank to see whether it can; it is decoded only where it is trained on.
    assert len(set(first["read"]) & set(second["decoded"]) - set(first["decoded"])) <= 1
    assert second["read"]
    assert set(first["decoded"]) - set(second["decoded"])
    assert set(second["decoded"]) - set(first["decoded"])
    hidden = told["hidden"]["ranks"][1]
    assert hidden["read"] == []
    assert hidden["decoded"]
    assert told["hidden"]["losses"] == told["visible"]["losses"]
