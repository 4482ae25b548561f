"""The policy losses on random ragged batches: against the formulas written out in plain float64 loops, against finite
differences, and in parts."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from osworld_pipeline.training.objective.loss import PolicyLoss, policy_loss

CLIP = {"clip_low": 0.02, "clip_high": 0.03}
COEFS = {"kl_coef": 0.05, "entropy_coef": 0.01}
CAP = 1.05
MAX_RESPONSE_TOKENS = 7
CHOICES = list(
    itertools.product(("gspo", "grpo"), ("sequence_mean", "token_mean", "constant"), ("k1", "k2", "k3"), (None, CAP))
)


def random_case(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 6)), int(rng.integers(2, 12)))
    mask = rng.random(shape) < 0.5
    mask[:, int(rng.integers(0, shape[1]))] = True
    logp = -rng.exponential(2.0, shape)
    old = logp + rng.normal(0, 0.1, shape)
    return {
        "logp": logp,
        "old": old,
        "importance": np.exp(rng.normal(0, 0.1, shape)),
        "ref": logp + rng.normal(0, 2.0, shape),
        "entropy": rng.random(shape),
        "mask": mask,
        "advantage": rng.normal(0, 1, shape[0]),
        "weight": rng.random(shape[0]) * 2,
    }


def plain_loss(case, algorithm: str, length_norm: str, estimator: str, cap: float | None) -> float:
    """One loop per sequence and token, straight from the published formulas."""
    total, num_tokens = 0.0, 0
    for i in range(len(case["logp"])):
        tokens = [t for t in range(case["mask"].shape[1]) if case["mask"][i, t]]
        logs = [case["logp"][i, t] - case["old"][i, t] for t in tokens]
        if algorithm == "gspo":
            logs = [sum(logs) / len(logs)] * len(logs)
        terms = []
        for t, log in zip(tokens, logs, strict=True):
            ratio, advantage = math.exp(log), case["advantage"][i]
            clipped = min(max(ratio, 1 - CLIP["clip_low"]), 1 + CLIP["clip_high"])
            term = -min(ratio * advantage, clipped * advantage) * (
                1.0 if cap is None else min(case["importance"][i, t], cap)
            )
            d = case["ref"][i, t] - case["logp"][i, t]
            kl = {"k1": -d, "k2": d * d / 2, "k3": min(math.exp(d) - d - 1, 10.0)}[estimator]
            terms.append(term + COEFS["kl_coef"] * kl - COEFS["entropy_coef"] * case["entropy"][i, t])
        share = sum(terms) / len(tokens) if length_norm == "sequence_mean" else sum(terms)
        total += case["weight"][i] * share
        num_tokens += len(tokens)
    count = len(case["logp"])
    return (
        total / {"sequence_mean": count, "token_mean": num_tokens, "constant": count * MAX_RESPONSE_TOKENS}[length_norm]
    )


def torch_loss(case, logp: torch.Tensor, choice, *, entropy: torch.Tensor | None = None, **changes) -> PolicyLoss:
    algorithm, length_norm, estimator, cap = choice
    return policy_loss(
        logp,
        torch.from_numpy(case["old"]),
        torch.from_numpy(case["advantage"]),
        torch.from_numpy(case["mask"]),
        algorithm=algorithm,
        length_norm=length_norm,
        max_response_tokens=MAX_RESPONSE_TOKENS,
        ref_logprobs_BT=torch.from_numpy(case["ref"]),
        kl_estimator=estimator,
        entropy_BT=torch.from_numpy(case["entropy"]) if entropy is None else entropy,
        importance_BT=None if cap is None else torch.from_numpy(case["importance"]).clamp(max=cap),
        weights_B=torch.from_numpy(case["weight"]),
        **CLIP,
        **COEFS,
        **changes,
    )


@settings(max_examples=300, deadline=None)
@given(choice=st.sampled_from(CHOICES), seed=st.integers(0, 10**6))
def test_loss_equals_the_formula_written_out_in_float64(choice, seed: int):
    case = random_case(seed)
    result = torch_loss(case, torch.from_numpy(case["logp"]), choice)
    assert float(result.loss) == pytest.approx(plain_loss(case, *choice), rel=1e-10, abs=1e-12)


def is_near_an_edge(case, algorithm: str) -> bool:
    """At the edge of a clip or of the cut of k3 there is no derivative to compare with."""
    logs = np.where(case["mask"], case["logp"] - case["old"], 0.0)
    if algorithm == "gspo":
        logs = logs.sum(-1) / case["mask"].sum(-1)
    edges = np.abs(np.exp(logs)[..., None] - [1 - CLIP["clip_low"], 1 + CLIP["clip_high"]])
    diff = case["ref"] - case["logp"]
    return bool(edges.min() < 1e-4 or np.abs(np.exp(diff) - diff - 1 - 10).min() < 1e-3)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_gradient_equals_finite_differences(choice):
    seed = next(seed for seed in range(CHOICES.index(choice), 100) if not is_near_an_edge(random_case(seed), choice[0]))
    case = random_case(seed)
    leaves = [torch.from_numpy(case[name]).clone().requires_grad_() for name in ("logp", "entropy")]
    assert torch.autograd.gradcheck(
        lambda logp, entropy: torch_loss(case, logp, choice, entropy=entropy).loss, leaves, eps=1e-7
    )


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_parts_of_a_batch_add_up_to_the_batch_in_loss_and_gradient(choice):
    for seed in range(4):
        case = random_case(seed)
        whole = torch.from_numpy(case["logp"]).clone().requires_grad_()
        loss = torch_loss(case, whole, choice).loss
        loss.backward()
        parts, total = whole.detach().clone().requires_grad_(), 0.0
        counts = {"num_sequences": len(case["logp"]), "num_tokens": int(case["mask"].sum())}
        for rows in np.array_split(np.arange(len(case["logp"])), 2):
            if len(rows):
                part = torch_loss({name: array[rows] for name, array in case.items()}, parts[rows], choice, **counts)
                part.loss.backward()
                total += float(part.loss.detach())
        assert total == pytest.approx(float(loss.detach()), rel=1e-12, abs=1e-12)
        assert whole.grad is not None
        assert parts.grad is not None
        assert torch.allclose(parts.grad, whole.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_values_outside_the_mask_change_neither_loss_nor_gradient(choice):
    case = random_case(7)
    outside = ~case["mask"]
    assert outside.any()

    def run() -> tuple[float, torch.Tensor]:
        logp = torch.from_numpy(case["logp"]).clone().requires_grad_()
        loss = torch_loss(case, logp, choice).loss
        loss.backward()
        assert logp.grad is not None
        return float(loss.detach()), logp.grad

    loss, gradient = run()
    for anything in (123.0, -math.inf, math.inf, math.nan):
        for name in ("logp", "old", "importance", "ref", "entropy"):
            case[name] = np.where(outside, anything, case[name])
        again, gradient_again = run()
        assert again == loss
        assert torch.equal(gradient_again, gradient)
        assert not gradient_again[torch.from_numpy(outside)].any()
