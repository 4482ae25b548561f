"""Log-probabilities of tokens, and the SFT loss over them, against hand-worked numbers."""

import math

import pytest
import torch

from osworld_pipeline.training.objective.loss import sft_loss, token_logprobs


def double(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_sft_loss_matches_hand_worked_numbers():
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]])
    assert float(sft_loss(double([[-9.0, -1.0, -2.0], [-9.0, -9.0, -3.0]]), mask)) == pytest.approx(2.0)


def test_sft_parts_add_up_by_tokens_and_not_by_sequences():
    logp, mask = double([[-1.0, -2.0], [-3.0, -9.0]]), torch.tensor([[1, 1], [1, 0]])
    parts = [sft_loss(logp[row : row + 1], mask[row : row + 1], num_tokens=3) for row in range(2)]
    assert float(sum(parts)) == pytest.approx(float(sft_loss(logp, mask))) == pytest.approx(2.0)


def test_sft_loss_ignores_everything_outside_the_mask():
    logp = double([[math.inf, -1.0, math.nan]]).requires_grad_()
    loss = sft_loss(logp, torch.tensor([[0, 1, 0]]))
    loss.backward()
    assert float(loss.detach()) == 1.0
    assert logp.grad is not None
    assert logp.grad.tolist() == [[0.0, -1.0, 0.0]]


def test_token_logprobs_and_entropy_match_hand_worked_numbers():
    # Logits (0, ln 3): probabilities 1/4 and 3/4; entropy 0.5623351.
    logits = double([[0.0, math.log(3)], [0.0, math.log(3)]])
    picked, entropy = token_logprobs(logits, torch.tensor([0, 1]), lambda x: x, vocab_size=2, with_entropy=True)
    assert picked.tolist() == pytest.approx([math.log(0.25), math.log(0.75)], abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.5623351, 0.5623351], abs=1e-6)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64])
def test_chunks_change_neither_values_nor_gradients(count: int):
    torch.manual_seed(0)
    vocab = 11
    head = torch.nn.Linear(5, vocab, bias=False)
    targets = torch.randint(0, vocab, (count,))

    def run(limit: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = torch.linspace(-1, 1, count * 5).view(count, 5).requires_grad_()
        head.zero_grad()
        picked, entropy = token_logprobs(
            hidden, targets, head, vocab_size=vocab, with_entropy=True, max_chunk_logits=limit
        )
        (picked.sum() + 0.3 * entropy.sum()).backward()
        assert hidden.grad is not None
        assert head.weight.grad is not None
        return picked.detach(), hidden.grad, head.weight.grad.clone()

    for whole, chunked in zip(run(1 << 20), run(vocab * 8), strict=True):
        assert torch.allclose(whole, chunked, atol=1e-6)


def test_logits_of_half_precision_are_normalised_in_float32():
    picked, _ = token_logprobs(
        torch.tensor([[8.0, 7.9]], dtype=torch.bfloat16), torch.tensor([0]), lambda x: x, vocab_size=2
    )
    assert picked.dtype == torch.float32
