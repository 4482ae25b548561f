"""GSPO's and GRPO's losses and gradients against TRL's own, on random ragged batches with masks.

TRL's `GRPOTrainer._compute_loss` runs unchanged, with a stub for the trainer that only holds settings and returns
log-probabilities. TRL differs from us in two things: its entropy bonus is always a mean over tokens, so it is compared
under token_mean alone, and its importance weights are computed elsewhere, so they are given to it
(test_importance.py compares them).
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from osworld_pipeline.training.objective.loss import PolicyLoss, policy_loss

pytestmark = pytest.mark.slow

NUM_BATCHES = 24
MAX_RESPONSE_TOKENS = 11
CLIP_LOW, CLIP_HIGH = 0.02, 0.03
LEVELS = {"gspo": "sequence", "grpo": "token"}
LENGTH_NORMS = {"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "constant"}
"""TRL's loss types as length norms."""


@pytest.fixture(scope="module")
def trl_loss():
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")
    return grpo_trainer.GRPOTrainer._compute_loss


class Case:
    """A ragged batch: sequences end at different places, and have holes where an observation stands."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        count, length = 1 + seed % 6, 3 + seed % 9
        ends = torch.randint(1, length + 1, (count,), generator=generator)
        self.completion_mask = (torch.arange(length)[None] < ends[:, None]).long()
        self.tool_mask = (torch.rand(count, length, generator=generator) < 0.7).long()
        self.tool_mask[:, 0] = 1
        self.mask = self.completion_mask * self.tool_mask
        logp = -normal(count, length).abs() - 0.1
        self.logp = logp.to(dtype).requires_grad_()
        self.old = (logp + 0.05 * normal(count, length)).to(dtype)
        self.sampler = (self.old + 0.1 * normal(count, length)).to(dtype)
        self.ref = (logp + 0.5 * normal(count, length)).to(dtype)
        self.entropy = normal(count, length).abs().to(dtype).requires_grad_()
        self.advantages = normal(count).to(dtype)

    def gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, [self.logp, self.entropy], allow_unused=True, materialize_grads=True))


def stand_in(case: Case, *, level: str, loss_type: str, beta: float, entropy_coef: float, has_weights: bool) -> Any:
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (case.logp, case.entropy, None),
        _metrics={"train": defaultdict(list)},
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        importance_sampling_level=level,
        loss_type=loss_type,
        beta=beta,
        epsilon_low=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        entropy_coef=entropy_coef,
        _entropy_bonus_enabled=entropy_coef > 0,
        use_adaptive_entropy=False,
        max_completion_length=MAX_RESPONSE_TOKENS,
        current_gradient_accumulation_steps=1,
        use_vllm=has_weights,
        vllm_importance_sampling_correction=has_weights,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
    )


def trl_inputs(case: Case, importance: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    prompt = torch.ones(len(case.mask), 1, dtype=torch.long)
    return {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.zeros_like(case.mask),
        "completion_mask": case.completion_mask,
        "tool_mask": case.tool_mask,
        "advantages": case.advantages,
        "old_per_token_logps": case.old,
        "ref_per_token_logps": case.ref,
        "importance_sampling_ratio": importance,
        "num_items_in_batch": case.mask.sum(),
    }


def our_loss(case: Case, algorithm: str, loss_type: str, *, beta: float = 0.0, entropy_coef: float = 0.0, **choices):
    return policy_loss(
        case.logp,
        case.old,
        case.advantages,
        case.mask,
        algorithm=algorithm,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        length_norm=LENGTH_NORMS[loss_type],
        max_response_tokens=MAX_RESPONSE_TOKENS,
        ref_logprobs_BT=case.ref if beta else None,
        kl_coef=beta,
        entropy_BT=case.entropy,
        entropy_coef=entropy_coef,
        **choices,
    )


def assert_equal(case: Case, ours: PolicyLoss, theirs: torch.Tensor, *, atol: float) -> None:
    assert float(ours.loss.detach()) == pytest.approx(float(theirs.detach()), rel=0, abs=atol)
    for mine, other in zip(case.gradients(ours.loss), case.gradients(theirs), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=atol)


@pytest.mark.parametrize("loss_type", LENGTH_NORMS)
@pytest.mark.parametrize("algorithm", LEVELS)
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["f64", "f32"])
def test_loss_and_gradient_equal_trls(trl_loss, loss_type: str, algorithm: str, beta: float, dtype, atol: float):
    num_clipped = 0.0
    for seed in range(NUM_BATCHES):
        case = Case(seed, dtype)
        settings = {"level": LEVELS[algorithm], "loss_type": loss_type, "beta": beta, "entropy_coef": 0.0}
        theirs = trl_loss(stand_in(case, **settings, has_weights=False), None, trl_inputs(case, None))
        ours = our_loss(case, algorithm, loss_type, beta=beta)
        assert_equal(case, ours, theirs, atol=atol)
        num_clipped += float(ours.clipped_B.sum())
    assert num_clipped > 1


@pytest.mark.parametrize("algorithm", LEVELS)
def test_the_entropy_bonus_equals_trls_under_token_mean(trl_loss, algorithm: str):
    for seed in range(NUM_BATCHES):
        case = Case(seed, torch.float64)
        settings = {"level": LEVELS[algorithm], "loss_type": "dapo", "beta": 0.04, "entropy_coef": 0.01}
        theirs = trl_loss(stand_in(case, **settings, has_weights=False), None, trl_inputs(case, None))
        assert_equal(case, our_loss(case, algorithm, "dapo", beta=0.04, entropy_coef=0.01), theirs, atol=1e-12)


@pytest.mark.parametrize("loss_type", LENGTH_NORMS)
@pytest.mark.parametrize("algorithm", LEVELS)
@pytest.mark.parametrize("weighs", ["tokens", "sequences"])
def test_importance_weights_enter_the_loss_as_trls_do(trl_loss, loss_type: str, algorithm: str, weighs: str):
    for seed in range(NUM_BATCHES):
        case = Case(seed, torch.float64)
        weights = torch.exp(case.old - case.sampler).clamp(max=1.05)
        if weighs == "sequences":
            weights = weights[:, :1].expand(weights.shape)
        settings = {"level": LEVELS[algorithm], "loss_type": loss_type, "beta": 0.04, "entropy_coef": 0.0}
        theirs = trl_loss(stand_in(case, **settings, has_weights=True), None, trl_inputs(case, weights))
        ours = our_loss(case, algorithm, loss_type, beta=0.04, importance_BT=weights)
        assert_equal(case, ours, theirs, atol=1e-12)
