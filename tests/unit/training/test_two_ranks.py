"""Two processes that train one model: the same weights as one, and each reads and holds its own part alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import train_on_ranks
from test_memory_measured import config
from torchrun_process import finish, torchrun
from training_samples import saved_weights
from transformers import Qwen3VLForConditionalGeneration

pytestmark = pytest.mark.slow

VARIANTS = ("plain", "lora")


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that what a process holds of it shows."""
    large: Any = config()
    large.text_config.vocab_size = 65_536
    folder = tmp_path_factory.mktemp("large") / "model"
    Qwen3VLForConditionalGeneration(large).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """What one rank leaves."""
    folder = tmp_path_factory.mktemp("ranks") / "alone"
    train_on_ranks.main([str(tiny_folder), str(folder), *VARIANTS])
    return folder


@pytest.fixture(scope="module")
def together(alone: Path, tiny_folder: Path, large_model: Path) -> Path:
    """What two leave that do everything one after the other."""
    folder = alone.with_name("together")
    folder.mkdir()
    process = torchrun("on_two_ranks.py", tiny_folder, large_model, folder, *VARIANTS)
    output = finish(process, timeout_s=400)
    assert process.returncode == 0, output
    return folder


def difference(one: Path, other: Path) -> float:
    ours, theirs = saved_weights(one), saved_weights(other)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def metrics(folder: Path) -> dict[str, float]:
    saved = json.loads((folder / "trainer_state.json").read_text())["metrics"]
    return {name: value for name, value in saved.items() if not name.endswith(("_s", "padding_share"))}


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_give_the_weights_and_losses_of_one(alone: Path, together: Path, variant: str) -> None:
    one, two = (folder / variant / "checkpoints" for folder in (alone, together))
    for name in ("sft.partial/update-0002", "sft-resumed.partial/update-0003", "gspo.partial/update-0001"):
        assert difference(one / name, two / name) < 1e-5, name
        assert metrics(two / name) == pytest.approx(metrics(one / name), abs=1e-5, rel=1e-5), name
    handed_over = [folder / variant / "weights-0001" for folder in (alone, together)]
    assert difference(*handed_over) < 1e-5
    ours, theirs = (torch.load(folder.with_name("weights.pt")) for folder in handed_over)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)
    if variant == "lora":
        assert ours.keys() == theirs.keys()
        assert all(".lora_" in name and ".default." in name for name in ours), "nothing else is gathered"
    # Two ranks went on from what one had left; and each rank left shards of the optimiser.
    name = "sft-resumed.partial/update-0003"
    resumed = together / variant / "of-one-rank" / "checkpoints" / name
    assert difference(one / name, resumed) < 1e-5
    shards = two / "sft.partial/update-0002/optimizer"
    assert len(list(shards.glob("*.distcp"))) == 2


def test_each_of_two_ranks_reads_and_holds_half_of_the_model(large_model: Path, together: Path) -> None:
    num_bytes = sum(tensor.nbytes for tensor in saved_weights(large_model).values())
    told = json.loads((together / "loaded.json").read_text())
    assert told["is_same"]
    assert told["is_tied"]
    for num_read, num_held in told["ranks"]:
        assert num_read == pytest.approx(num_bytes / 2, rel=0.01)
        assert num_held < 0.75 * num_bytes


def test_rank_0_does_not_decode_what_the_other_rank_trains_on(together: Path) -> None:
    told = json.loads((together / "shared.json").read_text())
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
