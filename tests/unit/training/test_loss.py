"""The losses against hand-worked numbers and against an implementation written from the formula in float64 NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from osworld_pipeline.training.loss import GspoLoss, gspo_loss, sft_loss, token_logprobs


def double(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def plain_gspo(logp, old, advantage, mask, *, low, high, ref, kl_coef, entropy, entropy_coef, weight) -> float:
    """One loop per sequence and token, straight from the published formula."""
    terms = []
    for i in range(len(logp)):
        tokens = [t for t in range(len(mask[i])) if mask[i][t]]
        s = math.exp(sum(logp[i][t] - old[i][t] for t in tokens) / len(tokens))
        clipped = min(max(s, 1 - low), 1 + high)
        term = -min(s * advantage[i], clipped * advantage[i])
        kls = [math.exp(ref[i][t] - logp[i][t]) - (ref[i][t] - logp[i][t]) - 1 for t in tokens]
        term += kl_coef * sum(min(kl, 10.0) for kl in kls) / len(tokens)
        term -= entropy_coef * sum(entropy[i][t] for t in tokens) / len(tokens)
        terms.append(weight[i] * term)
    return sum(terms) / len(terms)


def random_case(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 6)), int(rng.integers(2, 12)))
    mask = rng.random(shape) < 0.5
    mask[:, int(rng.integers(0, shape[1]))] = True
    logp = -rng.exponential(2.0, shape)
    return {
        "logp": logp,
        "old": logp + rng.normal(0, 0.1, shape),
        "ref": logp + rng.normal(0, 2.0, shape),
        "entropy": rng.random(shape),
        "mask": mask,
        "advantage": rng.normal(0, 1, shape[0]),
        "weight": rng.random(shape[0]) * 2,
    }


def torch_gspo(case: dict[str, np.ndarray], logp: torch.Tensor, **changes) -> GspoLoss:
    arguments = {
        "clip_low": 0.02,
        "clip_high": 0.03,
        "ref_logprobs_BT": torch.from_numpy(case["ref"]),
        "kl_coef": 0.05,
        "entropy_BT": torch.from_numpy(case["entropy"]),
        "entropy_coef": 0.01,
        "weights_B": torch.from_numpy(case["weight"]),
    }
    return gspo_loss(
        logp,
        torch.from_numpy(case["old"]),
        torch.from_numpy(case["advantage"]),
        torch.from_numpy(case["mask"]),
        **{**arguments, **changes},
    )


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_gspo_equals_the_formula_written_out_in_float64(seed: int):
    case = random_case(seed)
    expected = plain_gspo(
        case["logp"], case["old"], case["advantage"], case["mask"], low=0.02, high=0.03, ref=case["ref"],
        kl_coef=0.05, entropy=case["entropy"], entropy_coef=0.01, weight=case["weight"],
    )  # fmt: skip
    assert float(torch_gspo(case, torch.from_numpy(case["logp"])).loss) == pytest.approx(expected, rel=1e-10, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_gspo_gradient_equals_finite_differences(seed: int):
    case = random_case(seed)
    logp = torch.from_numpy(case["logp"]).clone().requires_grad_()
    # Away from the edges of the clip and of the KL's cut, where there is no derivative to compare.
    ratios = torch_gspo(case, logp).ratio_B.numpy()
    if np.any(np.abs(ratios - 0.98) < 1e-3) or np.any(np.abs(ratios - 1.03) < 1e-3):
        return
    kls = np.exp(case["ref"] - case["logp"]) - (case["ref"] - case["logp"]) - 1
    if np.any(np.abs(kls - 10) < 1e-2):
        return
    torch_gspo(case, logp).loss.backward()
    assert logp.grad is not None
    step = 1e-6
    for index in np.ndindex(*case["logp"].shape):
        up, down = torch.from_numpy(case["logp"]).clone(), torch.from_numpy(case["logp"]).clone()
        up[index] += step
        down[index] -= step
        numeric = float(torch_gspo(case, up).loss - torch_gspo(case, down).loss) / (2 * step)
        assert float(logp.grad[index]) == pytest.approx(numeric, abs=1e-6)


def test_gspo_by_hand():
    # Two response tokens, differences 0.2 and 0.0: s = exp(0.1) = 1.10517. Advantage 2, clip at 1.05: 2 * 1.05.
    result = gspo_loss(
        double([[-9.0, -0.8, -1.0]]),
        double([[-1.0, -1.0, -1.0]]),
        double([2.0]),
        torch.tensor([[0, 1, 1]]),
        clip_low=0.05,
        clip_high=0.05,
    )
    assert float(result.ratio_B[0]) == pytest.approx(1.1051709, abs=1e-6)
    assert float(result.loss) == pytest.approx(-2.1)
    assert result.is_clipped_B.tolist() == [True]


def test_gspo_does_not_clip_what_makes_a_bad_sequence_likelier():
    # A = -1, s = exp(0.1): min(-1.10517, -1.05) is the unclipped one, so the policy is still pushed back.
    result = gspo_loss(
        double([[-0.9]]), double([[-1.0]]), double([-1.0]), torch.ones(1, 1), clip_low=0.05, clip_high=0.05
    )
    assert float(result.loss) == pytest.approx(1.1051709, abs=1e-6)
    assert result.is_clipped_B.tolist() == [False]


def test_a_clipped_sequence_gets_no_gradient():
    logp = double([[-0.9], [-1.0]]).requires_grad_()
    result = gspo_loss(
        logp, double([[-1.0], [-1.0]]), double([1.0, 1.0]), torch.ones(2, 1), clip_low=0.05, clip_high=0.05
    )
    result.loss.backward()
    assert logp.grad is not None
    assert logp.grad[:, 0].tolist() == pytest.approx([0.0, -0.5])


def test_the_first_step_on_fresh_samples_is_the_policy_gradient():
    # s = 1 everywhere: d loss / d logp = -A / (B * response tokens).
    logp = double([[-1.0, -2.0], [-0.5, -0.1]]).requires_grad_()
    result = gspo_loss(
        logp, logp.detach().clone(), double([1.5, -0.5]), torch.ones(2, 2), clip_low=1e-3, clip_high=1e-3
    )
    result.loss.backward()
    assert logp.grad is not None
    assert logp.grad.flatten().tolist() == pytest.approx([-0.375, -0.375, 0.125, 0.125])


def test_kl_by_hand_is_averaged_over_response_tokens():
    # ref - logp = ln 2 and 0: k3 = 2 - ln 2 - 1 = 0.306853 and 0; their mean is 0.153426.
    result = gspo_loss(
        double([[-1.0 - math.log(2), -1.0, -5.0]]),
        double([[-1.0, -1.0, -1.0]]),
        double([0.0]),
        torch.tensor([[1, 1, 0]]),
        clip_low=0.1,
        clip_high=0.1,
        ref_logprobs_BT=double([[-1.0, -1.0, 700.0]]),
        kl_coef=0.5,
    )
    assert float(result.kl_B[0]) == pytest.approx(0.1534264, abs=1e-6)
    assert float(result.loss) == pytest.approx(0.0767132, abs=1e-6)


def test_one_runaway_token_cannot_be_the_whole_kl():
    result = gspo_loss(
        double([[-30.0]]),
        double([[-30.0]]),
        double([0.0]),
        torch.ones(1, 1),
        clip_low=0.1,
        clip_high=0.1,
        ref_logprobs_BT=double([[-0.1]]),
        kl_coef=1.0,
    )
    assert float(result.loss) == 10.0


def test_what_lies_outside_the_mask_changes_nothing():
    case = random_case(7)
    first = torch_gspo(case, torch.from_numpy(case["logp"])).loss
    outside = ~case["mask"]
    for name in ("logp", "old", "ref", "entropy"):
        case[name] = np.where(outside, 123.0, case[name])
    assert float(torch_gspo(case, torch.from_numpy(case["logp"])).loss) == float(first)


def test_a_weight_scales_its_sequence_and_not_the_number_of_sequences():
    arguments = (double([[-1.0], [-1.0]]), double([[-1.0], [-1.0]]), double([1.0, 1.0]), torch.ones(2, 1))
    full = gspo_loss(*arguments, clip_low=0.1, clip_high=0.1)
    half = gspo_loss(*arguments, clip_low=0.1, clip_high=0.1, weights_B=double([1.0, 0.5]))
    assert float(full.loss) == -1.0
    assert float(half.loss) == -0.75


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_parts_of_a_batch_add_up_to_the_batch(seed: int):
    case = random_case(seed)
    whole = torch_gspo(case, torch.from_numpy(case["logp"])).loss
    count = len(case["logp"])
    parts = 0.0
    for row in range(count):
        single = {name: array[row : row + 1] for name, array in case.items()}
        parts += float(torch_gspo(single, torch.from_numpy(single["logp"]), num_sequences=count).loss)
    assert parts == pytest.approx(float(whole), rel=1e-12, abs=1e-12)


def test_sft_loss_by_hand():
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]])
    assert float(sft_loss(double([[-9.0, -1.0, -2.0], [-9.0, -9.0, -3.0]]), mask)) == pytest.approx(2.0)


def test_sft_parts_add_up_by_tokens_and_not_by_sequences():
    logp, mask = double([[-1.0, -2.0], [-3.0, -9.0]]), torch.tensor([[1, 1], [1, 0]])
    parts = [sft_loss(logp[row : row + 1], mask[row : row + 1], num_tokens=3) for row in range(2)]
    assert float(sum(parts)) == pytest.approx(float(sft_loss(logp, mask))) == pytest.approx(2.0)


def test_token_logprobs_and_entropy_by_hand():
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
