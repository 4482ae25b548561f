from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_samples import conversation, picture

from osworld_pipeline.agent.model_inputs import build_model_inputs
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import TrainingError
from osworld_pipeline.training.batch import build_batch
from osworld_pipeline.training.micro_batches import make_micro_batches, split_by_size
from osworld_pipeline.training.objective.score import score_responses, score_trajectories
from osworld_pipeline.training.packing import use_packed_attention


def stock_logprobs(model, processor, trajectory: Trajectory) -> torch.Tensor:
    """All logits of one sequence by the model's own forward pass, as a sampler would see them: without banned ids."""
    arrays = build_model_inputs(processor, [(trajectory.token_ids, trajectory.images)])
    with torch.no_grad():
        logits = model(**{name: torch.from_numpy(array) for name, array in arrays.items()}).logits[0]
    logits[:, list(Renderer(processor).banned_ids(logits.shape[-1]))] = -torch.inf
    picked = torch.log_softmax(logits[:-1], -1).gather(-1, torch.tensor(trajectory.token_ids)[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), picked]).masked_fill(torch.tensor(trajectory.response_mask) == 0, 0.0)


def text_only(processor, trajectory_id: str) -> Trajectory:
    ids = processor.tokenizer("system\nYou operate Action: click 7")["input_ids"]
    mask = [0] * (len(ids) - 3) + [1] * 3
    return Trajectory(
        trajectory_id=trajectory_id, task_id="t", token_ids=tuple(ids), response_mask=tuple(mask), images=()
    )


def test_scores_equal_the_models_own_forward_pass_for_sequences_of_unequal_length(model, processor):
    trajectories = [conversation(processor, number, num_turns=turns) for number, turns in ((1, 3), (2, 1), (9, 2))]
    trajectories.append(text_only(processor, "text"))
    for trajectory, scores in zip(trajectories, score_trajectories(model, processor, trajectories), strict=True):
        assert torch.allclose(scores, stock_logprobs(model, processor, trajectory), atol=1e-5)


def test_a_batch_without_pictures_after_one_with_pictures_is_scored_right(model, processor):
    score_trajectories(model, processor, [conversation(processor, 1)])
    trajectory = text_only(processor, "text")
    scores = score_trajectories(model, processor, [trajectory])[0]
    assert torch.allclose(scores, stock_logprobs(model, processor, trajectory), atol=1e-5)


def test_padding_changes_nothing(model, processor):
    short = conversation(processor, 2, num_turns=1)
    alone = score_responses(model, build_batch(processor, [short])).logprobs_BT[0]
    padded = score_responses(model, build_batch(processor, [conversation(processor, 1, num_turns=3), short]))
    assert torch.allclose(padded.logprobs_BT[1, : len(alone)], alone, atol=1e-5)
    assert float(padded.logprobs_BT[1, len(alone) :].detach().abs().max()) == 0.0


def test_the_policy_sees_the_picture(model, processor):
    trajectory = conversation(processor, 1, num_turns=1)
    other = replace(trajectory, images=(picture(55),))
    first, second = score_trajectories(model, processor, [trajectory, other])
    assert float((first - second).abs().max()) > 1e-4


def test_a_picture_that_comes_twice_is_encoded_once_and_counts_twice(model, processor):
    first, second = conversation(processor, 1, num_turns=2), conversation(processor, 2, num_turns=2)
    batch = build_batch(processor, [first, second])
    # Pictures 1 and 2, then 2 and 3.
    assert batch.image_index_I == (0, 1, 1, 2)
    assert batch.pixel_values is not None
    assert batch.image_grid_U3 is not None
    assert len(batch.image_grid_U3) == 3
    assert len(batch.pixel_values) == int(batch.image_grid_U3.prod(-1).sum())

    def gradient(parts: list[list[Trajectory]]) -> torch.Tensor:
        model.zero_grad()
        for part in parts:
            score_responses(model, build_batch(processor, part)).logprobs_BT.sum().backward()
        return torch.cat([param.grad.flatten() for param in model.model.visual.parameters() if param.grad is not None])

    assert torch.allclose(gradient([[first, second]]), gradient([[first], [second]]), atol=1e-4, rtol=1e-3)


def test_entropy_is_that_of_the_predicting_position(model, processor):
    trajectory = conversation(processor, 1, num_turns=1)
    batch = build_batch(processor, [trajectory])
    scores = score_responses(model, batch, with_entropy=True)
    mask = torch.tensor(trajectory.response_mask, dtype=torch.bool)
    entropies = scores.entropy_BT[0][mask]
    # An untrained model is near the uniform distribution over its vocabulary, and never above it.
    uniform = torch.log(torch.tensor(float(model.config.text_config.vocab_size)))
    assert float(entropies.detach().max()) <= float(uniform) + 1e-4
    assert float(entropies.detach().min()) > 0.9 * float(uniform)


def test_a_missing_picture_is_refused_and_the_trajectory_is_named(processor):
    trajectory = replace(conversation(processor, 4, num_turns=2), images=(picture(4),))
    with pytest.raises(TrainingError, match=r"trajectory t4: .*2 runs of image placeholders and 1 images"):
        build_batch(processor, [trajectory])


def test_a_picture_of_another_size_is_refused(processor):
    trajectory = replace(conversation(processor, 4, num_turns=1), images=(picture(4, width=128),))
    with pytest.raises(TrainingError, match=r"trajectory t4: .*image 0 has 6 placeholders where its pixels make 8"):
        build_batch(processor, [trajectory])


def test_a_trajectory_without_a_response_is_refused(processor):
    trajectory = conversation(processor, 4)
    empty = replace(trajectory, response_mask=(0,) * len(trajectory.token_ids))
    with pytest.raises(TrainingError, match="t4 has no response tokens"):
        build_batch(processor, [empty])


def test_micro_batches_hold_every_trajectory_once_within_the_limit(processor):
    trajectories = [conversation(processor, number, num_turns=number % 3 + 1) for number in range(7)]
    limit = 2 * max(len(trajectory.token_ids) for trajectory in trajectories)
    parts = list(split_by_size(trajectories, max_tokens=limit, max_sequences=3))
    assert sorted(item.trajectory_id for part in parts for item in part) == [f"t{number}" for number in range(7)]
    for part in parts:
        assert len(part) <= 3
        assert len(part) == 1 or len(part) * max(len(item.token_ids) for item in part) <= limit


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_trajectory_longer_than_the_budget_is_refused_by_name(processor, is_packed: bool):
    short, long = conversation(processor, 1, num_turns=1), conversation(processor, 2, num_turns=3)
    limit = len(long.token_ids) - 1
    with pytest.raises(TrainingError, match=rf"t2 has {limit + 1} tokens, more than the {limit} of a forward pass"):
        make_micro_batches([short, long], max_tokens=limit, is_packed=is_packed)


def test_packed_scores_equal_padded_ones(model, processor):
    trajectories = [conversation(processor, number, num_turns=turns) for number, turns in ((1, 3), (2, 1), (9, 2))]
    trajectories.append(text_only(processor, "text"))
    padded = score_trajectories(model, processor, trajectories)
    use_packed_attention(model)
    packed = score_trajectories(model, processor, trajectories, is_packed=True)
    for one, other in zip(packed, padded, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_packed_gradients_equal_padded_ones(model, processor):
    trajectories = [conversation(processor, number, num_turns=turns) for number, turns in ((1, 2), (2, 1))]

    def gradient(is_packed: bool) -> torch.Tensor:
        model.zero_grad()
        batch = build_batch(processor, trajectories, is_packed=is_packed)
        assert batch.input_ids_RL.shape[0] == (1 if is_packed else 2)
        score_responses(model, batch).logprobs_BT.sum().backward()
        return torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])

    padded = gradient(False)
    use_packed_attention(model)
    assert torch.allclose(gradient(True), padded, atol=1e-4, rtol=1e-3)


def test_the_score_of_a_trajectory_does_not_depend_on_what_precedes_it_in_a_packed_row(model, processor):
    use_packed_attention(model)
    second = conversation(processor, 2)
    rows = [
        score_responses(model, build_batch(processor, [conversation(processor, number), second], is_packed=True))
        for number in (1, 7)
    ]
    assert torch.allclose(rows[0].logprobs_BT[1], rows[1].logprobs_BT[1], atol=1e-6)
    assert not torch.allclose(rows[0].logprobs_BT[0], rows[1].logprobs_BT[0], atol=1e-3)


def test_a_packed_row_is_filled_before_the_next_starts(processor):
    trajectories = [conversation(processor, number, num_turns=number % 3 + 1) for number in range(6)]
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    limit = max(lengths) + min(lengths)
    parts = split_by_size(trajectories, max_tokens=limit, is_packed=True)
    assert sorted(item.trajectory_id for part in parts for item in part) == [f"t{number}" for number in range(6)]
    assert all(sum(len(item.token_ids) for item in part) <= limit for part in parts)
    assert len(parts) < len(split_by_size(trajectories, max_tokens=limit))


@given(
    sizes=st.lists(st.tuples(st.integers(2, 60), st.booleans()), max_size=25),
    num_ranks=st.integers(1, 5),
    is_packed=st.booleans(),
)
def test_every_rank_makes_the_same_number_of_passes_and_every_trajectory_counts_once(
    sizes: list[tuple[int, bool]], num_ranks: int, is_packed: bool
):
    trajectories = [
        Trajectory(
            trajectory_id=f"t{index}",
            task_id="t",
            token_ids=(1,) * length,
            response_mask=(0,) + (1,) * (length - 1),
            images=(b"x",) * has_image,
        )
        for index, (length, has_image) in enumerate(sizes)
    ]
    rounds = make_micro_batches(trajectories, num_ranks=num_ranks, max_tokens=64, max_sequences=4, is_packed=is_packed)
    assert all(len(micro_batches) == num_ranks for micro_batches in rounds)
    counted = [
        item.trajectory_id
        for micro_batches in rounds
        for one in micro_batches
        if not one.is_dummy
        for item in one.trajectories
    ]
    assert sorted(counted) == sorted(item.trajectory_id for item in trajectories)
    for micro_batches in rounds:
        assert len({bool(item.images) for micro_batch in micro_batches for item in micro_batch.trajectories}) == 1
