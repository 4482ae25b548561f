"""The reference of the KL term: opened because its weight is above 0, and then really what is compared with."""

from pathlib import Path

import pytest
from train_on_ranks import recipe_of, rollouts
from training_samples import CORPUS, SMALL

from osworld_pipeline.training.policy_trainer import open_gspo_trainer
from osworld_pipeline.training.ranks import Ranks
from osworld_pipeline.training.tiny_model import build_tiny_checkpoint


def divergence(folder: Path, parent: Path, kl_coef: float) -> float:
    """Of the weights in `folder` from their parent, as a first update tells it."""
    recipe = recipe_of("plain", kl_coef=kl_coef, minibatches_per_update=1)  # nothing has moved when it is measured
    trainer = open_gspo_trainer(
        folder, reference_folder=parent, recipe=recipe, phase=recipe.gspo.phase1, ranks=Ranks.alone()
    )
    return trainer.update(rollouts(folder, trainer.processor, 0))["kl"]


def test_a_weight_of_the_divergence_is_enough_for_a_reference(tmp_path: Path, tiny_folder: Path) -> None:
    stranger = tmp_path / "stranger"
    build_tiny_checkpoint(stranger, SMALL.model_copy(update={"seed": 7}), CORPUS)
    assert divergence(tiny_folder, stranger, 0.1) > 1e-2
    assert divergence(tiny_folder, tiny_folder, 0.1) == pytest.approx(0.0, abs=1e-6)
    assert divergence(tiny_folder, tmp_path / "nowhere", 0.0) == 0.0, "without a weight nobody reads it"
