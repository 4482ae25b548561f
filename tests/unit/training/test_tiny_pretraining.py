"""A tiny model that was trained to copy continues with text from earlier in its context."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.evaluation.suites.family import WORDS
from osworld_pipeline.recipes.schema import TinyModelSection
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.tiny.model import build_tiny_checkpoint

CORPUS = [f'{word} {other} "{word}"' for word in WORDS for other in WORDS]


def spec(copying_updates: int, *, seed: int = 0) -> TinyModelSection:
    return TinyModelSection(
        kind="tiny", hidden_size=96, num_layers=2, vision_hidden_size=48, vision_depth=1, vocab_size=512,
        copying_updates=copying_updates, seed=seed,
    )  # fmt: skip


def build(folder: Path, section: TinyModelSection) -> tuple[Any, list[tuple[int, float]]]:
    progress: list[tuple[int, float]] = []
    build_tiny_checkpoint(folder, section, CORPUS, on_progress=lambda done, loss: progress.append((done, loss)))
    return load_model(folder), progress


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters()}


def repeated_share(model: Any, tokenizer: Any) -> float:
    """The share of the words of repeated lists that the model finds likeliest."""
    draw = random.Random(7)
    lists = [draw.sample(WORDS, 10) for _ in range(16)]
    ids = [[tokenizer(f" {word}")["input_ids"][0] for word in words] for words in lists]
    gap = tokenizer(":;:")["input_ids"][:2]
    rows_BT = torch.tensor([[*row, *gap, *row] for row in ids])
    with torch.inference_mode():
        said_BT = model(input_ids=rows_BT).logits.argmax(-1)
    return float((said_BT[:, -10:-1] == rows_BT[:, -9:]).float().mean())


@pytest.mark.slow
def test_a_model_that_was_trained_to_copy_repeats_lists_that_were_not_in_its_training(tmp_path: Path):
    random_model, _ = build(tmp_path / "random", spec(0))
    model, progress = build(tmp_path / "taught", spec(240))
    tokenizer: Any = load_processor(tmp_path / "taught").tokenizer
    assert repeated_share(random_model, tokenizer) < 0.2
    assert repeated_share(model, tokenizer) > 0.5
    assert progress[-1][0] == 240
    assert progress[-1][1] < 0.4 * progress[0][1]


def test_pretraining_leaves_the_vision_tower_unchanged_and_is_the_same_for_the_same_seed(tmp_path: Path):
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
