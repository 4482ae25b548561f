"""Several processes that train one model: the same weights as one, and one clear end where one of them dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from training_samples import saved_weights

from osworld_pipeline.training.ranks import Ranks, open_ranks

PROGRAM = Path(__file__).with_name("train_on_ranks.py")
VARIANTS = ("plain", "lora")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def torchrun(*arguments: str | Path, num_ranks: int = 2) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return subprocess.Popen(
        [*launcher, str(PROGRAM), *map(str, arguments)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], *, timeout_s: float) -> str:
    try:
        return process.communicate(timeout=timeout_s)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def difference(one: Path, other: Path) -> float:
    ours, theirs = saved_weights(one), saved_weights(other)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def metrics(folder: Path) -> dict[str, float]:
    saved = json.loads((folder / "trainer_state.json").read_text())["metrics"]
    return {name: value for name, value in saved.items() if not name.endswith(("_s", "padding_share"))}


def test_one_process_needs_no_process_group():
    with open_ranks({}) as ranks:
        assert (ranks.rank, ranks.world_size, ranks.is_main, ranks.is_alone) == (0, 1, True, True)
        assert ranks.broadcast("word") == "word"
        assert ranks.gather(3) == [3]
        assert ranks.sum(2.5) == 2.5
        assert not torch.distributed.is_initialized()


def test_torchrun_with_one_process_is_one_process():
    with open_ranks({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) as ranks:
        assert ranks.is_alone


@pytest.mark.slow
def test_two_ranks_give_the_weights_and_losses_of_one(tmp_path: Path, tiny_folder: Path):
    from train_on_ranks import main

    main([str(tiny_folder), str(tmp_path / "alone"), *VARIANTS])
    output = finish(process := torchrun(tiny_folder, tmp_path / "together", *VARIANTS), timeout_s=400)
    assert process.returncode == 0, output
    for variant in VARIANTS:
        alone, together = (tmp_path / where / variant / "checkpoints" for where in ("alone", "together"))
        for name in ("sft.partial/update-0002", "sft-resumed.partial/update-0003", "gspo.partial/update-0001"):
            assert difference(alone / name, together / name) < 1e-5, (variant, name)
            assert metrics(together / name) == pytest.approx(metrics(alone / name), abs=1e-5, rel=1e-5), (variant, name)
        handed_over = [tmp_path / where / variant / "weights-0001" for where in ("alone", "together")]
        assert difference(*handed_over) < 1e-5
        ours, theirs = (torch.load(folder.with_name("weights.pt")) for folder in handed_over)
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)
        if variant == "lora":
            assert ours.keys() == theirs.keys()
            assert all(".lora_" in name and ".default." in name for name in ours), "nothing else is gathered"
        # Two ranks went on from what one had left; and each rank left shards of the optimiser.
        name = "sft-resumed.partial/update-0003"
        resumed = tmp_path / "together" / variant / "of-one-rank" / "checkpoints" / name
        assert difference(alone / name, resumed) < 1e-5
        shards = together / "sft.partial/update-0002/optimizer"
        assert len(list(shards.glob("*.distcp"))) == 2


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_with_one_clear_error(tmp_path: Path, tiny_folder: Path):
    process = torchrun(tiny_folder, tmp_path / "out", "endless")
    pid_file = tmp_path / "out" / "endless" / "rank-1.pid"
    deadline = time.monotonic() + 200
    while not pid_file.is_file() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert pid_file.is_file(), finish(process, timeout_s=0.1)
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    killed = time.monotonic()
    output = finish(process, timeout_s=90)
    assert process.returncode != 0
    assert time.monotonic() - killed < 90
    error = tmp_path / "out" / "endless" / "rank-0.error"
    assert error.is_file(), output
    said = error.read_text()
    assert said.startswith("rank 0 of 2 lost another rank in "), output
    assert "it goes on from its last checkpoint" in said


def test_a_rank_that_fails_leaves_word_for_those_that_miss_it():
    store = HashStore()
    first, second = (Ranks(rank=rank, world_size=2, device=torch.device("cpu"), store=store) for rank in range(2))
    gone = RuntimeError("Connection closed by peer")
    assert first.is_lost(gone)
    assert first.explain(gone, "an update").startswith("rank 0 of 2 lost another rank in an update (Connection closed")
    second.report_error("the disk of rank 1 is full")
    assert first.explain(gone, "an update") == "rank 1 of 2 failed: the disk of rank 1 is full"
    assert not first.is_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_commands_of_one_trainer_are_not_taken_for_the_nexts():
    store = HashStore()
    first, second = (Ranks(rank=rank, world_size=2, device=torch.device("cpu"), store=store) for rank in range(2))
    for name in ("update", "close", "save", "close"):
        first.send_command(name)
    assert [second.next_command() for _ in range(4)] == ["update", "close", "save", "close"]
