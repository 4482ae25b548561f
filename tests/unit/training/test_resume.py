"""An interrupted run that is resumed ends with the same weights as an uninterrupted one, to the bit."""

from pathlib import Path

import pytest
import torch
from train_on_ranks import demonstrations, recipe_of, rollouts, save
from training_samples import saved_weights

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import RecipeError, StoreError
from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.policy_trainer import open_gspo_trainer, open_sft_trainer
from osworld_pipeline.training.weights.checkpoint import latest_complete

NUM_UPDATES = 6


def fine_tune(model: Path, out: Path, variant: str, stops: tuple[int, ...]) -> Path:
    """Trains to each stop in a trainer of its own; returns the last checkpoint."""
    state, folder, done = StateDir(out), model, 0
    for stop in stops:
        trainer = open_sft_trainer(
            folder, recipe=recipe_of(variant), process_group=ProcessGroup.alone(), num_updates=done
        )
        assert trainer.num_updates == done
        for update in range(done, stop):
            trainer.update(demonstrations(trainer.processor, update))
        save(state, trainer, "sft", {})
        trainer.close()
        newest = latest_complete(state, "sft")
        assert newest is not None
        folder, done = newest, stop
    return folder


def reinforce(model: Path, out: Path, variant: str, stops: tuple[int, ...]) -> Path:
    state, folder, done = StateDir(out), model, 0
    # Every update trains on the first weights' samples as if they were its own.
    recipe = recipe_of(variant, max_logprob_diff=100.0, min_effective_share=0.0)
    for stop in stops:
        trainer = open_gspo_trainer(
            folder,
            reference_folder=model,
            recipe=recipe,
            phase=recipe.gspo.phase1,
            process_group=ProcessGroup.alone(),
            num_updates=done,
        )
        for update in range(done, stop):
            trainer.update(rollouts(model, trainer.processor, update, num_updates=update))
        save(state, trainer, "gspo", {})
        newest = latest_complete(state, "gspo")
        assert newest is not None
        folder, done = newest, stop
    return folder


@pytest.mark.parametrize("variant", ["plain", "packed", "lora"])
def test_resumed_fine_tuning_ends_with_the_very_same_weights(tmp_path: Path, tiny_folder: Path, variant: str):
    whole = saved_weights(fine_tune(tiny_folder, tmp_path / "whole", variant, (NUM_UPDATES,)))
    parted = saved_weights(fine_tune(tiny_folder, tmp_path / "parted", variant, (1, 4, NUM_UPDATES)))
    early = saved_weights(fine_tune(tiny_folder, tmp_path / "early", variant, (1,)))
    assert whole.keys() == parted.keys() == early.keys()
    assert all(torch.equal(whole[name], parted[name]) for name in whole)
    assert not any(torch.equal(whole[name], early[name]) for name in whole if "language_model.layers" in name)


@pytest.mark.parametrize("variant", ["plain", "lora"])
def test_a_resumed_phase_ends_with_the_very_same_weights(tmp_path: Path, tiny_folder: Path, variant: str):
    whole = saved_weights(reinforce(tiny_folder, tmp_path / "whole", variant, (4,)))
    parted = saved_weights(reinforce(tiny_folder, tmp_path / "parted", variant, (1, 3, 4)))
    early = saved_weights(reinforce(tiny_folder, tmp_path / "early", variant, (1,)))
    assert all(torch.equal(whole[name], parted[name]) for name in whole)
    assert not any(torch.equal(whole[name], early[name]) for name in whole if "language_model.layers" in name)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer/__0_0.distcp", "optimizer/.metadata"])
def test_a_damaged_file_is_named_before_anything_is_trained(tmp_path: Path, tiny_folder: Path, name: str):
    folder = fine_tune(tiny_folder, tmp_path, "plain", (1,))
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(StoreError, match=rf"{name} is damaged, .* remove .*update-0001 and run the stage again"):
        open_sft_trainer(folder, recipe=recipe_of("plain"), process_group=ProcessGroup.alone(), num_updates=1)


def test_a_missing_file_or_manifest_is_named(tmp_path: Path, tiny_folder: Path):
    folder = fine_tune(tiny_folder, tmp_path, "plain", (1,))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StoreError, match=r"tokenizer.json is missing"):
        open_sft_trainer(folder, recipe=recipe_of("plain"), process_group=ProcessGroup.alone(), num_updates=1)
    (folder / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"manifest.json cannot be read"):
        open_sft_trainer(folder, recipe=recipe_of("plain"), process_group=ProcessGroup.alone(), num_updates=1)


def test_adapters_of_another_shape_are_refused(tmp_path: Path, tiny_folder: Path):
    folder = fine_tune(tiny_folder, tmp_path, "lora", (1,))
    recipe = recipe_of("lora")
    wider = recipe.model_copy(
        update={
            "trainer": recipe.trainer.model_copy(
                update={"lora": recipe.trainer.lora.model_copy(update={"rank": 8})}  # type: ignore[union-attr]
            )
        }
    )
    with pytest.raises(RecipeError, match=r"trainer.lora has rank 8, alpha 8 .* continues with, has rank 4, alpha 8 "):
        open_sft_trainer(folder, recipe=wider, process_group=ProcessGroup.alone(), num_updates=1)
