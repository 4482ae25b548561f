"""The effect of each importance form on stale samples: bias and noise of the update, and the effective share of the
batch.

The policy samples each token from a separate categorical distribution, which may depend on the token before it. The
reward is a sum over pairs of neighbours, so the on-policy gradient is computed exactly by dynamic programming; the
other quantities are estimated from many sampled sequences. The sampler's logits differ from the trainer's by normal
noise, which represents rounding or older weights.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from benchmarks.spread import print_table
from osworld_pipeline.recipes.training_sections import ImportanceForm
from osworld_pipeline.training.objective.importance import importance_weights

BATCH, VOCAB = 64, 8
NUM_SEQUENCES = {20: 400_000, 200: 200_000, 1000: 40_000}
"""Number of sequences by their length in tokens."""
DRIFTS = (0.0002, 0.01, 0.05, 0.2)
"""Mean |log ratio| of a token: bfloat16's rounding, and one to many updates between sampler and trainer."""
FORMS: tuple[tuple[str, ImportanceForm, float, float], ...] = (
    ("none", "none", 0.0, 2.0),
    ("token_truncate 2", "token_truncate", 0.0, 2.0),
    ("token_mask 0.5..2", "token_mask", 0.5, 2.0),
    ("sequence_truncate 2", "sequence_truncate", 0.0, 2.0),
    ("sequence_mask 0..3", "sequence_mask", 0.0, 3.0),
    ("sequence_reject 0.99..1.01", "sequence_reject", 0.99, 1.01),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    bias: float
    """Bias of the mean update: norm of its difference to the on-policy gradient, over that gradient's norm."""
    resolution: float
    """A smaller bias cannot be distinguished from 0: one standard deviation of its square, as a bias."""
    noise: float
    """Standard deviation of the update of a batch of 64 sequences, over the same norm."""
    effective_share: float


def run_forms(console: Console, *, seed: int = 0) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for is_dependent, length in itertools.product((False, True), NUM_SEQUENCES):
        rows = []
        for drift in DRIFTS:
            samples = Samples.draw(NUM_SEQUENCES[length], length, drift, seed, is_dependent=is_dependent)
            for name, form, low, high in FORMS:
                one = samples.measure(form, low, high)
                rows.append(
                    (
                        f"{drift:g}",
                        name,
                        f"{one.bias:.1%}",
                        f"{one.resolution:.1%}",
                        f"{one.noise:.2f}",
                        f"{one.effective_share:.1%}",
                    )
                )
                key = {"dependent": is_dependent, "length": length, "drift": drift, "form": name}
                results.append({"bench": "importance", **key, **vars(one)})
        which = "that depend on the previous one" if is_dependent else "that are independent"
        print_table(
            console,
            f"Sequences of {length} tokens {which}, {NUM_SEQUENCES[length]:,} of them",
            ("mean |log ratio|", "form", "bias", "resolution", f"noise of {BATCH}", "effective share"),
            rows,
        )
    return results


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Sequences (B, L) of one chain's sampler, used to measure every form."""

    chain: "Chain"
    cells_BL: torch.Tensor
    """Index of each token in the flattened tables of the chain."""
    log_ratio_BL: torch.Tensor
    advantages_B: torch.Tensor

    @classmethod
    def draw(cls, count: int, length: int, drift: float, seed: int, *, is_dependent: bool) -> "Samples":
        chain = Chain.draw(length, drift, seed, is_dependent=is_dependent)
        cells_BL = chain.sample(count)
        return cls(
            chain=chain,
            cells_BL=cells_BL,
            log_ratio_BL=(chain.trainer - chain.sampler).flatten()[cells_BL],
            advantages_B=chain.rewards.flatten()[cells_BL].sum(-1) - chain.values[0, 0],
        )

    def measure(self, form: ImportanceForm, low: float, high: float) -> Outcome:
        count = len(self.advantages_B)
        episodes = torch.arange(count)[:, None].expand(self.log_ratio_BL.shape).flatten()
        weights = importance_weights(self.log_ratio_BL.flatten(), episodes, form=form, low=low, high=high)
        # The update's pull on the logits (L, before, V) of a sampled token is weight (1[token] - p) advantage.
        pulls_BL = weights.weights_N.view(self.log_ratio_BL.shape) * self.advantages_B[:, None]
        probs = self.chain.trainer.double().exp()
        mean = self._summed(pulls_BL) / count
        mean = mean - probs * mean.sum(-1, keepdim=True)
        square = self._summed(pulls_BL.square())
        second = (square * (1 - 2 * probs) + probs.square() * square.sum(-1, keepdim=True)) / count
        variance = (second - mean.square()).clamp(min=0)
        exact = self.chain.exact_gradient()
        norm = float(exact.norm())
        # Subtract the variance of the sampled mean from the squared distance to the exact gradient.
        distance = float((mean - exact).square().sum() - variance.sum() / count)
        return Outcome(
            bias=math.sqrt(max(0.0, distance)) / norm,
            resolution=(2 * float((variance / count).square().sum())) ** 0.25 / norm,
            noise=math.sqrt(float(variance.sum()) / BATCH) / norm,
            effective_share=weights.effective_share,
        )

    def _summed(self, pulls_BL: torch.Tensor) -> torch.Tensor:
        """(L, before, V)."""
        table = self.chain.trainer
        sums = torch.bincount(self.cells_BL.flatten(), weights=pulls_BL.flatten(), minlength=table.numel())
        return sums.view(table.shape)


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Tables (L, before, V): by position, the previous token (0 at the first position), and the token. For independent
    tokens `before` has one row, 0."""

    trainer: torch.Tensor
    """Log-probabilities."""
    sampler: torch.Tensor
    rewards: torch.Tensor
    values: torch.Tensor
    """(L + 1, before): the expected reward from a position on, by the previous token, under the trainer."""
    generator: torch.Generator

    @property
    def is_dependent(self) -> bool:
        return self.trainer.shape[1] > 1

    @classmethod
    def draw(cls, length: int, drift: float, seed: int, *, is_dependent: bool) -> "Chain":
        generator = torch.Generator().manual_seed(seed)
        rows = VOCAB if is_dependent else 1

        def table() -> torch.Tensor:
            return torch.randn(length, rows, VOCAB, generator=generator)

        logits, rewards = table(), table() / math.sqrt(length)
        # A log ratio is the difference of two log-softmaxes: the noise of one logit minus the mean noise.
        noise = table() * drift * math.sqrt(math.pi / 2)
        trainer = torch.log_softmax(logits, -1)
        values = torch.zeros(length + 1, rows)
        for place in reversed(range(length)):
            values[place] = (trainer[place].exp() * (rewards[place] + values[place + 1])).sum(-1)
        sampler = torch.log_softmax(logits + noise, -1)
        return cls(trainer=trainer, sampler=sampler, rewards=rewards, values=values, generator=generator)

    def sample(self, count: int) -> torch.Tensor:
        """Sample `count` sequences from the sampler; returns their cells (count, L) in the flattened tables."""
        before, cells = torch.zeros(count, dtype=torch.long), []
        for place, probs in enumerate(self.sampler.exp()):
            tokens = torch.multinomial(probs[before], 1, generator=self.generator)[:, 0]
            cells.append((place * len(probs) + before) * VOCAB + tokens)
            before = tokens if self.is_dependent else before
        return torch.stack(cells, 1)

    def exact_gradient(self) -> torch.Tensor:
        """(L, before, V): the probability of the previous token, times p, times the advantage of the token over the
        value of its position. (Policy gradient theorem, Sutton et al. 1999.)"""
        reached = torch.zeros(self.trainer.shape[1])
        reached[0] = 1.0
        gradient = torch.zeros_like(self.trainer)
        for place, logprobs in enumerate(self.trainer):
            probs = logprobs.exp()
            gains = self.rewards[place] + self.values[place + 1] - self.values[place][:, None]
            gradient[place] = reached[:, None] * probs * gains
            reached = reached @ probs if self.is_dependent else reached
        return gradient
