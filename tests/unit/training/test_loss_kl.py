"""The estimators of the KL divergence: by hand, in expectation over a whole distribution, and for distant policies."""

import math

import pytest
import torch

from osworld_pipeline.training.objective.loss import MAX_LOG_RATIO, policy_loss, token_kl


def double(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# ref - logp = ln 2: k1 = -ln 2; k2 = ln(2)^2 / 2 = 0.2402265; k3 = 2 - ln 2 - 1 = 0.3068528.
@pytest.mark.parametrize(("estimator", "expected"), [("k1", -0.6931472), ("k2", 0.2402265), ("k3", 0.3068528)])
def test_each_estimator_matches_hand_worked_numbers(estimator, expected: float):
    assert float(token_kl(double([-1.0 - math.log(2)]), double([-1.0]), estimator)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_equal_policies_have_no_divergence(estimator):
    assert token_kl(double([-1.0, -5.0]), double([-1.0, -5.0]), estimator).abs().tolist() == [0.0, 0.0]


def test_kl_is_averaged_over_response_tokens_and_scaled():
    # k3 of ln 2 and of 0: their mean is 0.1534264; times 0.5.
    result = policy_loss(
        double([[-1.0 - math.log(2), -1.0, -5.0]]),
        double([[-1.0, -1.0, -1.0]]),
        double([0.0]),
        torch.tensor([[1, 1, 0]]),
        algorithm="gspo",
        clip_low=0.1,
        clip_high=0.1,
        ref_logprobs_BT=double([[-1.0, -1.0, 700.0]]),
        kl_coef=0.5,
    )
    assert float(result.kl_B[0]) == pytest.approx(0.1534264, abs=1e-6)
    assert float(result.loss) == pytest.approx(0.0767132, abs=1e-6)


def expected_values(estimator) -> tuple[float, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Over all tokens of a small distribution: the estimator's mean, its mean gradient as a loss, and the gradients of
    KL(policy || reference) and KL(reference || policy), all with respect to the policy's logits."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(logits.detach() + 0.5 * torch.randn(5, dtype=torch.float64), -1)
    logp = torch.log_softmax(logits, -1)
    estimates = token_kl(logp, ref, estimator)
    mean = float((logp.exp().detach() * estimates).sum().detach())

    def grad(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    return (
        mean - float((logp.exp() * (logp - ref)).sum().detach()),
        grad((logp.exp().detach() * estimates).sum()),
        grad((logp.exp() * (logp - ref)).sum()),
        grad((ref.exp() * (ref - logp)).sum()),
    )


def test_k1_and_k3_have_no_bias():
    for estimator in ("k1", "k3"):
        assert expected_values(estimator)[0] == pytest.approx(0.0, abs=1e-12)
    assert abs(expected_values("k2")[0]) > 1e-3


def test_the_mean_gradient_of_k1_is_zero_that_of_k2_is_reverse_kl_and_that_of_k3_is_forward_kl():
    assert torch.allclose(expected_values("k1")[1], torch.zeros(5, dtype=torch.float64), atol=1e-12)
    _, gradient, reverse, forward = expected_values("k2")
    assert torch.allclose(gradient, reverse, atol=1e-12)
    _, gradient, reverse, forward = expected_values("k3")
    assert torch.allclose(gradient, forward, atol=1e-12)
    assert not torch.allclose(reverse, forward, atol=1e-3)


def test_one_outlier_token_cannot_dominate_the_kl():
    assert float(token_kl(double([-30.0]), double([-0.1]), "k3")) == 10.0


@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
@pytest.mark.parametrize("distance", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_policies_far_apart_give_finite_losses_and_gradients_in_float32(algorithm, distance: float, estimator):
    logp = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    far = torch.tensor([[-1.0 - distance, -1.0]])
    result = policy_loss(
        logp, far, torch.tensor([-1.0]), torch.ones(1, 2), algorithm=algorithm, clip_low=0.1, clip_high=0.1,
        ref_logprobs_BT=far, kl_coef=0.1, kl_estimator=estimator, importance_BT=torch.full((1, 2), 2.0),
    )  # fmt: skip
    result.loss.backward()
    assert logp.grad is not None
    assert math.isfinite(float(result.loss.detach()))
    assert bool(logp.grad.isfinite().all())
    assert float(result.ratio_B[0]) <= math.exp(MAX_LOG_RATIO) * (1 + 1e-6)
