"""The reference of the KL term is opened because its weight is above 0, and the policy is then compared with it."""

from pathlib import Path

import pytest
import torch
from adapter_samples import adapted_recipe, fine_tuned, open_phase, saved
from train_on_ranks import demonstrations, recipe_of, rollouts
from training_samples import CORPUS, SMALL

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.objective.score import score_trajectories
from osworld_pipeline.training.policy_trainer import open_gspo_trainer
from osworld_pipeline.training.tiny.model import build_tiny_checkpoint
from osworld_pipeline.training.weights import lora


def divergence(folder: Path, parent: Path, kl_coef: float) -> float:
    """The divergence of the weights in `folder` from their parent, as a first update reports it."""
    recipe = recipe_of("plain", kl_coef=kl_coef, minibatches_per_update=1)  # no weight has moved when it is measured
    trainer = open_gspo_trainer(
        folder, reference_folder=parent, recipe=recipe, phase=recipe.gspo.phase1, process_group=ProcessGroup.alone()
    )
    return trainer.update(rollouts(folder, trainer.processor, 0))["kl"]


def test_a_kl_weight_above_0_is_enough_to_open_a_reference(tmp_path: Path, tiny_folder: Path) -> None:
    stranger = tmp_path / "stranger"
    build_tiny_checkpoint(stranger, SMALL.model_copy(update={"seed": 7}), CORPUS)
    assert divergence(tiny_folder, stranger, 0.1) > 1e-2
    assert divergence(tiny_folder, tiny_folder, 0.1) == pytest.approx(0.0, abs=1e-6)
    assert divergence(tiny_folder, tmp_path / "nowhere", 0.0) == 0.0, "without a weight nobody reads it"


KL = {"kl_coef": 0.1, "minibatches_per_update": 1, "max_logprob_diff": 100.0}


def test_the_kl_term_holds_a_phase_near_its_parents_adapter(tmp_path: Path, tiny_folder: Path, processor) -> None:
    """It is not held near the base, from which the parent has moved away."""
    recipe, state = adapted_recipe(**KL), StateDir(tmp_path)
    parent = fine_tuned(tiny_folder, recipe, state, num_updates=4)
    trainer = open_phase(parent, recipe)
    trajectories = demonstrations(processor, 5)
    parents, bases = (score_trajectories(load_model(one), processor, trajectories) for one in (parent, tiny_folder))
    assert not all(torch.allclose(one, other, atol=1e-2) for one, other in zip(parents, bases, strict=True))
    assert trainer.update(rollouts(parent, processor, 0))["kl"] == pytest.approx(0.0, abs=1e-6)
    trainer.update(rollouts(parent, processor, 1, num_updates=1))
    partial = saved(trainer, state, "phase")
    resumed = open_phase(partial, recipe, parent=parent, num_updates=2)
    for one in (trainer, resumed):
        with lora.as_parent(one.model):
            held = score_trajectories(one.model, processor, trajectories)
        own = score_trajectories(one.model, processor, trajectories)
        assert all(torch.equal(row, other) for row, other in zip(held, parents, strict=True))
        assert not all(torch.allclose(row, other, atol=1e-3) for row, other in zip(own, parents, strict=True))


def test_a_parents_adapter_is_neither_trained_nor_saved(tmp_path: Path, tiny_folder: Path, processor) -> None:
    recipe, state = adapted_recipe(**KL), StateDir(tmp_path)
    parent = fine_tuned(tiny_folder, recipe, state)
    trainer = open_phase(parent, recipe)
    names = [name for name, _ in trainer.model.named_parameters() if ".reference." in name]
    assert names
    before = {name: trainer.model.get_parameter(name).clone() for name in names}
    trainer.update(rollouts(parent, processor, 0))
    assert all(torch.equal(trainer.model.get_parameter(name), before[name]) for name in names)
    assert not [name for name in trainer.weights() if ".reference." in name]
    assert not [name for name in trainer.optimizer.state_dict() if ".reference." in name]
    without = open_phase(parent, adapted_recipe(**KL | {"kl_coef": 0.0}))
    assert not [name for name, _ in without.model.named_parameters() if ".reference." in name], "it is not used"


def test_the_kl_term_holds_a_phase_without_parent_adapter_near_the_frozen_weights(tiny_folder: Path, processor) -> None:
    trainer = open_phase(tiny_folder, adapted_recipe(**KL))
    assert trainer.update(rollouts(tiny_folder, processor, 0))["kl"] == pytest.approx(0.0, abs=1e-6)
    assert trainer.update(rollouts(tiny_folder, processor, 1, num_updates=1))["kl"] > 1e-6
    with lora.as_parent(trainer.model):
        held = score_trajectories(trainer.model, processor, demonstrations(processor, 5))
    bases = score_trajectories(load_model(tiny_folder), processor, demonstrations(processor, 5))
    assert all(torch.equal(row, other) for row, other in zip(held, bases, strict=True))


def test_a_phase_with_a_missing_or_changed_parent_is_not_resumed(tmp_path: Path, tiny_folder: Path, processor) -> None:
    recipe, state = adapted_recipe(**KL), StateDir(tmp_path)
    parent = fine_tuned(tiny_folder, recipe, state)
    trainer = open_phase(parent, recipe)
    trainer.update(rollouts(parent, processor, 0))
    partial = saved(trainer, state, "phase")
    stranger = tmp_path / "stranger"
    build_tiny_checkpoint(stranger, SMALL.model_copy(update={"seed": 7}), CORPUS)
    with pytest.raises(
        StoreError, match=r"the policy's adapter belongs to .*model, and the phase's parent .*stranger to"
    ):
        open_phase(partial, recipe, parent=stranger, num_updates=1)
    with pytest.raises(StoreError, match=r"nowhere is missing: gspo.kl_coef is above 0"):
        open_phase(partial, recipe, parent=tmp_path / "nowhere", num_updates=1)
