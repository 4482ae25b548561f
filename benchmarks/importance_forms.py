"""What each importance form makes of stale samples: bias and noise of the update, and the effective share of the batch.

The policy samples each token from a categorical distribution of its own, which depends on the token before it or does
not. The reward is a sum over pairs of neighbours, so that the on-policy gradient is known exactly (by dynamic
programming), and 40,000 sampled sequences show the rest. The sampler's logits differ from the trainer's by normal
noise, which stands for rounding or for older weights.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from benchmarks.spread import print_table
from osworld_pipeline.recipes.training_sections import ImportanceForm
from osworld_pipeline.training.importance import importance_weights

NUM_SEQUENCES, BATCH, VOCAB = 40_000, 64, 8
LENGTHS = (20, 200, 1000)
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
    """Of the mean update: norm of its difference to the on-policy gradient, over that gradient's norm."""
    noise: float
    """Standard deviation of the update of a batch of 64 sequences, over the same norm."""
    effective_share: float


def run_forms(console: Console, *, seed: int = 0) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for is_dependent, length in itertools.product((False, True), LENGTHS):
        rows = []
        for drift in DRIFTS:
            outcomes = {
                name: measure(length, drift, form, low, high, seed, is_dependent=is_dependent)
                for name, form, low, high in FORMS
            }
            rows += [
                (f"{drift:g}", name, f"{one.bias:.1%}", f"{one.noise:.2f}", f"{one.effective_share:.1%}")
                for name, one in outcomes.items()
            ]
            results += [
                {
                    "bench": "importance", "dependent": is_dependent, "length": length, "drift": drift, "form": name,
                    **vars(one),
                }
                for name, one in outcomes.items()
            ]  # fmt: skip
        which = "that depend on the one before" if is_dependent else "that depend on none before"
        print_table(
            console,
            f"Sequences of {length} tokens {which}, {NUM_SEQUENCES:,} of them",
            ("mean |log ratio|", "form", "bias", f"noise of {BATCH}", "effective share"),
            rows,
        )
    return results


def measure(
    length: int, drift: float, form: ImportanceForm, low: float, high: float, seed: int, *, is_dependent: bool
) -> Outcome:
    chain = Chain.draw(length, drift, seed, is_dependent=is_dependent)
    before_BL, tokens_BL = chain.sample(NUM_SEQUENCES)
    places = torch.arange(length)
    log_ratio = (chain.trainer - chain.sampler)[places, before_BL, tokens_BL]
    episodes = torch.arange(NUM_SEQUENCES)[:, None].expand(log_ratio.shape)
    weights = importance_weights(log_ratio.flatten(), episodes.flatten(), form=form, low=low, high=high)
    advantages = chain.rewards[places, before_BL, tokens_BL].sum(-1) - chain.values[0, 0]
    # The update's pull on the logits (L, before, V) of a sampled token is weight (1[token] - p) advantage.
    pulls = weights.weights_N.view(log_ratio.shape) * advantages[:, None]
    probs = chain.trainer.exp()
    mean = _summed(places, before_BL, tokens_BL, pulls, chain) / NUM_SEQUENCES
    mean = mean - probs * mean.sum(-1, keepdim=True)
    square = _summed(places, before_BL, tokens_BL, pulls.square(), chain)
    second = (square * (1 - 2 * probs) + probs.square() * square.sum(-1, keepdim=True)) / NUM_SEQUENCES
    variance = (second - mean.square()).clamp(min=0).sum()
    exact = chain.exact_gradient()
    norm = float(exact.norm())
    # Of the squared distance to the exact gradient, what the sampling of the mean itself adds is taken away.
    distance = float((mean - exact).square().sum() - variance / NUM_SEQUENCES)
    return Outcome(
        bias=math.sqrt(max(0.0, distance)) / norm,
        noise=math.sqrt(float(variance) / BATCH) / norm,
        effective_share=weights.effective_share,
    )


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Tables (L, before, V): by place, the token before (0 at the first place), and the token. Where tokens depend on
    none before, `before` has one row, 0."""

    trainer: torch.Tensor
    """Log-probabilities."""
    sampler: torch.Tensor
    rewards: torch.Tensor
    values: torch.Tensor
    """(L + 1, before): the reward to be expected from a place on, by the token before it, under the trainer."""
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
        # A log ratio is the difference of two log-softmaxes: the noise of one logit less that of their mean.
        noise = table() * drift * math.sqrt(math.pi / 2)
        trainer = torch.log_softmax(logits, -1)
        values = torch.zeros(length + 1, rows)
        for place in reversed(range(length)):
            values[place] = (trainer[place].exp() * (rewards[place] + values[place + 1])).sum(-1)
        sampler = torch.log_softmax(logits + noise, -1)
        return cls(trainer=trainer, sampler=sampler, rewards=rewards, values=values, generator=generator)

    def sample(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens before and the tokens, (B, L) each, by the sampler."""
        before, tokens = [torch.zeros(count, dtype=torch.long)], []
        for probs in self.sampler.exp():
            tokens.append(torch.multinomial(probs[before[-1]], 1, generator=self.generator)[:, 0])
            before.append(tokens[-1] if self.is_dependent else before[0])
        return torch.stack(before[:-1], 1), torch.stack(tokens, 1)

    def exact_gradient(self) -> torch.Tensor:
        """(L, before, V): how likely the token before is, times p, times how much better the token is than its
        place's value. (Policy gradient theorem, Sutton et al. 1999.)"""
        reached = torch.zeros(self.trainer.shape[1])
        reached[0] = 1.0
        gradient = torch.zeros_like(self.trainer)
        for place, logprobs in enumerate(self.trainer):
            probs = logprobs.exp()
            gains = self.rewards[place] + self.values[place + 1] - self.values[place][:, None]
            gradient[place] = reached[:, None] * probs * gains
            reached = reached @ probs if self.is_dependent else reached
        return gradient


def _summed(
    places: torch.Tensor, before_BL: torch.Tensor, tokens_BL: torch.Tensor, pulls_BL: torch.Tensor, chain: Chain
) -> torch.Tensor:
    where = (places.expand(before_BL.shape).flatten(), before_BL.flatten(), tokens_BL.flatten())
    return torch.zeros_like(chain.trainer).index_put(where, pulls_BL.flatten(), accumulate=True)
