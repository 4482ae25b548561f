"""The loss options as the trainer reads them from a recipe's keys."""

import math
from dataclasses import replace

import pytest
import torch
from training_samples import as_sampled, conversation

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import TrainingError
from osworld_pipeline.recipes.schema import GspoSharedSection
from osworld_pipeline.training.batch import build_batch
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.objective.score import score_responses, score_trajectories
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
def test_each_length_norm_weights_fresh_sequences_as_defined(tiny_folder, processor, sampled, algorithm: str):
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


def test_weighted_by_tokens_the_turns_of_a_window_episode_count_as_whole_sequences_do(tiny_folder, processor, sampled):
    turns = [replace(item, trajectory_id=f"e#{number}") for number, item in enumerate(sampled)]
    for keys in ({"length_norm": "token_mean"}, {"length_norm": "token_mean", "algorithm": "grpo"}):
        whole = updated(tiny_folder, processor, sampled, **keys)
        shared = updated(tiny_folder, processor, turns, **keys)
        assert shared["loss"] == pytest.approx(whole["loss"], abs=1e-6)
        assert shared["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("turn_weight", ["turn", "token"])
def test_the_turns_of_an_episode_share_its_weight_as_the_recipe_says(tiny_folder, processor, sampled, turn_weight: str):
    # Two turns of one episode, distinguished by advantages that the turns of an episode never have.
    turns = [replace(item, trajectory_id=f"e#{number}") for number, item in enumerate(sampled)]
    one, two = lengths(sampled)
    shares = {"turn": (0.5, 0.5), "token": (one / (one + two), two / (one + two))}[turn_weight]
    metrics = updated(tiny_folder, processor, turns, turn_weight=turn_weight)
    assert metrics["loss"] == pytest.approx(-shares[0] + 0.5 * shares[1], abs=1e-4)


def test_members_without_advantage_count_in_the_mean(tiny_folder, processor, sampled):
    # 2 of 8 with an advantage: the others make the gradient 4 times smaller, and cost no pass without KL and entropy.
    idle = [replace(sampled[0], trajectory_id=f"idle{number}", advantage=0.0) for number in range(6)]
    alone = updated(tiny_folder, processor, sampled)
    among = updated(tiny_folder, processor, [*sampled, *idle])
    assert among["loss"] == pytest.approx(alone["loss"] / 4, rel=1e-5)
    assert among["grad_norm"] == pytest.approx(alone["grad_norm"] / 4, rel=1e-5)
    by_token = updated(tiny_folder, processor, [*sampled, *idle], length_norm="token_mean")
    num_tokens = sum(lengths([*sampled, *idle]))
    one, two = lengths(sampled)
    assert by_token["loss"] == pytest.approx((-one + 0.5 * two) / num_tokens, abs=1e-5)


def shifted(trajectories: list[Trajectory], by: float, *, version: int | None = None) -> list[Trajectory]:
    """The trajectories as if a sampler had given every token a log-probability that is higher by `by`."""
    return [
        replace(
            item,
            sampled_logprobs=tuple(value + by for value in item.sampled_logprobs or ()),
            policy_versions=None if version is None else (version,) * len(item.token_ids),
        )
        for item in trajectories
    ]


@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
def test_the_old_logprobs_are_the_trainers_and_the_weight_is_trainer_over_sampler(
    tiny_folder, processor, sampled, algorithm: str
):
    # A sampler that found every token 2 times less likely: trainer over sampler is 2, truncated at 1.5.
    stale = shifted(sampled, -math.log(2), version=-5)
    keys = {"algorithm": algorithm, "importance_high": 1.5}
    capped = updated(tiny_folder, processor, [*stale, canary_of(sampled)], **keys)
    assert capped["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert capped["clipped_share"] == 0.0
    assert capped["importance_mean"] == pytest.approx(1.5, abs=1e-5)
    assert capped["importance_changed_share"] == 1.0
    assert capped["loss"] == pytest.approx(1.5 * (-1.0 + 0.5) / 2, abs=1e-4)
    plain = updated(
        tiny_folder, processor, [*stale, canary_of(sampled)], **keys, importance="none", old_logprobs="sampler"
    )
    assert plain["ratio_mean"] == pytest.approx(2.0, abs=1e-4)
    assert plain["importance_mean"] == 1.0


@pytest.mark.parametrize("context_mode", ["append", "window"])
def test_the_whole_episode_has_one_weight_in_either_context_mode(tiny_folder, processor, sampled, context_mode: str):
    names = ["e#0", "e#1"] if context_mode == "window" else ["e", "f"]
    stale = [
        replace(item, trajectory_id=name) for item, name in zip(shifted(sampled, -0.01, version=-5), names, strict=True)
    ]
    keys = {"importance": "sequence_truncate", "importance_high": 99.0}
    metrics = updated(tiny_folder, processor, [*stale, canary_of(sampled)], **keys)
    one, two = lengths(sampled)
    whole = [math.exp(0.01 * (one + two))] * 2
    each = [math.exp(0.01 * one), math.exp(0.01 * two)]
    expected = whole if context_mode == "window" else each
    assert metrics["importance_mean"] == pytest.approx(sum(expected) / 2, rel=1e-4)


def canary_of(sampled: list[Trajectory]) -> Trajectory:
    return replace(sampled[0], trajectory_id="canary", advantage=0.0, is_canary=True)


def test_an_update_whose_samples_are_too_far_off_policy_is_held(tiny_folder, processor, sampled):
    # One token's ratio is e^10 and the others e^-3: almost only that token would count.
    far = shifted(sampled, 3.0, version=-5)
    place = far[0].response_mask.index(1)
    values = list(far[0].sampled_logprobs or ())
    values[place] -= 13.0
    far[0] = replace(far[0], sampled_logprobs=tuple(values))
    keys = {"importance_high": 1e9, "min_effective_share": 0.2}
    model = load_model(tiny_folder)
    trainer = GspoTrainer(model, processor, SETTINGS.model_copy(update=keys))
    before = [param.clone() for param in model.parameters()]
    metrics = trainer.update([*far, canary_of(sampled)])
    assert metrics["is_held"] == 1.0
    assert metrics["effective_share"] < 0.2
    assert "loss" not in metrics
    assert all(map(torch.equal, before, model.parameters()))
    assert updated(tiny_folder, processor, [*far, canary_of(sampled)], **{**keys, "min_effective_share": 0.0})["loss"]


def test_an_update_without_a_token_of_its_own_weights_is_refused(tiny_folder, processor, sampled):
    # The mean difference over no tokens is 0, so such an update used to pass.
    stale = shifted(sampled, 9.0, version=-1)
    with pytest.raises(TrainingError, match="update 1: its own weights sampled none of its tokens"):
        updated(tiny_folder, processor, stale)
    metrics = updated(tiny_folder, processor, [*stale, canary_of(sampled)], min_effective_share=0.0)
    assert metrics["checked_token_share"] == 0.0
    assert metrics["num_canary_tokens"] == lengths(sampled)[0]
    wrong = replace(canary_of(shifted(sampled, 9.0)), policy_versions=(0,) * len(sampled[0].token_ids))
    with pytest.raises(TrainingError, match="worst: canary with 9"):
        updated(tiny_folder, processor, [*stale, wrong])


@pytest.mark.parametrize("temperature", [0.5, 0.8])
def test_a_response_is_scored_at_the_temperature_it_was_sampled_at(model, processor, temperature: float):
    trajectory = replace(conversation(processor, 3), temperature=temperature)
    (scores,) = score_trajectories(model, processor, [trajectory])
    batch = build_batch(processor, [replace(trajectory, temperature=1.0)])
    hidden = []
    handle = model.lm_head.register_forward_hook(lambda module, given, logits: hidden.append(logits))
    score_responses(model, batch)
    handle.remove()
    banned = list(Renderer(processor).banned_ids(model.config.text_config.vocab_size))
    assert banned
    logits = hidden[0].detach() / temperature
    logits[:, banned] = -math.inf
    mask = torch.tensor(trajectory.response_mask, dtype=torch.bool)
    targets = torch.tensor(trajectory.token_ids)[mask]
    expected = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    assert torch.allclose(scores[mask], expected, atol=1e-5)


def test_a_response_with_a_banned_id_is_refused_by_name(model, processor):
    trajectory = conversation(processor, 3)
    ids, place = list(trajectory.token_ids), trajectory.response_mask.index(1)
    ids[place] = len(processor.tokenizer)
    with pytest.raises(TrainingError, match=r"t3 has the id \d+ in a response, which no policy samples"):
        score_trajectories(model, processor, [replace(trajectory, token_ids=tuple(ids))])


def enlarged(tiny_folder, dtype: str):
    """Larger weights, because rounding does not change the nearly equal logits of fresh ones; both types hold the same
    numbers."""
    model = load_model(tiny_folder, dtype="bfloat16")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    return model.float() if dtype == "float32" else model


@pytest.mark.parametrize("micro_batch_size", [1, 3, 8])
def test_in_bfloat16_rounding_clips_no_sequence_of_the_first_step(tiny_folder, processor, micro_batch_size: int):
    # The published clip, and a sampler that computes with the same weights in another precision.
    conversations = [conversation(processor, number, num_turns=number % 3 + 1) for number in range(9)]
    sampled = as_sampled(enlarged(tiny_folder, "float32"), processor, conversations, [1.0] * 9)
    keys = {"clip_low": 3.5e-4, "clip_high": 3.5e-4, "micro_batch_size": micro_batch_size, "max_logprob_diff": 0.05}
    found = {}
    for old, importance in (("trainer", "token_truncate"), ("sampler", "none")):
        changes = {**keys, "old_logprobs": old, "importance": importance}
        trainer = GspoTrainer(enlarged(tiny_folder, "bfloat16"), processor, SETTINGS.model_copy(update=changes))
        found[old] = trainer.update(sampled)
    assert found["trainer"]["trainer_sampler_logprob_diff"] > 1e-4
    assert found["trainer"]["ratio_mean"] == 1.0
    assert found["trainer"]["first_step_clipped_share"] == 0.0
    assert found["sampler"]["first_step_clipped_share"] > 0.1, "as it was"
