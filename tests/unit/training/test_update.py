import math
from dataclasses import replace

import pytest
import torch
from training_samples import as_sampled, conversation

from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import TrainingError
from osworld_pipeline.recipes.schema import GspoSharedSection
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.objective.score import score_trajectories
from osworld_pipeline.training.update import GspoTrainer

SETTINGS = GspoSharedSection(
    learning_rate=1e-3,
    clip_low=0.2,
    clip_high=0.2,
    kl_coef=0.0,
    entropy_coef=0.0,
    max_grad_norm=1e9,
    micro_batch_size=2,
    minibatches_per_update=1,
)
ADVANTAGES = [1.0, -1.0, 0.5, -0.5]


def settings(**changes) -> GspoSharedSection:
    return SETTINGS.model_copy(update=changes)


def weights(model) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def sampled(model, processor, advantages: list[float] = ADVANTAGES) -> list[Trajectory]:
    trajectories = [conversation(processor, number, num_turns=number % 2 + 1) for number in range(len(advantages))]
    return as_sampled(model, processor, trajectories, advantages)


def canary(model, processor) -> Trajectory:
    """The trajectory that an update of replay alone needs for its comparison."""
    (trajectory,) = as_sampled(model, processor, [conversation(processor, 9)], [0.0])
    return replace(trajectory, is_canary=True)


def mean_logprob(model, processor, trajectory: Trajectory) -> float:
    return float(score_trajectories(model, processor, [trajectory])[0].sum()) / sum(trajectory.response_mask)


def test_good_sequences_become_likelier_and_bad_ones_less_likely(model, processor):
    trajectories = sampled(model, processor, [1.0, -1.0])
    before = [mean_logprob(model, processor, trajectory) for trajectory in trajectories]
    metrics = GspoTrainer(model, processor, settings(learning_rate=1e-4)).update(trajectories)
    after = [mean_logprob(model, processor, trajectory) for trajectory in trajectories]
    assert after[0] - before[0] > after[1] - before[1]
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["clipped_share"] == 0.0
    assert metrics["loss"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["is_skipped"] == 0.0
    assert metrics["num_trajectories"] == 2.0
    assert metrics["num_response_tokens"] == sum(sum(trajectory.response_mask) for trajectory in trajectories)


def test_an_update_uses_the_learning_rate_of_its_place_in_the_phase(model, processor):
    changed = settings(learning_rate=1e-3, warmup_updates=4, final_lr_fraction=0.5, minibatches_per_update=1)
    before = weights(model)
    metrics = GspoTrainer(model, processor, changed, phase_updates=9).update(sampled(model, processor))
    assert metrics["learning_rate"] == pytest.approx(2.5e-4)
    # Adam's first step is the learning rate for every parameter that has a gradient.
    assert float((weights(model) - before).abs().max()) == pytest.approx(2.5e-4, rel=1e-3)
    with pytest.raises(ValueError, match="final_lr_fraction is below 1, so the number of updates is needed"):
        GspoTrainer(model, processor, changed)


def test_trainer_and_sampler_agree_to_rounding_on_the_same_weights(model, processor):
    metrics = GspoTrainer(model, processor, SETTINGS).update(sampled(model, processor))
    assert metrics["trainer_sampler_logprob_diff"] < 1e-5


def test_a_sampler_with_other_weights_is_an_error_and_nothing_is_trained(model, processor):
    trajectories = sampled(model, processor)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05 * torch.randn(param.shape, generator=torch.Generator().manual_seed(3)))
    before = weights(model)
    with pytest.raises(TrainingError, match=r"update 8: the trainer's log-probabilities .* more than 0.02 \(worst: t"):
        GspoTrainer(model, processor, SETTINGS, num_updates=7).update(trajectories)
    assert torch.equal(before, weights(model))


def test_a_sampler_that_saw_other_pictures_is_an_error(model, processor):
    trajectories = sampled(model, processor)
    swapped = [replace(item, images=tuple(reversed(item.images))) for item in trajectories]
    with pytest.raises(TrainingError, match="same tokens and images"):
        GspoTrainer(model, processor, settings(max_logprob_diff=1e-5)).update(swapped)


def test_tokens_of_older_weights_are_not_checked_against_the_current_weights(model, processor):
    trajectories = sampled(model, processor)
    stale = replace(
        trajectories[0],
        sampled_logprobs=tuple(value - 1.0 for value in trajectories[0].sampled_logprobs or ()),
        policy_versions=(3,) * len(trajectories[0].token_ids),
    )
    fresh = [replace(item, policy_versions=(5,) * len(item.token_ids)) for item in trajectories[1:]]
    aged = replace(stale, policy_versions=(5,) * len(stale.token_ids))
    with pytest.raises(TrainingError, match="worst: t0 with 1"):
        GspoTrainer(model, processor, SETTINGS, num_updates=5).update([aged, *fresh])
    metrics = GspoTrainer(model, processor, SETTINGS, num_updates=5).update([stale, *fresh])
    assert metrics["trainer_sampler_logprob_diff"] < 1e-5
    assert metrics["trainer_sampler_logprob_diff_stale"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["staleness_max"] == 2.0
    num_stale, num_all = sum(stale.response_mask), metrics["num_response_tokens"]
    assert metrics["staleness_mean"] == pytest.approx(2 * num_stale / num_all)


def test_log_probabilities_that_are_not_numbers_are_an_error(model, processor):
    first, *rest = sampled(model, processor)
    broken = replace(first, sampled_logprobs=(math.nan,) * len(first.token_ids))
    with pytest.raises(TrainingError, match="differ from the sampler's by nan"):
        GspoTrainer(model, processor, SETTINGS).update([broken, *rest])


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_micro_batches_give_the_same_figures_as_the_big_batch(tiny_folder, processor, micro_batch_size: int):
    def metrics_of(size: int) -> dict[str, float]:
        model = load_model(tiny_folder)
        trajectories = sampled(model, processor)
        trajectories[1] = replace(trajectories[1], weight=0.25)
        trainer = GspoTrainer(
            model,
            processor,
            settings(micro_batch_size=size, entropy_coef=0.01, kl_coef=0.1),
            reference=load_model(tiny_folder, is_frozen=True),
        )
        return trainer.update(trajectories)

    big, small = metrics_of(4), metrics_of(micro_batch_size)
    assert small["grad_norm"] == pytest.approx(big["grad_norm"], rel=1e-4)
    assert small["loss"] == pytest.approx(big["loss"], abs=1e-5)
    assert small["entropy"] == pytest.approx(big["entropy"], rel=1e-5)


def test_accumulated_gradient_equals_the_big_batchs_element_by_element(tiny_folder, processor):
    def gradient(size: int) -> torch.Tensor:
        model = load_model(tiny_folder)
        parts: dict[str, torch.Tensor] = {}
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda param, name=name: parts.update({name: param.grad.detach().clone()})
            )
        trainer = GspoTrainer(model, processor, settings(micro_batch_size=size, entropy_coef=0.01))
        trainer.update(sampled(model, processor))
        return torch.cat([parts[name].flatten() for name in sorted(parts)])

    big = gradient(4)
    assert float(big.norm()) > 1e-3
    assert torch.allclose(gradient(1), big, atol=1e-6, rtol=1e-3)


def test_an_update_with_only_zero_advantages_changes_nothing_and_says_so(model, processor, tiny_folder):
    trainer = GspoTrainer(
        model,
        processor,
        settings(kl_coef=0.5, entropy_coef=0.1),
        reference=load_model(tiny_folder, is_frozen=True),
    )
    before = weights(model)
    metrics = trainer.update(sampled(model, processor, [0.0, 0.0]))
    assert torch.equal(before, weights(model))
    assert metrics["is_skipped"] == 1.0
    assert metrics["num_trajectories"] == 2.0
    assert "loss" not in metrics


def test_an_update_without_trajectories_says_so(model, processor):
    assert GspoTrainer(model, processor, SETTINGS).update([])["is_skipped"] == 1.0


def test_replay_starts_at_a_ratio_of_one_and_is_learned(model, processor):
    replay = replace(conversation(processor, 5), advantage=1.0, is_replay=True, trajectory_id="replay:x")
    before = mean_logprob(model, processor, replay)
    metrics = GspoTrainer(model, processor, SETTINGS).update([replay, canary(model, processor)])
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["num_replay"] == metrics["num_trajectories"] == 1.0
    assert metrics["trainer_sampler_logprob_diff"] < 1e-5
    assert mean_logprob(model, processor, replay) > before


def test_a_replay_weight_of_zero_excludes_the_sequence(model, processor):
    replay = replace(conversation(processor, 5), advantage=1.0, is_replay=True, weight=0.0)
    before = weights(model)
    assert GspoTrainer(model, processor, SETTINGS).update([replay])["is_skipped"] == 1.0
    assert torch.equal(before, weights(model))


def test_a_weight_halves_the_gradient(tiny_folder, processor):
    norms = []
    for weight in (1.0, 0.5):
        model = load_model(tiny_folder)
        replay = replace(conversation(processor, 5), advantage=1.0, is_replay=True, weight=weight)
        norms.append(GspoTrainer(model, processor, SETTINGS).update([replay, canary(model, processor)])["grad_norm"])
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-5)


def test_later_steps_of_an_update_are_limited_by_the_clip(model, processor):
    narrow = settings(clip_low=1e-4, clip_high=1e-4, epochs_per_update=3)
    metrics = GspoTrainer(model, processor, narrow).update(sampled(model, processor))
    # The first pass is at ratio one; one step of 1e-3 already leaves such a narrow clip.
    assert metrics["num_optimizer_steps"] == 3.0
    assert 0.2 < metrics["clipped_share"] <= 2 / 3


def test_each_minibatch_makes_one_step_and_one_without_advantages_makes_none(model, processor):
    metrics = GspoTrainer(model, processor, settings(minibatches_per_update=2)).update(
        sampled(model, processor, [1.0, 0.0])
    )
    assert metrics["num_optimizer_steps"] == 1.0


def test_kl_pulls_towards_the_reference(tiny_folder, processor):
    def drift(kl_coef: float) -> float:
        model, reference = load_model(tiny_folder), load_model(tiny_folder, is_frozen=True)
        # The clip would limit the policy by itself; it is opened, so that only KL does.
        trainer = GspoTrainer(
            model,
            processor,
            settings(kl_coef=kl_coef, clip_low=0.99, clip_high=1e6, epochs_per_update=8, learning_rate=3e-4),
            reference=reference,
        )
        trajectories = sampled(model, processor, [1.0, -1.0])
        trainer.update(trajectories)
        own = [mean_logprob(model, processor, item) for item in trajectories]
        theirs = [mean_logprob(reference, processor, item) for item in trajectories]
        return sum(abs(a - b) for a, b in zip(own, theirs, strict=True))

    assert drift(30.0) < 0.7 * drift(1e-6)


def test_the_reference_is_not_trained(model, processor, tiny_folder):
    reference = load_model(tiny_folder, is_frozen=True)
    before = weights(reference)
    GspoTrainer(model, processor, settings(kl_coef=0.1), reference=reference).update(sampled(model, processor))
    assert torch.equal(before, weights(reference))


def test_a_kl_without_a_reference_is_refused(model, processor):
    with pytest.raises(ValueError, match="a reference model is needed"):
        GspoTrainer(model, processor, settings(kl_coef=0.1))


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_the_weights_unchanged(model, processor):
    trajectories = sampled(model, processor)
    trajectories[2] = replace(trajectories[2], advantage=math.inf)
    before = weights(model)
    with pytest.raises(TrainingError, match=r"update 4: the loss is -?(inf|nan)"):
        GspoTrainer(model, processor, SETTINGS, num_updates=3).update(trajectories)
    assert torch.equal(before, weights(model))
    assert all(param.grad is None for param in model.parameters())


def test_the_order_of_arrival_does_not_change_the_weights(tiny_folder, processor):
    results = []
    for is_reversed in (False, True):
        model = load_model(tiny_folder)
        trajectories = sampled(model, processor)
        GspoTrainer(model, processor, settings(minibatches_per_update=2), seed=4, num_updates=1).update(
            trajectories[::-1] if is_reversed else trajectories
        )
        results.append(weights(model))
    assert torch.allclose(results[0], results[1], atol=1e-6)
