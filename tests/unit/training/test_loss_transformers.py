"""The SFT loss against transformers' own: a tiny Qwen3-VL with pictures, its `labels`, and every weight's gradient."""

import pytest
import torch
from training_samples import conversation

from osworld_pipeline.agent.model_inputs import build_model_inputs
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.training.batch import build_batch
from osworld_pipeline.training.objective.loss import sft_loss
from osworld_pipeline.training.objective.score import score_responses
from osworld_pipeline.training.packing import use_packed_attention


def transformers_loss(model, processor, trajectories: list[Trajectory]) -> torch.Tensor:
    """The loss from whole logits, the whole attention mask and shifted labels: only the tokens are ours."""
    arrays = build_model_inputs(processor, [(trajectory.token_ids, trajectory.images) for trajectory in trajectories])
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, trajectory in enumerate(trajectories):
        real = inputs["attention_mask"][row].bool()
        ids = torch.tensor(trajectory.token_ids)
        labels[row, real] = torch.where(torch.tensor(trajectory.response_mask).bool(), ids, -100)
    return model(**inputs, labels=labels).loss


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("turns", [[1], [3, 1, 2], [2, 2, 1, 4]], ids=str)
def test_sft_loss_and_gradients_equal_transformers(model, processor, turns: list[int], is_packed: bool):
    trajectories = [conversation(processor, number, num_turns=count) for number, count in enumerate(turns)]
    theirs = transformers_loss(model, processor, trajectories)
    expected = gradients(model, theirs)
    if is_packed:
        use_packed_attention(model)
    batch = build_batch(processor, trajectories, is_packed=is_packed)
    ours = sft_loss(score_responses(model, batch).logprobs_BT, batch.response_mask_BT)
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), abs=1e-6)
    found = gradients(model, ours)
    assert found.keys() == expected.keys()
    assert any(name.startswith("model.visual") for name in found)
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-6), name
