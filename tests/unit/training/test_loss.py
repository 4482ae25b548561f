"""The policy losses against hand-worked numbers: GSPO, GRPO, their clips and length norms."""

import math

import pytest
import torch

from osworld_pipeline.training.objective.loss import PolicyLoss, policy_loss


def double(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def loss_of(
    logp, old, advantages, mask=None, *, algorithm="gspo", clip_low=0.1, clip_high=0.1, **choices
) -> PolicyLoss:
    logp = logp if isinstance(logp, torch.Tensor) else double(logp)
    mask = torch.ones(logp.shape) if mask is None else torch.tensor(mask)
    return policy_loss(
        logp, double(old), double(advantages), mask, algorithm=algorithm, clip_low=clip_low, clip_high=clip_high,
        **choices,
    )  # fmt: skip


def gradient(logp, *arguments, **choices) -> list[list[float]]:
    leaf = double(logp).requires_grad_()
    loss_of(leaf, *arguments, **choices).loss.backward()
    assert leaf.grad is not None
    return leaf.grad.tolist()


def test_gspo_matches_hand_worked_numbers():
    # Two response tokens, differences 0.2 and 0.0: s = exp(0.1) = 1.10517. Advantage 2, clip at 1.05: 2 * 1.05.
    result = loss_of(
        [[-9.0, -0.8, -1.0]], [[-1.0, -1.0, -1.0]], [2.0], [[0, 1, 1]], clip_low=0.05, clip_high=0.05
    )  # fmt: skip
    assert float(result.ratio_B[0]) == pytest.approx(1.1051709, abs=1e-6)
    assert float(result.loss) == pytest.approx(-2.1)
    assert result.clipped_B.tolist() == [1.0]


def test_grpo_matches_hand_worked_numbers():
    # Ratios exp(0.2) = 1.221403 and 1; A = 2, clip at 1.1: terms -2.2 and -2, their mean -2.1; one of two is clipped.
    result = loss_of([[-9.0, -0.8, -1.0]], [[-1.0, -1.0, -1.0]], [2.0], [[0, 1, 1]], algorithm="grpo")
    assert float(result.loss) == pytest.approx(-2.1)
    assert result.clipped_B.tolist() == [0.5]
    assert result.ratio_B.tolist() == pytest.approx([1.1107014], abs=1e-6)
    # The clipped token has no gradient; the other -A s / 2 tokens.
    grads = gradient([[-9.0, -0.8, -1.0]], [[-1.0, -1.0, -1.0]], [2.0], [[0, 1, 1]], algorithm="grpo")
    assert grads == [pytest.approx([0.0, 0.0, -1.0])]


@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
def test_a_step_that_makes_a_bad_sequence_likelier_is_not_clipped(algorithm: str):
    # A = -1, s = exp(0.1): min(-1.10517, -1.05) is the unclipped one, so the policy is still pushed back.
    result = loss_of([[-0.9]], [[-1.0]], [-1.0], algorithm=algorithm, clip_low=0.05, clip_high=0.05)
    assert float(result.loss) == pytest.approx(1.1051709, abs=1e-6)
    assert result.clipped_B.tolist() == [0.0]


@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
def test_the_lower_and_the_upper_clip_are_independent(algorithm: str):
    # s = exp(0.2) = 1.2214 with A = 1 meets the upper clip 1.28 and stays; s = exp(-0.3) = 0.7408 with A = -1 meets the
    # lower clip 0.8: -min(-0.7408, -0.8) = 0.8. Mean (-1.221403 + 0.8) / 2.
    result = loss_of(
        [[-0.8], [-1.3]], [[-1.0], [-1.0]], [1.0, -1.0], algorithm=algorithm, clip_low=0.2, clip_high=0.28
    )  # fmt: skip
    assert float(result.loss) == pytest.approx(-0.2107014, abs=1e-6)
    assert result.clipped_B.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
def test_a_clipped_sequence_gets_no_gradient(algorithm: str):
    assert gradient(
        [[-0.9], [-1.0]], [[-1.0], [-1.0]], [1.0, 1.0], algorithm=algorithm, clip_low=0.05, clip_high=0.05
    ) == [[0.0], pytest.approx([-0.5])]


@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
def test_the_first_step_on_fresh_samples_is_the_policy_gradient(algorithm: str):
    # s = 1 everywhere: d loss / d logp = -A / (B * response tokens).
    logp = [[-1.0, -2.0], [-0.5, -0.1]]
    grads = gradient(logp, logp, [1.5, -0.5], algorithm=algorithm, clip_low=1e-3, clip_high=1e-3)
    assert grads == [pytest.approx([-0.375, -0.375]), pytest.approx([0.125, 0.125])]


# On fresh samples the term of a sequence is -A, so l = (-3, 2) with 1 and 3 tokens. sequence_mean: (-3 + 2) / 2;
# token_mean: (-3 * 1 + 2 * 3) / 4; constant: (-3 * 1 + 2 * 3) / (2 * 5).
@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
@pytest.mark.parametrize(
    ("length_norm", "expected"), [("sequence_mean", -0.5), ("token_mean", 0.75), ("constant", 0.3)]
)
def test_each_length_norm_matches_hand_worked_numbers(algorithm: str, length_norm: str, expected: float):
    logp = [[-1.0, -2.0, -3.0], [-0.5, -0.1, -0.2]]
    mask = [[0, 1, 0], [1, 1, 1]]
    result = loss_of(
        logp, logp, [3.0, -2.0], mask, algorithm=algorithm, length_norm=length_norm, max_response_tokens=5
    )  # fmt: skip
    assert float(result.loss) == pytest.approx(expected)


def test_token_mean_weights_each_token_equally_and_sequence_mean_each_sequence():
    logp, mask = [[-1.0, -2.0], [-0.5, -0.1]], [[1, 0], [1, 1]]
    by_token = gradient(logp, logp, [1.0, 1.0], mask, algorithm="grpo", length_norm="token_mean")
    assert by_token == [pytest.approx([-1 / 3, 0.0]), pytest.approx([-1 / 3, -1 / 3])]
    by_sequence = gradient(logp, logp, [1.0, 1.0], mask, algorithm="grpo", length_norm="sequence_mean")
    assert by_sequence == [pytest.approx([-1 / 2, 0.0]), pytest.approx([-1 / 4, -1 / 4])]


def test_a_weight_scales_its_sequence_and_not_the_number_of_sequences():
    logp = [[-1.0], [-1.0]]
    assert float(loss_of(logp, logp, [1.0, 1.0]).loss) == -1.0
    assert float(loss_of(logp, logp, [1.0, 1.0], weights_B=double([1.0, 0.5])).loss) == -0.75


def test_the_entropy_bonus_matches_hand_worked_numbers():
    # Mean entropy of the response tokens (1 + 2) / 2 = 1.5, times 0.1.
    result = loss_of(
        [[-1.0] * 3], [[-1.0] * 3], [0.0], [[1, 1, 0]], entropy_BT=double([[1.0, 2.0, 99.0]]), entropy_coef=0.1
    )  # fmt: skip
    assert float(result.entropy_B[0]) == 1.5
    assert float(result.loss) == pytest.approx(-0.15)


# Weights 2 and 3 on the two response tokens; on fresh samples the loss is -A times their mean. For gspo both weigh the
# one ratio of the sequence, whose gradient is spread evenly; for grpo each its own token.
@pytest.mark.parametrize(("algorithm", "expected"), [("gspo", [2.5, 2.5]), ("grpo", [2.0, 3.0])])
def test_the_loss_with_importance_weights_matches_hand_worked_numbers(algorithm: str, expected: list[float]):
    own = [[-1.0, -1.0, -7.0]]
    choices = {"algorithm": algorithm, "importance_BT": double([[2.0, 3.0, math.inf]])}
    result = loss_of(own, own, [1.0], [[1, 1, 0]], **choices)
    assert float(result.loss) == pytest.approx(-2.5)
    assert result.importance_B.tolist() == pytest.approx([2.5])
    # The weight is a constant: the gradient is the plain one times the weight.
    pulls = [-one / 2 for one in expected]
    assert gradient(own, own, [1.0], [[1, 1, 0]], **choices) == [pytest.approx([*pulls, 0.0])]


def test_importance_weights_apply_neither_to_kl_nor_to_entropy():
    own = [[-1.0]]
    result = loss_of(
        own, own, [0.0], importance_BT=double([[2.0]]), entropy_BT=double([[1.0]]), entropy_coef=1.0,
        ref_logprobs_BT=double([[-3.0]]), kl_coef=1.0, kl_estimator="k1",
    )  # fmt: skip
    assert float(result.loss) == pytest.approx(2.0 - 1.0)


def test_a_constant_length_norm_without_max_response_tokens_is_refused():
    with pytest.raises(ValueError, match="divides by max_response_tokens"):
        loss_of([[-1.0]], [[-1.0]], [1.0], length_norm="constant")
