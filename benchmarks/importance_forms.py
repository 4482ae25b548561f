"""What each importance form makes of stale samples: bias and noise of the update, and the effective share of the batch.

The policy samples each token of a sequence from a categorical distribution of its own, and the reward is a sum over
tokens, so that the on-policy gradient is known exactly and 40,000 sampled sequences show the rest. The sampler's logits
differ from the trainer's by normal noise, which stands for rounding or for older weights.
"""

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
    for length in LENGTHS:
        rows = []
        for drift in DRIFTS:
            outcomes = {name: measure(length, drift, form, low, high, seed) for name, form, low, high in FORMS}
            rows += [
                (f"{drift:g}", name, f"{one.bias:.1%}", f"{one.noise:.2f}", f"{one.effective_share:.1%}")
                for name, one in outcomes.items()
            ]
            results += [
                {"bench": "importance", "length": length, "drift": drift, "form": name, **vars(one)}
                for name, one in outcomes.items()
            ]
        print_table(
            console,
            f"Sequences of {length} tokens, {NUM_SEQUENCES:,} of them",
            ("mean |log ratio|", "form", "bias", f"noise of {BATCH}", "effective share"),
            rows,
        )
    return results


def measure(length: int, drift: float, form: ImportanceForm, low: float, high: float, seed: int) -> Outcome:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(length, VOCAB, generator=generator)
    rewards = torch.randn(length, VOCAB, generator=generator) / math.sqrt(length)
    trainer = torch.log_softmax(logits, -1)
    # A log ratio is the difference of two log-softmaxes: the noise of one logit less that of their mean.
    noise = torch.randn(length, VOCAB, generator=generator) * drift * math.sqrt(math.pi / 2)
    sampler = torch.log_softmax(logits + noise, -1)
    tokens = torch.multinomial(sampler.exp(), NUM_SEQUENCES, replacement=True, generator=generator).T  # (B, L)
    places = torch.arange(length)
    log_ratio = (trainer - sampler)[places, tokens]
    episodes = torch.arange(NUM_SEQUENCES)[:, None].expand(log_ratio.shape)
    weights = importance_weights(log_ratio.flatten(), episodes.flatten(), form=form, low=low, high=high)
    # The update's pull on the logit of each token is weight (1[token] - p) advantage / L; its projection on the exact
    # gradient's space is looked at through the per-place, per-token table.
    values = rewards[places, tokens]
    advantages = values.sum(-1) - (trainer.exp() * rewards).sum()
    pulls = weights.weights_N.view(log_ratio.shape) * advantages[:, None]
    exact = trainer.exp() * (rewards - (trainer.exp() * rewards).sum(-1, keepdim=True))
    onehot = torch.zeros(length, VOCAB).index_put(
        (places.expand(NUM_SEQUENCES, -1).flatten(), tokens.flatten()), pulls.flatten(), accumulate=True
    )
    mean = (onehot - trainer.exp() * pulls.sum(0)[:, None]) / NUM_SEQUENCES
    square = torch.zeros(length, VOCAB).index_put(
        (places.expand(NUM_SEQUENCES, -1).flatten(), tokens.flatten()), pulls.square().flatten(), accumulate=True
    )
    probs = trainer.exp()
    second = (square * (1 - 2 * probs) + probs.square() * pulls.square().sum(0)[:, None]) / NUM_SEQUENCES
    variance = (second - mean.square()).clamp(min=0).sum()
    norm = float(exact.norm())
    # Of the squared distance to the exact gradient, what the sampling of the mean itself adds is taken away.
    distance = float((mean - exact).square().sum() - variance / NUM_SEQUENCES)
    return Outcome(
        bias=math.sqrt(max(0.0, distance)) / norm,
        noise=math.sqrt(float(variance) / BATCH) / norm,
        effective_share=weights.effective_share,
    )
