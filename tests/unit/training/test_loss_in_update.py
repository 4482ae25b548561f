"""The choices of the loss as the trainer makes them from a recipe's keys."""

from dataclasses import replace

import pytest
from training_samples import as_sampled, conversation

from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.recipes.schema import GspoSharedSection
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.update import GspoTrainer

SETTINGS = GspoSharedSection(kl_coef=0.0, entropy_coef=0.0, minibatches_per_update=1)


def updated(tiny_folder, processor, trajectories: list[Trajectory], **keys) -> dict[str, float]:
    settings = SETTINGS.model_copy(update=keys)
    trainer = GspoTrainer(load_model(tiny_folder), processor, settings, max_response_tokens=50)
    return trainer.update(trajectories)


@pytest.fixture
def sampled(model, processor) -> list[Trajectory]:
    trajectories = [conversation(processor, 1, num_turns=1), conversation(processor, 2, num_turns=3)]
    return as_sampled(model, processor, trajectories, [1.0, -0.5])


def lengths(trajectories: list[Trajectory]) -> list[int]:
    return [sum(trajectory.response_mask) for trajectory in trajectories]


@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
def test_each_length_norm_weighs_fresh_sequences_as_it_says(tiny_folder, processor, sampled, algorithm: str):
    # On fresh samples a sequence's term is minus its advantage.
    one, two = lengths(sampled)
    assert one != two
    expected = {
        "sequence_mean": (-1.0 + 0.5) / 2,
        "token_mean": (-one + 0.5 * two) / (one + two),
        "constant": (-one + 0.5 * two) / (2 * 50),
    }
    for length_norm, loss in expected.items():
        metrics = updated(tiny_folder, processor, sampled, algorithm=algorithm, length_norm=length_norm)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-4)


def test_by_tokens_the_turns_of_a_window_episode_count_as_whole_sequences_do(tiny_folder, processor, sampled):
    turns = [replace(item, trajectory_id=f"e#{number}", weight=0.5) for number, item in enumerate(sampled)]
    for keys in ({"length_norm": "token_mean"}, {"length_norm": "token_mean", "algorithm": "grpo"}):
        whole = updated(tiny_folder, processor, sampled, **keys)
        shared = updated(tiny_folder, processor, turns, **keys)
        assert shared["loss"] == pytest.approx(whole["loss"], abs=1e-6)
        assert shared["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
def test_with_a_cap_the_trainers_own_logprobs_are_the_old_ones(tiny_folder, processor, sampled, algorithm: str):
    # A sampler that found every token 2 times less likely: trainer over sampler is 2, capped at 1.5.
    mismatched = [
        replace(
            item,
            sampled_logprobs=tuple(value - 0.6931472 for value in item.sampled_logprobs or ()),
            policy_versions=(-5,) * len(item.token_ids),
        )
        for item in sampled
    ]
    capped = updated(tiny_folder, processor, mismatched, algorithm=algorithm, importance_cap=1.5)
    assert capped["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert capped["importance_mean"] == pytest.approx(1.5, abs=1e-5)
    assert capped["loss"] == pytest.approx(1.5 * (-1.0 + 0.5) / 2, abs=1e-4)
    plain = updated(tiny_folder, processor, mismatched, algorithm=algorithm)
    assert plain["ratio_mean"] == pytest.approx(2.0, abs=1e-4)
    assert plain["importance_mean"] == 1.0
