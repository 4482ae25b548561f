"""Two processes that train one model give the same weights as one, and each reads and holds only its own part."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import train_on_ranks
from on_two_ranks import DONE
from test_memory_measured import config
from torchrun_process import torchrun
from training_samples import saved_metrics, saved_weights
from transformers import Qwen3VLForConditionalGeneration

from osworld_pipeline.training.distributed.process_group import open_process_group

pytestmark = pytest.mark.slow

VARIANTS = ("plain", "lora")
LIMIT_S = 400.0


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model large enough that the part held by a process can be measured."""
    large: Any = config()
    large.text_config.vocab_size = 65_536
    folder = tmp_path_factory.mktemp("large") / "model"
    Qwen3VLForConditionalGeneration(large).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """The folder with the results of one rank."""
    folder = tmp_path_factory.mktemp("ranks") / "alone"
    with open_process_group({}) as ranks:
        for variant in VARIANTS:
            train_on_ranks.train(ranks, tiny_folder, folder / variant, variant)
    return folder


@dataclass(frozen=True)
class TwoRanks:
    process: subprocess.Popen[bytes]
    folder: Path
    log: Path

    def wait_for(self, name: str) -> Path:
        """Waits for a file in the folder, which a rank writes whole."""
        path, deadline = self.folder / name, time.monotonic() + LIMIT_S
        while not path.is_file():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return path


@pytest.fixture(scope="module")
def two_ranks(alone: Path, tiny_folder: Path, large_model: Path) -> Iterator[TwoRanks]:
    """Two ranks that do everything one after the other, then train until one of them is killed."""
    folder = alone.with_name("together")
    folder.mkdir()
    log = folder / "log"
    with log.open("w") as output:
        process = torchrun("on_two_ranks.py", tiny_folder, large_model, folder, *VARIANTS, output=output)
    try:
        yield TwoRanks(process, folder, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@pytest.fixture(scope="module")
def together(two_ranks: TwoRanks) -> Path:
    """The folder with the results of both ranks."""
    return two_ranks.wait_for(DONE).parent


def difference(one: Path, other: Path) -> float:
    ours, theirs = saved_weights(one), saved_weights(other)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_give_the_weights_and_losses_of_one(alone: Path, together: Path, variant: str) -> None:
    one, two = (folder / variant / "checkpoints" for folder in (alone, together))
    for name in (
        "sft.partial/update-0002",
        "sft-resumed.partial/update-0003",
        "gspo.partial/update-0001",
        "gspo-late.partial/update-0002",
    ):
        assert difference(one / name, two / name) < 1e-5, name
        assert saved_metrics(two / name) == pytest.approx(saved_metrics(one / name), abs=1e-5, rel=1e-5), name
    handed_over = [folder / variant / "weights-0001" for folder in (alone, together)]
    assert difference(*handed_over) < 1e-5
    ours, theirs = (torch.load(folder.with_name("weights.pt")) for folder in handed_over)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)
    for folder in handed_over:
        sent, *between = (torch.load(folder.with_name(f"{name}.pt")) for name in ("sent", "between-0", "between-1"))
        assert all(torch.equal(one[name], tensor) for one in between for name, tensor in sent.items())
        if variant != "lora":
            written = saved_weights(folder)
            assert sent.keys() == written.keys()
            assert all(torch.equal(sent[name], tensor) for name, tensor in written.items())
    if variant == "lora":
        assert ours.keys() == theirs.keys()
        assert all(".lora_" in name and ".default." in name for name in ours), "nothing else is gathered"
    # Two ranks continued from what one had left, and each rank left shards of the optimiser.
    name = "sft-resumed.partial/update-0003"
    resumed = together / variant / "of-one-rank" / "checkpoints" / name
    assert difference(one / name, resumed) < 1e-5
    shards = two / "sft.partial/update-0002/optimizer"
    assert len(list(shards.glob("*.distcp"))) == 2


def test_each_of_two_ranks_reads_and_holds_half_of_the_model(large_model: Path, together: Path) -> None:
    num_bytes = sum(tensor.nbytes for tensor in saved_weights(large_model).values())
    reported = json.loads((together / "loaded.json").read_text())
    assert reported["is_same"]
    assert reported["is_tied"]
    for num_read, num_held in reported["ranks"]:
        assert num_read == pytest.approx(num_bytes / 2, rel=0.01)
        assert num_held < 0.75 * num_bytes


def test_rank_0_does_not_decode_the_images_that_the_other_rank_trains_on(together: Path) -> None:
    reported = json.loads((together / "shared.json").read_text())
    first, second = reported["visible"]["ranks"]
    # Every rank reads one image to see whether it can; an image is decoded only where it is trained on.
    assert len(set(first["read"]) & set(second["decoded"]) - set(first["decoded"])) <= 1
    assert second["read"]
    assert set(first["decoded"]) - set(second["decoded"])
    assert set(second["decoded"]) - set(first["decoded"])
    hidden = reported["hidden"]["ranks"][1]
    assert hidden["read"] == []
    assert hidden["decoded"]
    assert reported["hidden"]["losses"] == reported["visible"]["losses"]


def test_a_killed_rank_ends_the_other_with_one_clear_error(two_ranks: TwoRanks) -> None:
    pid = int(two_ranks.wait_for("endless/rank-1.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    assert two_ranks.process.wait(90) != 0
    said = (two_ranks.folder / "endless/rank-0.error").read_text()
    assert said.startswith("rank 0 of 2 lost another rank in ")
    assert "it resumes from its last checkpoint" in said
