"""A tiny model that was taught to copy goes on with what stands earlier in its context."""

from pathlib import Path
from typing import Any

import pytest
import torch

from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.evaluation.suites.family import WORDS
from osworld_pipeline.recipes.schema import TinyModelSection
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.tiny_model import build_tiny_checkpoint

CORPUS = [f'{word} {other} "{word}"' for word in WORDS for other in WORDS]


def spec(copying_updates: int, *, seed: int = 0) -> TinyModelSection:
    return TinyModelSection(
        kind="tiny", hidden_size=128, num_layers=2, vision_hidden_size=48, vision_depth=1, vocab_size=512,
        copying_updates=copying_updates, seed=seed,
    )  # fmt: skip


def build(folder: Path, section: TinyModelSection) -> tuple[Any, list[tuple[int, float]]]:
    progress: list[tuple[int, float]] = []
    build_tiny_checkpoint(folder, section, CORPUS, on_progress=lambda done, loss: progress.append((done, loss)))
    return load_model(folder), progress


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.slow
def test_a_model_that_was_taught_to_copy_repeats_a_list_that_it_never_saw(tmp_path: Path):
    model, progress = build(tmp_path, spec(300))
    tokenizer: Any = load_processor(tmp_path).tokenizer
    listed = [tokenizer(f" {word}")["input_ids"][0] for word in reversed(WORDS[:10])]
    gap = tokenizer(":;:")["input_ids"][:2]
    row = torch.tensor([[*listed, *gap, *listed]])
    with torch.inference_mode():
        logits_TV = model(input_ids=row).logits[0]
    said = logits_TV[-len(listed) : -1].argmax(-1).tolist()
    same = sum(a == b for a, b in zip(said, listed[1:], strict=True))
    assert same >= 7, f"{same} of {len(listed) - 1} tokens of the list were repeated"
    assert progress[-1][0] == 300
    assert progress[-1][1] < 0.4 * progress[0][1]


def test_teaching_leaves_the_vision_tower_alone_and_gives_the_same_weights_for_the_same_seed(tmp_path: Path):
    (random_model, none), (one, progress), (again, _), (other, _) = (
        build(tmp_path / str(index), section)
        for index, section in enumerate((spec(0), spec(2), spec(2), spec(2, seed=1)))
    )
    assert none == []
    assert [done for done, _ in progress] == [1, 2]
    before, after = weights(random_model), weights(one)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not any("visual" in name for name in changed)
    assert all(torch.equal(weight, weights(again)[name]) for name, weight in after.items())
    assert not all(torch.equal(weight, weights(other)[name]) for name, weight in after.items())
